"""The controller's routes. Each reads a request, asks `Sessions`, and answers with records.

Build contexts come as RemoteRuntime uploads them: base64 text of a gzip tar, in one part of a form. The
archive is checked before a node gets it: a member that would land outside of where it is unpacked, or link
there, is refused, and so is an archive that unpacks to far more than it is. Metrics are told in Prometheus'
text format 0.0.4.
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
from contextlib import asynccontextmanager
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
"""Of a node with thousands of sandboxes, the last lines of each."""
MAX_UPLOADS = 2
MAX_CONTEXT_BYTES = 128 << 20
"""Of the form of a build, base64 and all. It is held in memory while it is read."""
MAX_UNPACKED_BYTES = 16 << 30
MAX_MEMBERS = 500_000
UPLOAD_LIMIT_S = 120.0
MAX_LEASE_S = 7 * 24 * 3600.0
_OF_BUILD = "~"
"""Between a node's id and its own id of a build: both are in the id that clients have."""
_CHUNK_BYTES = 1 << 20
_PREFIX = "strop_runtime"
_METRICS = {
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
        """Tell what to put before the names of images that are built: nothing, they stay at their node."""
        return JSONResponse({"registry_prefix": ""})

    async def tell_warm_configs(self, _request: Request) -> Response:
        """Tell of no kind of sandbox that it starts at once: which ones do, each node knows."""
        return JSONResponse({"configs": []})

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
        return Response(render_metrics(self.sessions), media_type="text/plain; version=0.0.4; charset=utf-8")

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


@dataclass(frozen=True, kw_only=True, slots=True)
class BuildRequest:
    """`POST /build`, understood."""

    target: str
    tags: tuple[str, ...]
    archive: Path
    """The gzip tar; there while the request is open."""

    async def read(self) -> AsyncIterator[bytes]:
        """Yield the archive."""
        with self.archive.open("rb") as file:
            while part := await asyncio.to_thread(file.read, _CHUNK_BYTES):
                yield part


@asynccontextmanager
async def open_build(request: Request, folder: Path) -> AsyncIterator[BuildRequest]:
    """Give what a client wants built; its archive is kept in `folder` until the end of the block.

    Raises: HttpError: 408, 413, 422 for what cannot be built from; StoreError if it cannot be kept.
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
    """Refuse an archive that cannot be unpacked without harm.

    Raises: HttpError 422 for a broken one, members or links that lead outside, and devices; 413 for too much.
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
    """Write the archive of a form into a file. Raises: HttpError with 422; OSError."""
    try:
        parts = read_form(content_type, body)
        text = one_part(parts, "context")
        target = one_part(parts, "target_image").decode()
        tags = tuple(part.data.decode() for part in parts if part.name == "tags" and part.data)
        # As a text it may be cut into lines.
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
    """Return all metrics, those that nodes reported behind the controller's own."""
    registry, placement = sessions.registry, sessions.placement
    by_state = Counter((one.state.value, one.node_id) for one in registry.alive.values())
    waiting = [one.begun for one in placement.admission]
    age = time.monotonic() - min(waiting) if waiting else 0.0
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
