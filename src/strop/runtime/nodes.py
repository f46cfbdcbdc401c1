"""The controller's view of a node, and the client for requests to node agents."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlencode

from pydantic import ValidationError

from strop.runtime.contract import NODE_KEY_HEADER, NodeAnswer, NodeOrder, NodeReport, SandboxReport
from strop.runtime.http_client import PROBE_BYTES, HttpClient, RequestFailed
from strop.runtime.keys import KeyRing

ORDER_LIMIT_S = 10.0
OPERATION_LIMIT_S = 300.0
"""For a pause and a resume, which take long for large sandboxes."""
_PROBE_LIMIT_S = 5.0
_MAX_CONNECTIONS = 256


@dataclass(kw_only=True, slots=True)
class Node:
    """A node agent and its newest report."""

    report: NodeReport
    seen_at: float = field(default_factory=time.monotonic)
    """When it last reported, by the monotonic clock."""
    is_suspect: bool = False
    """Whether an order has failed since the last report: it gets no orders until the next one."""

    @property
    def is_open(self) -> bool:
        """Whether it takes new sandboxes now."""
        return not (self.report.is_draining or self.is_suspect)


class NodeFailed(Exception):
    """A request to a node failed, or has no known result; `status` is 0 if there was no answer."""

    def __init__(self, message: str, *, status: int = 0) -> None:
        super().__init__(message)
        self.status = status


class NodeClient:
    """Sends requests to node agents, at the addresses of their reports. Closed by `close`."""

    def __init__(self, node_keys: KeyRing) -> None:
        self._node_keys = node_keys
        self._http = HttpClient(max_connections=_MAX_CONNECTIONS)

    async def order(self, node_url: str, order: NodeOrder) -> NodeAnswer:
        """Order a sandbox. Raises: NodeFailed; the node may have taken the order all the same."""
        content = order.model_dump_json(exclude_defaults=True).encode()
        answer = await self._ask("POST", f"{node_url}/sandboxes", content=content)
        try:
            return NodeAnswer(**answer)
        except (ValidationError, TypeError) as error:
            raise NodeFailed(f"{node_url} answered an order with something else ({error})") from error

    async def stop(self, node_url: str, runtime_id: str, cause: str) -> None:
        """Stop a sandbox. No-op if the node does not have it. Raises: NodeFailed."""
        try:
            await self._ask("DELETE", f"{node_url}/sandboxes/{runtime_id}?{urlencode({'cause': cause})}")
        except NodeFailed as error:
            if error.status != 404:
                raise

    async def operate(self, node_url: str, runtime_id: str, verb: str) -> SandboxReport:
        """Pause or resume a sandbox, as `verb` says. Raises: NodeFailed."""
        url = f"{node_url}/sandboxes/{runtime_id}/{verb}"
        answer = await self._ask("POST", url, limit_s=OPERATION_LIMIT_S)
        try:
            return SandboxReport(**answer)
        except (ValidationError, TypeError) as error:
            raise NodeFailed(f"{node_url} answered {verb} with something else ({error})") from error

    async def answers(self, url: str) -> bool:
        """Whether the server of a sandbox answers the probes of its clients at an address."""
        try:
            # Without the node key. Each server is probed once, so its connection is not kept.
            reply = await self._http.ask(
                "GET",
                url + "/health",
                headers={"connection": "close"},
                limit_s=_PROBE_LIMIT_S,
                max_bytes=PROBE_BYTES,
            )
        except RequestFailed:
            return False
        return reply.is_success

    async def close(self) -> None:
        """Close all connections."""
        await self._http.aclose()

    async def _ask(
        self,
        method: str,
        url: str,
        *,
        content: bytes = b"",
        limit_s: float = ORDER_LIMIT_S,
    ) -> dict[str, Any]:
        # Read for each request: the key may have been changed.
        headers = {NODE_KEY_HEADER: self._node_keys.newest}
        try:
            reply = await self._http.ask(method, url, headers=headers, content=content, limit_s=limit_s)
            answer = json.loads(reply.body) if reply.body else {}
        except (RequestFailed, ValueError) as error:
            raise NodeFailed(f"{method} {url}: {error}") from error
        if not isinstance(answer, dict):
            raise NodeFailed(f"{method} {url} was answered with no object", status=reply.status)
        if not reply.is_success:
            detail = answer.get("detail", "")
            raise NodeFailed(f"{method} {url}: {reply.status} {detail}".rstrip(), status=reply.status)
        return answer
