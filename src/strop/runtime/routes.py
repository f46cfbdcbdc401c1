"""The controller's routes. Each reads a request, asks `Sessions`, and answers with records.

Metrics are in Prometheus' text format 0.0.4.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, Field, ValidationError
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from strop.runtime.contract import FailureKind, NodeReport, State
from strop.runtime.http_server import HttpError
from strop.runtime.queue import RESOURCES
from strop.runtime.session import Session
from strop.runtime.sessions import Sessions
from strop.runtime.web import read_body
from strop.runtime.wire import make_record, read_runtime_id, read_start

MAX_REPORT_BYTES = 64 << 20
"""For a node with thousands of sandboxes, and the last lines of each."""
MAX_LEASE_S = 7 * 24 * 3600.0
_PREFIX = "strop_runtime"
_METRICS = {
    "sandboxes": ("gauge", "Live sandboxes, by state and node."),
    "queue_length": ("gauge", "Sandboxes that wait for a slot."),
    "queue_age_seconds": ("gauge", "Age of the oldest waiting sandbox."),
    "nodes": ("gauge", "Reporting nodes, by whether they take new sandboxes."),
    "node_capacity": ("gauge", "Resources of a node; processors times the promised factor."),
    "node_used": ("gauge", "Resources that its sandboxes take."),
    "starts_total": ("counter", "Sandboxes that clients requested."),
    "ready_total": ("counter", "Times that a sandbox became ready."),
    "ready_after_seconds_sum": ("counter", "Seconds from request to first readiness, summed over sandboxes."),
    "stops_total": ("counter", "Sandboxes that clients or limits stopped."),
    "expired_total": ("counter", "Sandboxes that a limit stopped."),
    "failures_total": ("counter", "Sandboxes that failed, by kind."),
    "pauses_total": ("counter", "Sandboxes that were paused."),
    "resumes_total": ("counter", "Sandboxes that were resumed."),
    "orders_failed_total": ("counter", "Orders that a node did not take."),
    "nodes_lost_total": ("counter", "Nodes that fell silent."),
    "journal_syncs_total": ("counter", "Times that the journal was synced to its disk."),
    "journal_lines_total": ("counter", "Lines written to the journal."),
    "journal_errors_total": ("counter", "Lines of the journal that could not be written."),
    "bugs_total": ("counter", "Unexpected exceptions; the log has them."),
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

Endpoint = Callable[[Request], Awaitable[Response]]


class LeaseCall(BaseModel):
    """`POST /leases`."""

    lease_s: float = Field(gt=0, le=MAX_LEASE_S, allow_inf_nan=False)
    runtime_ids: list[str] | None = None
    """None: all sandboxes of the owner."""


@dataclass(kw_only=True, slots=True)
class Routes:
    """All routes of one controller."""

    sessions: Sessions

    async def health(self, _request: Request) -> Response:
        """Report that this process answers."""
        return JSONResponse({"status": "ok"})

    async def start(self, request: Request) -> Response:
        """Start a sandbox."""
        start = read_start(await read_body(request))
        return self._answer(await self.sessions.start(_owner(request), start))

    async def stop(self, request: Request) -> Response:
        """Stop a sandbox."""
        return self._answer(await self.sessions.stop(_owner(request), await _runtime_id(request)))

    async def pause(self, request: Request) -> Response:
        """Pause a sandbox."""
        return self._answer(await self.sessions.pause(_owner(request), await _runtime_id(request)))

    async def resume(self, request: Request) -> Response:
        """Resume a sandbox."""
        return self._answer(await self.sessions.resume(_owner(request), await _runtime_id(request)))

    async def session(self, request: Request) -> Response:
        """Return the newest sandbox of a session id, once it is ready or the poll is over."""
        session = self.sessions.find(_owner(request), request.path_params["session_id"])
        await self.sessions.wait(session)
        return self._answer(session)

    async def list_all(self, request: Request) -> Response:
        """Return all sandboxes that were not stopped."""
        sessions = self.sessions.list_all(_owner(request))
        return JSONResponse({"runtimes": [self._record(session) for session in sessions]})

    async def lease(self, request: Request) -> Response:
        """Renew leases, many at once."""
        try:
            call = LeaseCall.model_validate_json(await read_body(request))
        except ValidationError as error:
            raise HttpError(422, str(error)) from error
        leased = self.sessions.renew(_owner(request), call.runtime_ids, call.lease_s)
        renewed = [session.runtime_id for session in leased]
        unknown = sorted(set(call.runtime_ids or ()) - set(renewed))
        return JSONResponse({"renewed": renewed, "unknown": unknown})

    async def metrics(self, _request: Request) -> Response:
        """Return the metrics."""
        return Response(render_metrics(self.sessions), media_type="text/plain; version=0.0.4; charset=utf-8")

    async def list_nodes(self, _request: Request) -> Response:
        """Return the nodes, with their free and used resources."""
        placement = self.sessions.placement
        return JSONResponse(
            {
                "nodes": [
                    {
                        **node.report.model_dump(mode="json", exclude={"sandboxes", "metrics"}),
                        "is_open": node.is_open,
                        "num_sandboxes": len(placement.admission.rooms[node_id].taken),
                        "used": placement.admission.rooms[node_id].used,
                    }
                    for node_id, node in placement.nodes.items()
                ],
            }
        )

    async def report(self, request: Request) -> Response:
        """Take a node's report."""
        body = await read_body(request, max_bytes=MAX_REPORT_BYTES)
        try:
            report = NodeReport.model_validate_json(body)
        except ValidationError as error:
            raise HttpError(422, str(error)) from error
        if report.node_id != request.path_params["node_id"]:
            raise HttpError(422, f"the report is of node {report.node_id}")
        return JSONResponse(self.sessions.placement.report(report).model_dump(mode="json"))

    def _answer(self, session: Session) -> Response:
        return JSONResponse(self._record(session))

    def _record(self, session: Session) -> dict[str, Any]:
        place = self.sessions.placement.admission.place_of(session)
        return make_record(session, place=place, expires_in_s=self.sessions.expires_in_s(session))


def build_routes(routes: Routes) -> list[Route]:
    """Return the table of routes."""
    gets: dict[str, Endpoint] = {
        "/health": routes.health,
        "/liveness": routes.health,
        "/readiness": routes.health,
        "/sessions/{session_id}": routes.session,
        "/list": routes.list_all,
        "/metrics": routes.metrics,
        "/nodes": routes.list_nodes,
    }
    posts: dict[str, Endpoint] = {
        "/start": routes.start,
        "/stop": routes.stop,
        "/pause": routes.pause,
        "/resume": routes.resume,
        "/leases": routes.lease,
        "/nodes/{node_id}": routes.report,
    }
    return [
        *(Route(path, endpoint, methods=["GET"]) for path, endpoint in gets.items()),
        *(Route(path, endpoint, methods=["POST"]) for path, endpoint in posts.items()),
    ]


def _owner(request: Request) -> str:
    return str(request.scope["owner"])


async def _runtime_id(request: Request) -> str:
    return read_runtime_id(await read_body(request))


def render_metrics(sessions: Sessions) -> str:
    """Return all metrics: the controller's, then those that nodes reported."""
    registry, placement = sessions.registry, sessions.placement
    by_state = Counter((session.state.value, session.node_id) for session in registry.alive.values())
    waiting_since = [session.begun_at for session in placement.admission]
    age = time.monotonic() - min(waiting_since) if waiting_since else 0.0
    is_open = Counter(str(node.is_open).lower() for node in placement.nodes.values())
    rooms = placement.admission.rooms.values()
    samples: dict[str, list[tuple[str, float]]] = {
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
        "failures_total": [
            (_labels(kind=kind.value), registry.counts[f"failed_{kind.value}"]) for kind in FailureKind
        ],
        "journal_syncs_total": [("", registry.journal.num_syncs)],
        "journal_lines_total": [("", registry.journal.num_written)],
        **{name: [("", registry.counts[key])] for name, key in _COUNTS.items()},
    }
    lines = []
    for name, (kind, text) in _METRICS.items():
        lines += [f"# HELP {_PREFIX}_{name} {text}", f"# TYPE {_PREFIX}_{name} {kind}"]
        lines += [f"{_PREFIX}_{name}{labels} {value:.10g}" for labels, value in samples[name]]
    reported: dict[str, float] = {}
    for node in placement.nodes.values():
        reported.update(node.report.metrics)
    lines += [f"{name} {value:.10g}" for name, value in sorted(reported.items())]
    return "\n".join(lines) + "\n"


def _labels(**values: str) -> str:
    def escape(value: str) -> str:
        return value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")

    return "{" + ",".join(f'{name}="{escape(value)}"' for name, value in values.items()) + "}"
