"""What the tests that ask lm-eval share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from strop.evaluate.harness import LM_EVAL
from tests.conftest import require_system_part

# At each start lm-eval reads all of its 14,000 files of tasks, which takes ten seconds of processor time.
FEW_TASKS = """
import sys
if any(word.endswith("lm_eval_models.py") for word in sys.orig_argv):
    from lm_eval.tasks._index import TaskIndex
    find = TaskIndex._iter_yaml_files
    TaskIndex._iter_yaml_files = lambda root: find(root / "gsm8k" if root.name == "tasks" else root)
"""


@pytest.fixture(scope="module")
def harness_python(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The interpreter of the harness's environment; of lm-eval's own tasks it finds gsm8k."""
    # Two gigabytes in the user's cache: `make harness-deps` makes them, no test does.
    require_system_part("the environment of lm-eval (make harness-deps)", LM_EVAL.is_ready())
    folder = tmp_path_factory.mktemp("few-tasks")
    (folder / "sitecustomize.py").write_text(FEW_TASKS)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(folder))
        yield LM_EVAL.python
