"""What the older clients of OpenHands exchanged with a service, sent to it again, in the same order.

It was recorded by `RemoteRuntime` of openhands-ai 0.62.0 and `RemoteSandboxService` of 1.11.0 as they were
installed, with a controller, a node and containers that were real.
"""

from __future__ import annotations

import itertools
import json
import re
import uuid
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.fixtures.runtime_service import EXCHANGES, Service, service, until

URL = re.compile(r"^https?://[^/]+:[0-9]+$")
WORD = re.compile(r"(?:SESSION_KEY|SESSION|RUNTIME|URL)-\d+|KEY|IMAGE")
_EXACT = ("status", "pod_status", "exists")
_READY_SOONER = {"starting": "running", "pending": "ready"}
"""A node of this test starts a sandbox within the time of one request; the recorded one took seconds."""


class Replay:
    """Sends what was recorded, with this service's ids in the place of words, and compares the answers."""

    def __init__(self, it: Service) -> None:
        self.it = it
        self.known = {"KEY": it.client.headers["x-api-key"], "IMAGE": "img:1"}

    def fill(self, recorded: Any) -> Any:
        """Put in what words stand for; a session's name is the client's to choose."""

        def value_of(found: re.Match[str]) -> str:
            if found[0].startswith("SESSION-"):
                self.known.setdefault(found[0], uuid.uuid4().hex)
            return self.known[found[0]]

        return json.loads(WORD.sub(value_of, json.dumps(recorded)))

    def differs(self, recorded: Any, found: Any, place: str = "answer") -> str:
        """Say where an answer is not as it was recorded, and learn words; names and order are exact."""
        if isinstance(recorded, str) and WORD.fullmatch(recorded):
            return "" if self.known.setdefault(recorded, found) == found else f"{place}: another {recorded}"
        if type(recorded) is not type(found):
            return f"{place}: {found!r} for {recorded!r}"
        if isinstance(recorded, dict):
            pairs = {key: (value, found.get(key)) for key, value in recorded.items()}
        elif isinstance(recorded, list):
            if len(recorded) != len(found):
                return f"{place}: {len(found)} for {len(recorded)}"
            pairs = {str(index): pair for index, pair in enumerate(zip(recorded, found, strict=True))}
        else:
            is_exact = place.rpartition(".")[2] in _EXACT
            is_same = not is_exact or found in (recorded, _READY_SOONER.get(str(recorded)))
            return "" if is_same else f"{place}: {found!r} for {recorded!r}"
        faults = [self.differs(*pair, f"{place}.{key}") for key, pair in pairs.items()]
        return next((one for one in faults if one), "")

    async def send(self, exchange: dict[str, Any]) -> httpx.Response:
        """Send one request, with the headers that its client sent."""
        body = exchange["body"]
        url = httpx.URL(self.it.serving.url).join(self.fill(exchange["url"]))
        headers = self.fill(exchange["headers"])
        async with httpx.AsyncClient(trust_env=False, verify=False, timeout=120.0) as plain:
            return await plain.request(exchange["method"], url, headers=headers, json=self.fill(body))

    async def expect(self, exchange: dict[str, Any]) -> None:
        """Send a request until it is answered as it was; what changes something is sent once."""
        difference = ""

        async def is_so() -> bool:
            nonlocal difference
            answer = await self.send(exchange)
            difference = f"{answer.status_code} {answer.text}"
            is_same = answer.status_code == exchange["status"]
            if is_same and exchange["answer"] is not None:
                difference = self.differs(exchange["answer"], answer.json())
                is_same = not difference
            assert is_same or exchange["method"] == "GET", (
                f"{exchange['method']} {exchange['url']}: {difference}"
            )
            return bool(is_same)

        try:
            await until(is_so)
        except TimeoutError:
            raise AssertionError(f"GET {exchange['url']}: {difference}") from None


@pytest.mark.parametrize("name", ["remote-runtime", "remote-sandbox-service"])
async def test_a_recorded_client_is_answered_as_it_was(tmp_path: Path, name: str) -> None:
    exchanges = json.loads((EXCHANGES / f"{name}.json").read_text("utf-8"))["exchanges"]
    assert len(exchanges) > 15

    async with service(tmp_path) as it:
        await it.add_node()
        replay = Replay(it)
        # Of polls that are the same, the last had the answer that it waited for.
        for exchange, following in itertools.zip_longest(exchanges, exchanges[1:]):
            request = [exchange["method"], exchange["url"]]
            if following is None or request != [following["method"], following["url"]]:
                await replay.expect(exchange)
        assert (await it.client.get("/list")).json() == {"runtimes": []}


async def test_b_asks_for_images_and_builds_none(tmp_path: Path) -> None:
    async with service(tmp_path) as it:
        node = await it.add_node()
        assert (await it.client.get("/api/warm-runtime-configs")).json() == {"configs": []}
        assert (await it.client.get("/registry_prefix")).json() == {"registry_prefix": ""}
        for image, is_there in (("img:1", True), ("other:1", False)):
            found = (await it.client.get("/image_exists", params={"image": image})).json()
            assert found["exists"] is is_there
            assert not is_there or set(found["image"]) == {"upload_time", "image_size_bytes"}
        context = {"context": ("context.tar.gz", b"x")}
        built = await it.client.post("/build", files=context, data={"target_image": "img:1"})
        assert built.status_code == 403
        assert [call for call in node.calls if "image" not in call] == []
