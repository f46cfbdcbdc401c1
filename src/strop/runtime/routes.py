"""The paths of the service's operations, those of OpenHands' client and a few of strop's own.

Every refusal is `{"detail": ...}`, and no answer is a redirect. Metrics are in Prometheus' text format 0.0.4.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import asdict

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse

from strop.runtime.contract import SERVICE_KEY_HEADER
from strop.runtime.keys import find_owner
from strop.runtime.queue import RESOURCES
from strop.runtime.service import Record, Service

MAX_BODY_BYTES = 256 << 10


def build_app(service: Service, owners: dict[str, str]) -> FastAPI:
    """Return the application with all routes. It asks for a key, one of the owners'."""
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

    app.post("/start")(service.start)
    app.get("/sessions/{session_id}")(service.read)
    app.post("/stop")(service.stop)
    app.post("/pause")(service.pause)
    app.post("/resume")(service.resume)
    app.get("/list")(service.list_all)
    app.post("/leases")(service.lease)

    @app.get("/nodes")
    async def list_nodes() -> Record:
        return {
            "nodes": [
                {"node_id": name, "is_open": node.is_open, "num_sandboxes": len(node.taken)}
                | asdict(node.facts)
                for name, node in service.nodes.items()
            ]
        }

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(render_metrics(service), media_type="text/plain; version=0.0.4; charset=utf-8")

    return app


def _find_refusal(request: Request, owners: dict[str, str]) -> Response | None:
    """Note the owner of a request's key; return a refusal for a stranger, and for a long body.

    It is decided before the body is read.
    """
    # Prometheus sends a key from a file as a bearer token.
    bearer = request.headers.get("authorization", "").partition("Bearer ")[2]
    key = request.headers.get(SERVICE_KEY_HEADER) or bearer
    request.state.owner = find_owner(owners, key)
    if request.state.owner is None and request.url.path != "/health":
        return _refuse(401, "Unauthorized")
    if "transfer-encoding" in request.headers:
        return _refuse(411, "a body of an unknown length")
    if int(request.headers.get("content-length", 0)) > MAX_BODY_BYTES:
        return _refuse(413, f"a body of more than {MAX_BODY_BYTES} bytes")
    return None


def render_metrics(service: Service) -> str:
    """Return all metrics. Names of nodes are the machines' own, and need no escapes."""
    by_place = Counter((one.state, one.node_id) for one in service.alive())
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
