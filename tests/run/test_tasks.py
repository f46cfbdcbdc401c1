"""Which tasks `strop audit all` looks at."""

from __future__ import annotations

import pytest

from strop.errors import ConfigError
from strop.run.tasks import list_audits
from strop.spec.built_in import built_in_tasks
from strop.tasks.rows.judged_rows import PresetSpec

pytest.importorskip("reasoning_gym", reason="the extra 'tasks' is not installed")


def test_tasks_without_files_are_listed_and_not_audited() -> None:
    found = dict(list_audits())
    plain = {label for label in found if "/" not in label}
    assert plain == set(built_in_tasks()) - {"reasoning-gym"}
    assert {label for label in plain if found[label] is not None} == {
        "arithmetic",
        "guess-number",
    }
    assert len(found) - len(plain) > 95


def test_settings_with_their_tasks_name_reach_that_task() -> None:
    words = ["gsm8k.source=folder", "mbpp.num_train=3"]
    found = dict(list_audits(words))
    gsm8k = found["gsm8k"]
    assert isinstance(gsm8k, PresetSpec)
    assert gsm8k.source == "folder"
    # A setting is no source.
    assert found["mbpp"] is None


def test_a_setting_of_no_task_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"^gsm9k.source=x does not say .* TASK is one of arithmetic, "):
        list(list_audits(["gsm9k.source=x"]))
