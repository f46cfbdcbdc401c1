"""What the controller counts, as Prometheus reads it (text format 0.0.4)."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable

from strop.runtime.contract import FailureKind, State
from strop.runtime.queue import RESOURCES
from strop.runtime.sessions import Sessions

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_PREFIX = "strop_runtime"
_HELP = {
    "sandboxes": ("gauge", "Sandboxes that live, by state and node."),
    "queue_length": ("gauge", "Sandboxes that wait for a slot."),
    "queue_age_seconds": ("gauge", "Age of the one that has waited longest."),
    "nodes": ("gauge", "Nodes that report, by whether they take new sandboxes."),
    "node_capacity": ("gauge", "What a node has, by resource; processors times the promised factor."),
    "node_used": ("gauge", "What of it is given out."),
    "starts_total": ("counter", "Sandboxes that were asked for."),
    "ready_total": ("counter", "Times that a sandbox became ready."),
    "ready_after_seconds_sum": ("counter", "Seconds from request to first readiness, over all."),
    "stops_total": ("counter", "Sandboxes that were stopped, by clients and limits."),
    "expired_total": ("counter", "Those of them that a limit ended."),
    "failures_total": ("counter", "Sandboxes that failed, by kind."),
    "pauses_total": ("counter", "Sandboxes that were paused."),
    "resumes_total": ("counter", "Sandboxes that were resumed."),
    "orders_failed_total": ("counter", "Orders that a node did not take."),
    "nodes_lost_total": ("counter", "Nodes that fell silent."),
    "journal_syncs_total": ("counter", "Times that the journal was synced to its disk."),
    "journal_lines_total": ("counter", "Lines that were written to it."),
    "journal_errors_total": ("counter", "Lines that could not be written."),
    "bugs_total": ("counter", "Mistakes of this program that its log has."),
}
_COUNTS = {
    "starts_total": "starts",
    "ready_total": f"entered_{State.READY}",
    "ready_after_seconds_sum": "ready_after_s",
    "stops_total": f"entered_{State.STOPPED}",
    "expired_total": "expired",
    "pauses_total": "pauses",
    "resumes_total": "resumes",
    "orders_failed_total": "orders_failed",
    "nodes_lost_total": "nodes_lost",
    "journal_errors_total": "journal_errors",
    "bugs_total": "bugs",
}


def render_metrics(sessions: Sessions) -> str:
    """Return all metrics, those that nodes reported behind the controller's own."""
    samples = {name: list(found) for name, found in _sample(sessions).items()}
    lines = []
    for name, (kind, text) in _HELP.items():
        lines += [f"# HELP {_PREFIX}_{name} {text}", f"# TYPE {_PREFIX}_{name} {kind}"]
        lines += [f"{_PREFIX}_{name}{labels} {value:.10g}" for labels, value in samples[name]]
    reported: dict[str, float] = {}
    for node in sessions.placement.nodes.values():
        reported.update(node.report.metrics)
    lines += [f"{name} {value:.10g}" for name, value in sorted(reported.items())]
    return "\n".join(lines) + "\n"


def _sample(sessions: Sessions) -> dict[str, Iterable[tuple[str, float]]]:
    registry, placement = sessions.registry, sessions.placement
    by_state = Counter((one.state.value, one.node_id) for one in registry.alive.values())
    waiting = [one.begun for one in placement.admission]
    age = time.monotonic() - min(waiting) if waiting else 0.0
    by_kind = Counter({kind.value: registry.counts[f"failed_{kind.value}"] for kind in FailureKind})
    is_open = Counter(str(node.is_open).lower() for node in placement.nodes.values())
    rooms = placement.admission.rooms.values()
    return {
        "sandboxes": [(_labels(state=state, node=node), n) for (state, node), n in sorted(by_state.items())],
        "queue_length": [("", len(placement.admission))],
        "queue_age_seconds": [("", age)],
        "nodes": [(_labels(open=word), is_open[word]) for word in ("true", "false")],
        "node_capacity": [
            (_labels(node=room.node_id, resource=name), room.has[name])
            for room in rooms
            for name in RESOURCES
        ],
        "node_used": [
            (_labels(node=room.node_id, resource=name), room.used[name])
            for room in rooms
            for name in RESOURCES
        ],
        "failures_total": [(_labels(kind=kind), count) for kind, count in by_kind.items()],
        "journal_syncs_total": [("", registry.journal.num_syncs)],
        "journal_lines_total": [("", registry.journal.num_written)],
        **{name: [("", registry.counts[key])] for name, key in _COUNTS.items()},
    }


def _labels(**values: str) -> str:
    def escape(value: str) -> str:
        return value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")

    return "{" + ",".join(f'{name}="{escape(value)}"' for name, value in values.items()) + "}"
