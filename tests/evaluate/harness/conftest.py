"""What the tests that ask lm-eval share."""

from __future__ import annotations

from pathlib import Path

import pytest

from strop.evaluate.harness import LM_EVAL
from tests.conftest import require_system_part


@pytest.fixture(scope="session")
def harness_python() -> Path:
    """The interpreter of the harness's environment."""
    # Two gigabytes in the user's cache: `make harness-deps` makes them, no test does.
    require_system_part("the environment of lm-eval (make harness-deps)", LM_EVAL.is_ready())
    return LM_EVAL.python
