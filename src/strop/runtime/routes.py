"""The controller's routes. Each reads a request, asks `Sessions`, and answers with records.

Build contexts come as RemoteRuntime uploads them: base64 text of a gzip tar, in one part of a form. The
archive is checked before a node gets it: members or links that lead outside the folder of the context are
refused, and so are archives that unpack to far more than their size. Metrics are in Prometheus' text format
0.0.4.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import os
import tarfile
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, Field, ValidationError
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from strop.io.atomic import explain_write_failure
from strop.runtime.contract import FailureKind, NodeReport, State
from strop.runtime.http_server import HttpError, one_part, read_form
from strop.runtime.nodes import Node, NodeFailed
from strop.runtime.queue import RESOURCES
from strop.runtime.session import Session
from strop.runtime.sessions import Sessions
from strop.runtime.web import read_body
from strop.runtime.wire import make_record, read_runtime_id, read_start

MAX_REPORT_BYTES = 64 << 20
"""For a node with thousands of sandboxes, and the last lines of each."""
MAX_UPLOADS = 2
MAX_CONTEXT_BYTES = 128 << 20
"""Size of a build's form, base64 included. It is held in memory while it is read."""
MAX_UNPACKED_BYTES = 16 << 30
MAX_MEMBERS = 500_000
UPLOAD_LIMIT_S = 120.0
MAX_LEASE_S = 7 * 24 * 3600.0
_BUILD_SEPARATOR = "~"
"""Between the node's id and the node's build id in the build id that clients have."""
_CHUNK_BYTES = 1 << 20
_PREFIX = "strop_runtime"
_METRICS = {
    "sandboxes": ("gauge", "Live sandboxes, by state and node."),
    "queue_length": ("gauge", "Sandboxes that wait for a slot."),
    "queue_age_seconds": ("gauge", "Age of the oldest waiting sandbox."),
    "nodes": ("gauge", "Reporting nodes, by whether they take new sandboxes."),
    "node_capacity": ("gauge", "Resources of a node; processors times the promised factor."),
    "node_used": ("gauge", "Resources that its sandboxes and snapshots take."),
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
    upload_dir: Path
    num_uploads: int = 0

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

    async def runtime(self, request: Request) -> Response:
        """Return a sandbox by its runtime id, in the same way."""
        session = self.sessions.find_runtime(_owner(request), request.path_params["runtime_id"])
        await self.sessions.wait(session)
        return self._answer(session)

    async def list_all(self, request: Request) -> Response:
        """Return all sandboxes that were not stopped."""
        sessions = self.sessions.list_all(_owner(request))
        return JSONResponse({"runtimes": [self._record(session) for session in sessions]})

    async def batch(self, request: Request) -> Response:
        """Return several sandboxes; unknown ids are left out."""
        records = []
        for session_id in dict.fromkeys(request.query_params.getlist("ids")):
            with suppress(HttpError):
                records.append(self._record(self.sessions.find(_owner(request), session_id)))
        return JSONResponse(records)

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

    async def registry_prefix(self, _request: Request) -> Response:
        """Return the prefix for the names of built images: none, since they stay at their node."""
        return JSONResponse({"registry_prefix": ""})

    async def warm_configs(self, _request: Request) -> Response:
        """Return no list of quickly started sandboxes: each node has its own."""
        return JSONResponse({"configs": []})

    async def image_exists(self, request: Request) -> Response:
        """Ask the nodes, one after the other, whether they have an image."""
        image = request.query_params.get("image", "")
        if not image:
            raise HttpError(422, "image is missing")
        failures = []
        for node in self._nodes():
            try:
                answer = await self.sessions.placement.client.find_image(node.report.url, image)
            except NodeFailed as error:
                failures.append(str(error))
                continue
            if answer.get("exists"):
                return JSONResponse(answer)
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
            async with open_build(request, self.upload_dir) as order:
                client, node = self.sessions.placement.client, nodes[0]
                answer = await client.build(node.report.url, order.target, order.tags, order.read())
        except NodeFailed as error:
            raise HttpError(429 if error.status == 429 else 503, str(error)) from error
        finally:
            self.num_uploads -= 1
        build_id = f"{node.report.node_id}{_BUILD_SEPARATOR}{answer.get('build_id', '')}"
        return JSONResponse({"build_id": build_id})

    async def build_status(self, request: Request) -> Response:
        """Ask the node of a build for its status."""
        build_id = request.query_params.get("build_id", "")
        node_id, _, id_at_node = build_id.partition(_BUILD_SEPARATOR)
        node = self.sessions.placement.nodes.get(node_id)
        if not id_at_node:
            raise HttpError(404, f"no build {build_id}")
        lost = {"status": "INTERNAL_ERROR", "image": "", "error": f"node {node_id}, which built it, is gone"}
        if node is None:
            return JSONResponse(lost)
        try:
            client = self.sessions.placement.client
            return JSONResponse(await client.build_status(node.report.url, id_at_node))
        except NodeFailed as error:
            raise HttpError(404 if error.status == 404 else 503, str(error)) from error

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
        """Send a node no more sandboxes."""
        node_id = request.path_params["node_id"]
        if not self.sessions.placement.drain(node_id):
            raise HttpError(404, f"no node {node_id}")
        return JSONResponse({"node_id": node_id, "should_drain": True})

    def _nodes(self) -> list[Node]:
        """Return the nodes, open ones with the most room first. Raises: HttpError 503 if there is none."""
        nodes, rooms = self.sessions.placement.nodes, self.sessions.placement.admission.rooms
        if not nodes:
            raise HttpError(503, "no node has registered yet")
        return sorted(
            nodes.values(),
            key=lambda node: (not node.is_open, -rooms[node.report.node_id].free_share()),
        )

    def _answer(self, session: Session) -> Response:
        return JSONResponse(self._record(session))

    def _record(self, session: Session) -> dict[str, Any]:
        place = self.sessions.placement.admission.place_of(session)
        return make_record(session, place=place, expires_in_s=self.sessions.expires_in_s(session))


def build_routes(routes: Routes) -> list[Route]:
    """Return the table of routes. `/sessions/batch` is matched before a session id."""
    gets: dict[str, Endpoint] = {
        "/health": routes.health,
        "/liveness": routes.health,
        "/readiness": routes.health,
        "/sessions/batch": routes.batch,
        "/sessions/{session_id}": routes.session,
        "/runtime/{runtime_id}": routes.runtime,
        "/list": routes.list_all,
        "/registry_prefix": routes.registry_prefix,
        "/image_exists": routes.image_exists,
        "/build_status": routes.build_status,
        "/api/warm-runtime-configs": routes.warm_configs,
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


@dataclass(frozen=True, kw_only=True, slots=True)
class BuildRequest:
    """`POST /build`, parsed."""

    target: str
    tags: tuple[str, ...]
    archive: Path
    """The gzip tar; it exists while the request is open."""

    async def read(self) -> AsyncIterator[bytes]:
        """Yield the archive."""
        with self.archive.open("rb") as file:
            while part := await asyncio.to_thread(file.read, _CHUNK_BYTES):
                yield part


@asynccontextmanager
async def open_build(request: Request, folder: Path) -> AsyncIterator[BuildRequest]:
    """Read a build request for the block; its archive is a file in `folder` until the end of the block.

    Raises: HttpError 408, 413 or 422 for an invalid request; StoreError if the archive cannot be written.
    """
    body = await read_body(request, max_bytes=MAX_CONTEXT_BYTES, limit_s=UPLOAD_LIMIT_S)
    content_type = request.headers.get("content-type", "")
    try:
        build = await asyncio.to_thread(_keep_archive, folder, content_type, body)
    except OSError as error:
        raise explain_write_failure(error, folder) from error
    del body
    try:
        await asyncio.to_thread(check_archive, build.archive)
        yield build
    finally:
        build.archive.unlink(missing_ok=True)


def check_archive(path: Path) -> None:
    """Refuse an archive that is unsafe to unpack.

    Raises: HttpError 422 for a broken archive, devices, and members or links that lead outside; 413 for one
        that is too large.
    """
    num_members = num_bytes = 0
    try:
        with tarfile.open(path, "r|gz") as archive:
            for member in archive:
                num_members += 1
                num_bytes += member.size
                if num_members > MAX_MEMBERS or num_bytes > MAX_UNPACKED_BYTES:
                    raise HttpError(413, f"the archive has more than {MAX_MEMBERS} files or too many bytes")
                _check_member(member, path.parent)
    except (tarfile.TarError, OSError, EOFError, binascii.Error, ValueError) as error:
        raise HttpError(422, f"the context is not a gzip tar that can be unpacked ({error})") from error


def _check_member(member: tarfile.TarInfo, folder: Path) -> None:
    if os.path.isabs(member.name) or ".." in Path(member.name).parts:
        raise HttpError(422, f"member {member.name!r} of the archive leads outside of it")
    try:
        tarfile.data_filter(member, str(folder / "unpacked"))
    except tarfile.FilterError as error:
        raise HttpError(422, f"member {member.name!r} of the archive is refused: {error}") from error


def _keep_archive(folder: Path, content_type: str, body: bytes) -> BuildRequest:
    """Write the archive of a form into a file. Raises: HttpError 422; OSError."""
    try:
        parts = read_form(content_type, body)
        text = one_part(parts, "context")
        target = one_part(parts, "target_image").decode()
        tags = tuple(part.data.decode() for part in parts if part.name == "tags" and part.data)
        # The base64 text may be broken into lines.
        data = base64.b64decode(text.translate(None, b"\r\n \t"), validate=True)
    except (binascii.Error, UnicodeDecodeError) as error:
        raise HttpError(422, f"the context is not the base64 text of an archive ({error})") from error
    if not target:
        raise HttpError(422, "target_image is empty")
    folder.mkdir(parents=True, exist_ok=True)
    descriptor, name = tempfile.mkstemp(dir=folder, suffix=".tar.gz")
    with os.fdopen(descriptor, "wb") as file:
        file.write(data)
    return BuildRequest(target=target, tags=tags, archive=Path(name))


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
