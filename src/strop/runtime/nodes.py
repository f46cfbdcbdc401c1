"""Nodes as the controller knows them: the newest report of each, and the way to ask it for something."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote

import httpx
from pydantic import ValidationError

from strop.runtime.contract import NODE_KEY_HEADER, NodeAnswer, NodeOrder, NodeReport, SandboxReport
from strop.runtime.keys import KeyRing

ORDER_LIMIT_S = 10.0
OPERATION_LIMIT_S = 300.0
"""For a pause or a resume; with a sandbox that has much memory to save it takes long."""
_PROBE_LIMIT_S = 5.0
_MAX_CONNECTIONS = 256


@dataclass(kw_only=True, slots=True)
class Node:
    """One node agent."""

    report: NodeReport
    seen: float = field(default_factory=time.monotonic)
    """When it last reported, by the monotonic clock."""
    should_drain: bool = False
    is_suspect: bool = False
    """Whether an order failed since the last report: it gets none until the next."""

    @property
    def is_open(self) -> bool:
        """Whether it takes new sandboxes."""
        return not (self.report.is_draining or self.should_drain or self.is_suspect)


class NodeFailed(Exception):
    """A node did not do what it was asked, or may not have; `status` is 0 where there was no answer."""

    def __init__(self, what: str, *, status: int = 0) -> None:
        super().__init__(what)
        self.status = status


class NodeClient:
    """Asks node agents, each by the address of its report. Closed by `close`."""

    def __init__(self, node_keys: KeyRing) -> None:
        self._node_keys = node_keys
        tls = httpx.create_ssl_context()
        # A proxy of this process's environment is for the way out of the cluster, not for nodes.
        self._http = httpx.AsyncClient(
            trust_env=False,
            verify=tls,
            timeout=httpx.Timeout(ORDER_LIMIT_S, pool=OPERATION_LIMIT_S),
            limits=httpx.Limits(max_connections=_MAX_CONNECTIONS, max_keepalive_connections=_MAX_CONNECTIONS),
        )
        # Sandboxes are asked without the key of the nodes.
        self._plain = httpx.AsyncClient(trust_env=False, verify=tls, timeout=_PROBE_LIMIT_S)

    async def order(self, node_url: str, order: NodeOrder) -> NodeAnswer:
        """Have a sandbox made. Raises: NodeFailed; the node may have taken the order all the same."""
        content = order.model_dump(mode="json", exclude_defaults=True)
        answer = await self._ask("POST", f"{node_url}/sandboxes", json=content)
        try:
            return NodeAnswer(**answer)
        except (ValidationError, TypeError) as error:
            raise NodeFailed(f"{node_url} answered an order with something else ({error})") from error

    async def stop(self, node_url: str, runtime_id: str, cause: str) -> None:
        """End a sandbox; one that the node does not have is none. Raises: NodeFailed."""
        try:
            await self._ask("DELETE", f"{node_url}/sandboxes/{runtime_id}", params={"cause": cause})
        except NodeFailed as error:
            if error.status != 404:
                raise

    async def operate(self, node_url: str, runtime_id: str, verb: str) -> SandboxReport:
        """Pause or resume a sandbox, as `verb` says. Raises: NodeFailed."""
        url = f"{node_url}/sandboxes/{runtime_id}/{verb}"
        answer = await self._ask("POST", url, timeout=OPERATION_LIMIT_S)
        try:
            return SandboxReport(**answer)
        except (ValidationError, TypeError) as error:
            raise NodeFailed(f"{node_url} answered {verb} with something else ({error})") from error

    async def build(
        self, node_url: str, target: str, tags: Sequence[str], context: AsyncIterator[bytes]
    ) -> dict[str, Any]:
        """Have an image built from a gzip tar. Raises: NodeFailed."""
        params = {"image": target, "tag": list(tags)}
        headers = {"content-type": "application/gzip"}
        return await self._ask("POST", f"{node_url}/builds", params=params, content=context, headers=headers)

    async def build_status(self, node_url: str, build_id: str) -> dict[str, Any]:
        """Ask how a build is. Raises: NodeFailed."""
        return await self._ask("GET", f"{node_url}/builds/{quote(build_id, safe='')}")

    async def find_image(self, node_url: str, image: str) -> dict[str, Any]:
        """Ask whether a node has an image. Raises: NodeFailed."""
        return await self._ask("GET", f"{node_url}/images", params={"image": image})

    async def answers(self, url: str) -> bool:
        """Whether the server of a sandbox answers at an address, as its clients will ask it."""
        for path in ("/health", "/alive"):
            try:
                if (await self._plain.get(url + path)).is_success:
                    return True
            except httpx.HTTPError:
                return False
        return False

    async def close(self) -> None:
        """Close all connections."""
        await self._http.aclose()
        await self._plain.aclose()

    async def _ask(
        self, method: str, url: str, *, headers: Mapping[str, str] | None = None, **given: Any
    ) -> dict[str, Any]:
        # A key that was changed is sent from then on.
        sent = {NODE_KEY_HEADER: self._node_keys.newest, **(headers or {})}
        try:
            answer = await self._http.request(method, url, headers=sent, **given)
            content = answer.json() if answer.content else {}
        except (httpx.HTTPError, ValueError) as error:
            raise NodeFailed(f"{method} {url}: {type(error).__name__} {error}".rstrip()) from error
        if not isinstance(content, dict):
            raise NodeFailed(f"{method} {url} was answered with no object", status=answer.status_code)
        if not answer.is_success:
            detail = content.get("detail", "")
            raise NodeFailed(
                f"{method} {url}: {answer.status_code} {detail}".rstrip(), status=answer.status_code
            )
        return content
