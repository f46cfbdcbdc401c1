"""The service's routes, those of OpenHands' client and a few of strop's own.

Each reads a request, asks `Service`, and answers with records. Metrics are in Prometheus' text format 0.0.4.
"""

from __future__ import annotations

import time
from collections import Counter
from typing import Annotated, Any

from fastapi import Depends, FastAPI, HTTPException, Request, Response
from pydantic import BaseModel, Field

from strop.runtime.contract import SERVICE_KEY_HEADER, FailureKind, StartRequest, State
from strop.runtime.keys import ANYONE, KeyRing
from strop.runtime.queue import RESOURCES
from strop.runtime.service import Service
from strop.runtime.web import Guard, Scope, header_of, make_app

MAX_LEASE_S = 7 * 24 * 3600.0
MAX_BODY_BYTES = 256 << 10
BODY_LIMIT_S = 20.0
_PREFIX = "strop_runtime"
_METRICS = {
    "sandboxes": ("gauge", "Live sandboxes, by state and node."),
    "queue_length": ("gauge", "Sandboxes that wait for a slot."),
    "queue_age_seconds": ("gauge", "Age of the oldest waiting sandbox."),
    "nodes": ("gauge", "Nodes, by whether they take new sandboxes."),
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
    "nodes_lost_total": ("counter", "Nodes that were lost."),
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
    "bugs_total": "bugs",
}


class LeaseCall(BaseModel):
    """`POST /leases`."""

    lease_s: float = Field(gt=0, le=MAX_LEASE_S, allow_inf_nan=False)
    runtime_ids: list[str] | None = None
    """None: all sandboxes of the owner."""


class RuntimeCall(BaseModel):
    """`POST /stop`, `/pause` and `/resume`."""

    runtime_id: str = Field(min_length=1)


def _owner_of(request: Request) -> str:
    return str(request.scope["owner"])


Owner = Annotated[str, Depends(_owner_of)]
Record = dict[str, Any]


def guard(app: FastAPI, keys: KeyRing | None) -> Guard:
    """Return an application that asks for a key; None: for none."""

    def admit(scope: Scope) -> None:
        if scope["path"] == "/health":
            return
        # Prometheus sends a key from a file as a bearer token.
        bearer = header_of(scope, "authorization").partition("Bearer ")[2]
        key = header_of(scope, SERVICE_KEY_HEADER) or bearer
        scope["owner"] = ANYONE if keys is None else keys.owner_of(key)
        if scope["owner"] is None:
            raise HTTPException(401, "Unauthorized")

    return Guard(app, admit=admit, max_body_bytes=MAX_BODY_BYTES, body_limit_s=BODY_LIMIT_S)


def build_app(service: Service) -> FastAPI:
    """Return the application with all routes."""
    app = make_app()

    @app.get("/health")
    async def health() -> dict[str, str]:
        return {"status": "ok"}

    @app.post("/start")
    async def start(request: StartRequest, owner: Owner) -> Record:
        return service.record(await service.start(owner, request))

    @app.get("/sessions/{session_id}")
    async def session(session_id: str, owner: Owner) -> Record:
        found = service.find(owner, session_id)
        await service.wait(found)
        return service.record(found)

    @app.post("/stop")
    async def stop(call: RuntimeCall, owner: Owner) -> Record:
        return service.record(await service.stop(owner, call.runtime_id))

    @app.post("/pause")
    async def pause(call: RuntimeCall, owner: Owner) -> Record:
        return service.record(await service.pause(owner, call.runtime_id))

    @app.post("/resume")
    async def resume(call: RuntimeCall, owner: Owner) -> Record:
        return service.record(await service.resume(owner, call.runtime_id))

    @app.get("/list")
    async def list_all(owner: Owner) -> Record:
        return {"runtimes": [service.record(one) for one in service.list_all(owner)]}

    @app.post("/leases")
    async def lease(call: LeaseCall, owner: Owner) -> Record:
        renewed = [one.runtime_id for one in service.renew(owner, call.runtime_ids, call.lease_s)]
        return {"renewed": renewed, "unknown": sorted(set(call.runtime_ids or ()) - set(renewed))}

    @app.get("/nodes")
    async def list_nodes() -> Record:
        rooms = service.admission.rooms
        return {
            "nodes": [
                {
                    **node.facts.model_dump(mode="json", exclude={"last_used_s", "metrics"}),
                    "node_id": node_id,
                    "is_open": node.is_open,
                    "num_sandboxes": len(rooms[node_id].taken),
                    "used": rooms[node_id].used,
                }
                for node_id, node in service.nodes.items()
            ],
        }

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(render_metrics(service), media_type="text/plain; version=0.0.4; charset=utf-8")

    return app


def render_metrics(service: Service) -> str:
    """Return all metrics: the service's, then those of its hosts."""
    by_state = Counter((session.state.value, session.node_id) for session in service.alive.values())
    waiting_since = [session.begun_at for session in service.admission]
    age = time.monotonic() - min(waiting_since) if waiting_since else 0.0
    is_open = Counter(str(node.is_open).lower() for node in service.nodes.values())
    rooms = service.admission.rooms.values()
    samples: dict[str, list[tuple[str, float]]] = {
        "sandboxes": [(_labels(state=state, node=node), n) for (state, node), n in sorted(by_state.items())],
        "queue_length": [("", len(service.admission))],
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
            (_labels(kind=kind.value), service.counts[f"failed_{kind.value}"]) for kind in FailureKind
        ],
        **{name: [("", service.counts[key])] for name, key in _COUNTS.items()},
    }
    lines = []
    for name, (kind, text) in _METRICS.items():
        lines += [f"# HELP {_PREFIX}_{name} {text}", f"# TYPE {_PREFIX}_{name} {kind}"]
        lines += [f"{_PREFIX}_{name}{labels} {value:.10g}" for labels, value in samples[name]]
    of_hosts = Counter[str]()
    for node in service.nodes.values():
        of_hosts.update(node.facts.metrics)
    lines += [f"{name} {value:.10g}" for name, value in sorted(of_hosts.items())]
    return "\n".join(lines) + "\n"


def _labels(**values: str) -> str:
    def escape(value: str) -> str:
        return value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")

    return "{" + ",".join(f'{name}="{escape(value)}"' for name, value in values.items()) + "}"
