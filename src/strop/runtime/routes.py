"""The service's routes, those of OpenHands' client and a few of strop's own.

Each reads a request, asks `Service`, and answers with records. Every refusal is `{"detail": ...}`, and no
answer is a redirect. Metrics are in Prometheus' text format 0.0.4.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import asdict
from typing import Annotated, Any

from fastapi import Depends, FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel, Field

from strop.runtime.contract import SERVICE_KEY_HEADER, StartRequest
from strop.runtime.keys import ANYONE, find_owner
from strop.runtime.queue import RESOURCES
from strop.runtime.service import Service

MAX_LEASE_S = 7 * 24 * 3600.0
MAX_BODY_BYTES = 256 << 10


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


def build_app(service: Service, owners: dict[str, str] | None) -> FastAPI:
    """Return the application with all routes. It asks for one of the owners' keys; None: for none."""
    app = FastAPI(openapi_url=None, redirect_slashes=False)

    @app.middleware("http")
    async def admit(request: Request, go_on: Callable[[Request], Awaitable[Response]]) -> Response:
        return _find_refusal(request, owners) or await go_on(request)

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
        nodes = service.nodes.values()
        told = [
            {"node_id": one.node_id, "is_open": one.is_open, "num_sandboxes": len(one.taken)} for one in nodes
        ]
        return {"nodes": [asdict(one.facts) | more for one, more in zip(nodes, told, strict=True)]}

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(render_metrics(service), media_type="text/plain; version=0.0.4; charset=utf-8")

    return app


def _find_refusal(request: Request, owners: dict[str, str] | None) -> Response | None:
    """Note the owner of a request's key; return a refusal for a stranger, and for a long body.

    It is decided before the body is read.
    """
    # Prometheus sends a key from a file as a bearer token.
    bearer = request.headers.get("authorization", "").partition("Bearer ")[2]
    key = request.headers.get(SERVICE_KEY_HEADER) or bearer
    request.state.owner = ANYONE if owners is None else find_owner(owners, key)
    if request.state.owner is None and request.url.path != "/health":
        return _refuse(401, "Unauthorized")
    if "transfer-encoding" in request.headers:
        return _refuse(411, "a body of an unknown length")
    if int(request.headers.get("content-length", 0)) > MAX_BODY_BYTES:
        return _refuse(413, f"a body of more than {MAX_BODY_BYTES} bytes")
    return None


def render_metrics(service: Service) -> str:
    """Return all metrics. Names of nodes are the machines' own, and need no escapes."""
    by_place = Counter((one.state, one.node.node_id if one.node else "") for one in service.alive())
    waiting = service.waiting()
    samples: list[tuple[str, float]] = [
        *((f'sandboxes{{state="{state}",node="{node}"}}', n) for (state, node), n in by_place.items()),
        ("queue_length", len(waiting)),
        ("queue_age_seconds", time.monotonic() - waiting[0].begun_at if waiting else 0.0),
        *service.counts.items(),
    ]
    for node in service.nodes.values():
        for name, amounts in (("node_capacity", node.has), ("node_used", node.used)):
            for resource, amount in zip(RESOURCES, amounts, strict=True):
                samples.append((f'{name}{{node="{node.node_id}",resource="{resource}"}}', amount))
    lines: dict[str, None] = {}
    for name, value in sorted(samples):
        plain = name.partition("{")[0]
        kind = "counter" if plain.endswith("_total") else "gauge"
        lines |= dict.fromkeys((f"# TYPE strop_runtime_{plain} {kind}", f"strop_runtime_{name} {value:.10g}"))
    return "\n".join(lines) + "\n"


def _refuse(status: int, why: str) -> Response:
    # The rest of its request is not read.
    return JSONResponse({"detail": why}, status_code=status, headers={"connection": "close"})
