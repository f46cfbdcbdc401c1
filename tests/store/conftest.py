"""One object store for all tests of this room; each test has a prefix of its own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.fixtures.object_store import (
    BUCKET,
    SpoilingProxy,
    ask_store,
    object_store,
    spoiling_proxy,
    use_store,
)


@pytest.fixture(scope="session")
def store_address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a running store with one bucket."""
    with object_store(tmp_path_factory.mktemp("moto") / "log") as address:
        assert ask_store(address, "PUT", f"/{BUCKET}")[0] == 200
        yield address


@pytest.fixture
def s3_root(store_address: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """A prefix in the store that nobody else uses; the variables point there."""
    use_store(monkeypatch, store_address)
    return f"s3://{BUCKET}/{abs(hash(request.node.nodeid))}"


@pytest.fixture
def proxy(store_address: str, s3_root: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[SpoilingProxy]:
    """The same store behind a proxy; the variables point to the proxy."""
    with spoiling_proxy(store_address) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.address)
        yield proxy
