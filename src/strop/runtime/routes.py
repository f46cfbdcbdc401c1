"""The service's routes, those of OpenHands' client and a few of strop's own.

Each reads a request, asks `Service`, and answers with records. Every refusal is `{"detail": ...}`, and no
answer is a redirect. Metrics are in Prometheus' text format 0.0.4.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Annotated, Any

from fastapi import Depends, FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel, Field

from strop.runtime.contract import SERVICE_KEY_HEADER, FailureKind, StartRequest, State
from strop.runtime.keys import ANYONE, Key, find_owner
from strop.runtime.queue import RESOURCES
from strop.runtime.service import Service

MAX_LEASE_S = 7 * 24 * 3600.0
MAX_BODY_BYTES = 256 << 10
_COUNTERS = {
    "starts_total": "starts",
    "ready_total": f"entered_{State.READY}",
    "stops_total": f"entered_{State.STOPPED}",
    "expired_total": "expired",
    "nodes_lost_total": "nodes_lost",
}
"""Metrics of the service's counters of events."""


class LeaseCall(BaseModel):
    """`POST /leases`."""

    lease_s: float = Field(gt=0, le=MAX_LEASE_S, allow_inf_nan=False)
    runtime_ids: list[str] | None = None
    """None: all sandboxes of the owner."""


class RuntimeCall(BaseModel):
    """`POST /stop`, `/pause` and `/resume`."""

    runtime_id: str = Field(min_length=1)


def _owner_of(request: Request) -> str:
    return str(request.state.owner)


Owner = Annotated[str, Depends(_owner_of)]
Record = dict[str, Any]


def build_app(service: Service, keys: list[Key] | None) -> FastAPI:
    """Return the application with all routes. It asks for one of the keys, which may change; None: none."""
    app = FastAPI(openapi_url=None, redirect_slashes=False)

    @app.middleware("http")
    async def admit(request: Request, go_on: Callable[[Request], Awaitable[Response]]) -> Response:
        return _find_refusal(request, keys) or await go_on(request)

    @app.exception_handler(RequestValidationError)
    async def explain(_: Request, error: RequestValidationError) -> Response:
        faults = "; ".join(f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in error.errors())
        return JSONResponse({"detail": faults.encode(errors="replace").decode()}, status_code=422)

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
                    **node.facts.model_dump(mode="json"),
                    "node_id": node_id,
                    "is_open": rooms[node_id].is_open,
                    "num_sandboxes": len(rooms[node_id].taken),
                }
                for node_id, node in service.nodes.items()
            ],
        }

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(render_metrics(service), media_type="text/plain; version=0.0.4; charset=utf-8")

    return app


def _find_refusal(request: Request, keys: list[Key] | None) -> Response | None:
    """Note the owner of a request's key; return a refusal for a stranger, and for a long body.

    It is decided before the body is read.
    """
    # Prometheus sends a key from a file as a bearer token.
    bearer = request.headers.get("authorization", "").partition("Bearer ")[2]
    key = request.headers.get(SERVICE_KEY_HEADER) or bearer
    request.state.owner = ANYONE if keys is None else find_owner(keys, key)
    if request.state.owner is None and request.url.path != "/health":
        return _refuse(401, "Unauthorized")
    if "transfer-encoding" in request.headers:
        return _refuse(411, "a body of an unknown length")
    if int(request.headers.get("content-length", 0)) > MAX_BODY_BYTES:
        return _refuse(413, f"a body of more than {MAX_BODY_BYTES} bytes")
    return None


def render_metrics(service: Service) -> str:
    """Return all metrics."""
    by_state = Counter((one.state.value, one.node_id) for one in service.alive.values())
    oldest = next(iter(service.admission), None)
    rooms = service.admission.rooms.values()
    counts = service.counts
    gauges: dict[str, list[tuple[str, float]]] = {
        "sandboxes": [(_labels(state=state, node=node), n) for (state, node), n in sorted(by_state.items())],
        "queue_length": [("", len(service.admission))],
        "queue_age_seconds": [("", time.monotonic() - oldest.begun_at if oldest else 0.0)],
        "node_capacity": [
            (_labels(node=one.node_id, resource=r), one.has[r]) for one in rooms for r in RESOURCES
        ],
        "node_used": [
            (_labels(node=one.node_id, resource=r), one.used[r]) for one in rooms for r in RESOURCES
        ],
    }
    counters: dict[str, list[tuple[str, float]]] = {
        "failures_total": [(_labels(kind=kind), counts[f"failed_{kind}"]) for kind in FailureKind],
        **{name: [("", counts[event])] for name, event in _COUNTERS.items()},
    }
    lines = []
    for kind, metrics in (("gauge", gauges), ("counter", counters)):
        for name, samples in metrics.items():
            lines.append(f"# TYPE strop_runtime_{name} {kind}")
            lines += [f"strop_runtime_{name}{labels} {value:.10g}" for labels, value in samples]
    return "\n".join(lines) + "\n"


def _labels(**values: str) -> str:
    """Return the labels of a sample. Names of nodes are the machines' own, and need no escapes."""
    return "{" + ",".join(f'{name}="{value}"' for name, value in values.items()) + "}"


def _refuse(status: int, why: str) -> Response:
    # The rest of its request is not read.
    return JSONResponse({"detail": why}, status_code=status, headers={"connection": "close"})
