"""How many replies the budget cut is what the engine says, by the real lm-eval 0.4.13."""

from __future__ import annotations

from pathlib import Path

import pytest

from strop.engine.vllm.environment import VLLM
from tests.conftest import require_system_part
from tests.evaluate.harness.asking import CUT, ENDED, STOPPED, ask, samples_of, talking_model, write_tasks

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("harness_python")]


@pytest.mark.parametrize("engine", ["hf", "vllm"])
def test_a_budget_that_cuts_every_reply_is_seen(engine: str, tmp_path: Path) -> None:
    """Incident: texts were encoded again, to fewer tokens than were generated, and the table said 0.0 %."""
    require_system_part("vLLM (make vllm-deps)", engine == "hf" or VLLM.is_ready())
    words = (f"harness.include={write_tasks(tmp_path, [CUT, CUT + CUT])}", f"harness.engine={engine}")
    result = ask(talking_model(tmp_path), tmp_path / "out", "hats", *words, "model.dtype=float32")
    assert [sample["resps"] for sample in samples_of(tmp_path / "out", "hats")] == [
        [["thethethethethet"]]
    ] * 2
    assert (result.max_reply_tokens, result.truncated_frac, result.truncation_suspect) == (16, 1.0, True)


@pytest.mark.parametrize("engine", ["hf", "vllm"])
def test_a_terminator_and_a_stop_string_are_no_cut(engine: str, tmp_path: Path) -> None:
    require_system_part("vLLM (make vllm-deps)", engine == "hf" or VLLM.is_ready())
    words = (f"harness.include={write_tasks(tmp_path, [CUT, ENDED, STOPPED])}", f"harness.engine={engine}")
    result = ask(talking_model(tmp_path), tmp_path / "out", "hats", *words, "model.dtype=float32")
    replies = [sample["resps"][0][0] for sample in samples_of(tmp_path / "out", "hats")]
    assert replies == ["thethethethethet", "", ""]
    assert result.truncated_frac == pytest.approx(1 / 3)
