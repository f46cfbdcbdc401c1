"""The controller's routes. Each reads a request, asks `Sessions`, and answers with records."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, Field, ValidationError
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from strop.runtime.contract import NodeReport
from strop.runtime.http_server import HttpError
from strop.runtime.images import open_build
from strop.runtime.metrics import CONTENT_TYPE, render_metrics
from strop.runtime.nodes import Node, NodeFailed
from strop.runtime.session import Session
from strop.runtime.sessions import Sessions
from strop.runtime.web import read_body
from strop.runtime.wire import make_record, read_runtime_id, read_start

MAX_REPORT_BYTES = 64 << 20
"""Of a node with thousands of sandboxes, the last lines of each."""
MAX_UPLOADS = 2
MAX_LEASE_S = 7 * 24 * 3600.0
_OF_BUILD = "~"
"""Between a node's id and its own id of a build: both are in the id that clients have."""

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
    registry_prefix: str
    warm_configs: Sequence[dict[str, Any]]
    upload_dir: Path
    num_uploads: int = 0

    async def health(self, _request: Request) -> Response:
        """Say that this process answers."""
        return JSONResponse({"status": "ok"})

    async def start(self, request: Request) -> Response:
        """Start a sandbox."""
        asked = read_start(await read_body(request))
        return self._answer(await self.sessions.start(_owner(request), asked))

    async def stop(self, request: Request) -> Response:
        """End one."""
        return self._answer(await self.sessions.stop(_owner(request), await _runtime_id(request)))

    async def pause(self, request: Request) -> Response:
        """Pause one."""
        return self._answer(await self.sessions.pause(_owner(request), await _runtime_id(request)))

    async def resume(self, request: Request) -> Response:
        """Resume one."""
        return self._answer(await self.sessions.resume(_owner(request), await _runtime_id(request)))

    async def session(self, request: Request) -> Response:
        """Tell of the newest sandbox of a session id, once it has settled or the client should ask again."""
        session = self.sessions.find(_owner(request), request.path_params["session_id"])
        await self.sessions.wait(session)
        return self._answer(session)

    async def runtime(self, request: Request) -> Response:
        """Tell of one sandbox, in the same way."""
        session = self.sessions.find_runtime(_owner(request), request.path_params["runtime_id"])
        await self.sessions.wait(session)
        return self._answer(session)

    async def list_all(self, request: Request) -> Response:
        """Tell of all that were not stopped."""
        found = self.sessions.list_all(_owner(request))
        return JSONResponse({"runtimes": [self._record(one) for one in found]})

    async def batch(self, request: Request) -> Response:
        """Tell of several; those that are unknown are left out."""
        found = []
        for session_id in dict.fromkeys(request.query_params.getlist("ids")):
            try:
                found.append(self.sessions.find(_owner(request), session_id))
            except HttpError:
                continue
        return JSONResponse([self._record(one) for one in found])

    async def lease(self, request: Request) -> Response:
        """Renew leases, many at once."""
        try:
            asked = LeaseCall.model_validate_json(await read_body(request))
        except ValidationError as error:
            raise HttpError(422, str(error)) from error
        found = self.sessions.renew(_owner(request), asked.runtime_ids, asked.lease_s)
        renewed = [one.runtime_id for one in found]
        unknown = sorted(set(asked.runtime_ids or ()) - set(renewed))
        return JSONResponse({"renewed": renewed, "unknown": unknown})

    async def tell_registry_prefix(self, _request: Request) -> Response:
        """Tell what to put before the names of images that are built."""
        return JSONResponse({"registry_prefix": self.registry_prefix})

    async def tell_warm_configs(self, _request: Request) -> Response:
        """Tell which sandboxes start at once."""
        return JSONResponse({"configs": list(self.warm_configs)})

    async def image_exists(self, request: Request) -> Response:
        """Ask the nodes, one after the other, whether they have an image."""
        image = request.query_params.get("image", "")
        if not image:
            raise HttpError(422, "image is missing")
        failures = []
        for node in self._nodes():
            try:
                found = await self.sessions.placement.client.find_image(node.report.url, image)
            except NodeFailed as error:
                failures.append(str(error))
                continue
            if found.get("exists"):
                return JSONResponse(found)
        if failures:
            raise HttpError(503, failures[0])
        return JSONResponse({"exists": False})

    async def build(self, request: Request) -> Response:
        """Hand a build to a node."""
        nodes = self._nodes()
        if self.num_uploads >= MAX_UPLOADS:
            raise HttpError(429, f"{MAX_UPLOADS} build contexts are on their way; send it again later")
        self.num_uploads += 1
        try:
            async with open_build(request, self.upload_dir) as asked:
                client, node = self.sessions.placement.client, nodes[0]
                answer = await client.build(node.report.url, asked.target, asked.tags, asked.read())
        except NodeFailed as error:
            raise HttpError(429 if error.status == 429 else 503, str(error)) from error
        finally:
            self.num_uploads -= 1
        return JSONResponse({"build_id": f"{node.report.node_id}{_OF_BUILD}{answer.get('build_id', '')}"})

    async def build_status(self, request: Request) -> Response:
        """Ask the node of a build how that is."""
        build_id = request.query_params.get("build_id", "")
        node_id, _, own_id = build_id.partition(_OF_BUILD)
        node = self.sessions.placement.nodes.get(node_id)
        if not own_id:
            raise HttpError(404, f"no build {build_id}")
        lost = {"status": "INTERNAL_ERROR", "image": "", "error": f"node {node_id}, which built it, is gone"}
        if node is None:
            return JSONResponse(lost)
        try:
            return JSONResponse(await self.sessions.placement.client.build_status(node.report.url, own_id))
        except NodeFailed as error:
            raise HttpError(404 if error.status == 404 else 503, str(error)) from error

    async def metrics(self, _request: Request) -> Response:
        """Tell what is counted."""
        return Response(render_metrics(self.sessions), media_type=CONTENT_TYPE)

    async def list_nodes(self, _request: Request) -> Response:
        """Tell of the nodes."""
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
                "num_waiting": len(placement.admission),
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

    async def drain(self, request: Request) -> Response:
        """Let a node take nothing new."""
        node_id = request.path_params["node_id"]
        if not self.sessions.placement.drain(node_id):
            raise HttpError(404, f"no node {node_id}")
        return JSONResponse({"node_id": node_id, "should_drain": True})

    def _nodes(self) -> list[Node]:
        """Return the nodes, those with the most room first. Raises: HttpError with 503 if there is none."""
        placement = self.sessions.placement
        nodes = sorted(
            placement.nodes.items(),
            key=lambda one: (not one[1].is_open, -placement.admission.rooms[one[0]].free_share()),
        )
        if not nodes:
            raise HttpError(503, "no node has registered yet")
        return [node for _, node in nodes]

    def _answer(self, session: Session) -> Response:
        return JSONResponse(self._record(session))

    def _record(self, session: Session) -> dict[str, Any]:
        place = self.sessions.placement.admission.place_of(session)
        return make_record(session, place=place, expires_in_s=self.sessions.expires_in_s(session))


def build_routes(routes: Routes) -> list[Route]:
    """Return the table. A batch is matched before the session of that name."""
    gets: dict[str, Endpoint] = {
        "/health": routes.health,
        "/liveness": routes.health,
        "/readiness": routes.health,
        "/sessions/batch": routes.batch,
        "/sessions/{session_id}": routes.session,
        "/runtime/{runtime_id}": routes.runtime,
        "/list": routes.list_all,
        "/registry_prefix": routes.tell_registry_prefix,
        "/image_exists": routes.image_exists,
        "/build_status": routes.build_status,
        "/api/warm-runtime-configs": routes.tell_warm_configs,
        "/metrics": routes.metrics,
        "/nodes": routes.list_nodes,
    }
    posts: dict[str, Endpoint] = {
        "/start": routes.start,
        "/stop": routes.stop,
        "/pause": routes.pause,
        "/resume": routes.resume,
        "/leases": routes.lease,
        "/build": routes.build,
        "/nodes/{node_id}": routes.report,
        "/nodes/{node_id}/drain": routes.drain,
    }
    return [
        *(Route(path, endpoint, methods=["GET"]) for path, endpoint in gets.items()),
        *(Route(path, endpoint, methods=["POST"]) for path, endpoint in posts.items()),
    ]


def _owner(request: Request) -> str:
    return str(request.scope["owner"])


async def _runtime_id(request: Request) -> str:
    return read_runtime_id(await read_body(request))
