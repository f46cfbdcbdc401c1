"""Incidents of the evaluation group that one evaluation and its stored result can cause.

Not here: engines at other parallelism (EVA-4), and the alarm that a run raises of itself (EVA-6); runs
that differ in more than was declared (EVA-7) are in tests/cli/test_eval.py.
"""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from strop.engine import GenerationRequest
from strop.errors import EXIT_REFUSED, CheckRefused, CorruptRecord
from strop.evaluate import (
    EvalResult,
    EvalSettings,
    Validity,
    compare_results,
    evaluate_task,
    read_result,
    refuse_invalid,
    write_result,
)
from strop.rollout import Example, Outcome, Sampling, Split
from strop.tasks import Task, problem_of
from strop.tasks.generated.arithmetic import Arithmetic
from strop.tokenizer import Tokenizer
from tests.evaluate.arithmetic_world import (
    Answer,
    PartialArithmetic,
    add,
    make_engine,
    make_spec,
    make_task,
    make_tokenizer,
)
from tests.fixtures.dummy_engine import ScriptedReply
from tests.fixtures.tiny_tokenizer import tiny_tokenizer

SETTINGS = EvalSettings(run_seed=0, step=0, split=Split.HELD_OUT)


def evaluate(
    tokenizer: Tokenizer, answer: Answer = add, task: Task | None = None, **changes: Any
) -> EvalResult:
    trained_ids = changes.pop("trained_ids", frozenset())
    max_positions = changes.pop("max_positions", None)
    return asyncio.run(
        evaluate_task(
            task=task or make_task(),
            engine=make_engine(tokenizer, answer),
            tokenizer=tokenizer,
            settings=replace(SETTINGS, **changes),
            model_digest="m",
            trained_ids=trained_ids,
            max_positions=max_positions,
        )
    )


def test_eva_1_trained_examples_are_not_a_held_out_score(tmp_path: Path) -> None:
    """Incident: 90.1 % on a test set was 337 of 374, and 374 is the size of the training split."""
    tokenizer, task = make_tokenizer(tmp_path), make_task()
    trained = {example.example_id for example in task.examples(Split.TRAIN)}
    evaluate(tokenizer, trained_ids=trained)
    one_of_them = task.examples(Split.HELD_OUT)[3].example_id
    with pytest.raises(CheckRefused, match=rf"1 of 10 .* trained on, the first is {one_of_them}"):
        evaluate(tokenizer, trained_ids=trained | {one_of_them})
    assert evaluate(tokenizer, trained_ids=trained, split=Split.TRAIN).split is Split.TRAIN


def test_eva_1_another_form_of_what_was_trained_on_is_no_held_out_score(tmp_path: Path) -> None:
    """Incident: a + b was trained on for 72 of 94 held-out sums b + a."""
    tokenizer, task = make_tokenizer(tmp_path), make_task()
    with pytest.raises(CheckRefused, match=r"2 of 10 .* trained on"):
        evaluate(tokenizer, trained_ids=frozenset({problem_of(task, task.examples(Split.HELD_OUT)[0])}))


def test_eva_1_there_is_no_default_split() -> None:
    """Incident: the script that computed pass@k took the training split unless told otherwise."""
    with pytest.raises(TypeError, match="split"):
        EvalSettings(run_seed=0, step=0)  # type: ignore[call-arg]


@pytest.mark.parametrize(
    "name",
    ["split", "num_examples", "task_version", "model_digest", "examples_digest", "protocol_digest", "greedy"],
)
def test_eva_1_a_score_without_its_protocol_is_unreadable(tmp_path: Path, name: str) -> None:
    """Incident: as above; from the published numbers alone the split could only be guessed."""
    path = tmp_path / "r.json"
    write_result(evaluate(make_tokenizer(tmp_path)), path)
    stored = json.loads(path.read_text())
    del stored[name]
    path.write_text(json.dumps(stored))
    with pytest.raises(CorruptRecord, match=name):
        read_result(path)


def test_eva_2_a_score_under_a_cutting_budget_is_invalid(tmp_path: Path) -> None:
    """Incident: a default of 256 new tokens cut 13 % of the answers, and all baselines lost 3-5 points."""
    tokenizer = make_tokenizer(tmp_path)
    # 19 or 20 tokens: more than 16, fewer than the task's 32.
    cut = evaluate(tokenizer, lambda a, b, request: f"The total is {a + b:>5}", max_reply_tokens=16)
    whole = evaluate(tokenizer, lambda a, b, request: f"The total is {a + b:>5}")
    assert (cut.validity.value, cut.greedy.truncated_frac) == ("invalid: truncation", 1.0)
    assert (whole.validity.value, whole.greedy.truncated_frac) == ("valid", 0.0)
    assert (cut.greedy.accuracy, cut.greedy.cut_unsolved_frac) == (0.0, 1.0)
    with pytest.raises(CheckRefused, match=r"invalid: truncation: a share of 1\.000 .* 16 tokens") as caught:
        refuse_invalid(cut)
    assert caught.value.exit_code == EXIT_REFUSED
    with pytest.raises(CheckRefused, match="invalid: truncation"):
        compare_results(whole, cut)


def test_eva_2_a_run_file_that_lowers_the_budget_lowers_no_claim(tmp_path: Path) -> None:
    """Incident: as above, and a later default configuration brought the small budget back.

    Here it is the task's own section that asks for less, so the task object itself has the small limit.
    """
    tokenizer, lowered = make_tokenizer(tmp_path), make_task(max_reply_tokens=16)
    assert (lowered.limits.max_reply_tokens, lowered.limits.own_reply_tokens) == (16, 32)
    cut = evaluate(tokenizer, lambda a, b, request: f"The total is {a + b:>5}", lowered)
    assert (cut.validity.value, cut.greedy.truncated_frac) == ("invalid: truncation", 1.0)
    with pytest.raises(CheckRefused, match=r"invalid: truncation: .* 16 tokens, .* leave task\.max_reply"):
        refuse_invalid(cut)
    with pytest.raises(CheckRefused, match="invalid: truncation"):
        compare_results(cut, cut)
    # Replies of 2 or 3 tokens: nothing is cut, and nothing is wrong with the small budget.
    assert evaluate(tokenizer, task=lowered).is_valid
    # The same number written down is no lowering.
    same = make_task(max_reply_tokens=32)
    endless = ScriptedReply(text="1 and ", ends=False)
    assert evaluate(tokenizer, lambda a, b, request: endless, same).is_valid


def test_eva_2_a_small_budget_that_cuts_nothing_is_fine(tmp_path: Path) -> None:
    """Incident: as above; what makes a score invalid is the cutting, not the number."""
    assert evaluate(make_tokenizer(tmp_path), max_reply_tokens=16).validity is Validity.VALID


def test_eva_2_what_the_tasks_own_budget_cuts_is_the_models_doing(tmp_path: Path) -> None:
    """Incident: as above. A model that never stops has a score, and the share cut stands beside it."""
    endless = ScriptedReply(text="1 and ", ends=False)
    result = evaluate(make_tokenizer(tmp_path), lambda a, b, request: endless)
    assert (result.validity, result.greedy.truncated_frac) == (Validity.VALID, 1.0)


def test_eva_3_unequal_protocols_are_not_compared(tmp_path: Path) -> None:
    """Incident: a gain from 41.2 to 52.3 was no gain: the baseline with the same stops had 52.7."""
    with_template = make_tokenizer(tmp_path)
    without = Tokenizer.load(tiny_tokenizer(tmp_path / "base", with_chat_template=False))
    with pytest.raises(CheckRefused, match=r"tokenizer_digest .*; prompt_format 'base' and 'chat'; stop_str"):
        compare_results(evaluate(without), evaluate(with_template))
    # What ends a reply to a base prompt is written down with the score.
    assert evaluate(without).stop_strings == list(make_task().limits.stops(is_base=True))
    assert evaluate(with_template).stop_strings == list(make_task().limits.stops(is_base=False))
    other_task = make_task(max_reply_tokens=31)
    with pytest.raises(CheckRefused, match=r"protocols: task_version .*; max_reply_tokens 32 and 31"):
        compare_results(evaluate(with_template), evaluate(with_template, task=other_task))


def test_eva_5_every_example_is_counted(tmp_path: Path) -> None:
    """Incident: prompts that were too long left the denominator, and the score rose."""

    def answer(a: int, b: int, request: Any) -> str | ScriptedReply:
        return ScriptedReply(text="", is_aborted=True) if a == 1 else str(a + b)

    result = evaluate(make_tokenizer(tmp_path), answer, num_samples=3)
    for score, num_rollouts in ((result.greedy, 10), (result.sampled, 30)):
        assert score is not None
        assert score.num_rollouts == num_rollouts
        assert len(score.by_example) == result.num_examples == 10
        assert score.num_unscored > 0
    assert not result.is_valid


def test_eva_5_a_prompt_that_is_too_long_is_a_failure(tmp_path: Path) -> None:
    """Incident: as above. It is not attempted, counts as not solved in every score, and says so."""
    tokenizer = make_tokenizer(tmp_path)
    task = make_task(max_value=12)
    lengths = sorted(len(request.prompt_ids) for request in _ask_all(tokenizer, task))
    # Room for a reply of 32 tokens behind the shortest prompts only.
    num_fitting = lengths.count(lengths[0])
    assert 0 < num_fitting < 10
    result = evaluate(tokenizer, task=task, num_samples=2, pass_at=(1, 2), max_positions=lengths[0] + 32)
    for score, per_example in ((result.greedy, 1), (result.sampled, 2)):
        assert score is not None
        assert score.accuracy == num_fitting / 10
        assert (score.num_too_long, score.num_unscored) == ((10 - num_fitting) * per_example, 0)
        assert score.verifier_error_frac == 0.0
    for k in (1, 2):
        assert result.pass_at_k[k].value == num_fitting / 10
        assert (result.pass_at_k[k].num_examples, result.pass_at_k[k].num_left_out) == (10, 0)
    assert result.is_valid


def _ask_all(tokenizer: Tokenizer, task: Task) -> list[GenerationRequest]:
    """Return the requests of an evaluation without a limit."""
    engine = make_engine(tokenizer, add)
    asyncio.run(
        evaluate_task(task=task, engine=engine, tokenizer=tokenizer, settings=SETTINGS, model_digest="m")
    )
    return engine.requests


def test_eva_5_a_declared_threshold_is_part_of_the_protocol(tmp_path: Path) -> None:
    """Incident: any score above 0 counted as solved; here 0.3 does only where that was declared."""
    tokenizer, task = make_tokenizer(tmp_path), PartialArithmetic(make_spec())
    wrong = evaluate(tokenizer, lambda a, b, request: "0", task, num_samples=2, pass_at=(2,))
    assert wrong.pass_at_k[2].value == 0.0
    lenient = evaluate(
        tokenizer, lambda a, b, request: "0", task, num_samples=2, pass_at=(2,), pass_threshold=0.3
    )
    assert lenient.pass_at_k[2].value == 1.0
    with pytest.raises(CheckRefused, match=r"protocols: pass_threshold None and 0\.3"):
        compare_results(wrong, lenient)


def test_eva_5_other_sampling_is_another_protocol(tmp_path: Path) -> None:
    """Incident: top-k was 50 in evaluation and 20 in training, and the scores were compared."""
    tokenizer = make_tokenizer(tmp_path)
    plain = evaluate(tokenizer, num_samples=2)
    narrow = evaluate(tokenizer, num_samples=2, sampling=Sampling(top_k=20))
    assert plain.protocol_digest != narrow.protocol_digest
    with pytest.raises(CheckRefused, match=r"protocols: sampling .*'top_k': None.* and .*'top_k': 20"):
        compare_results(plain, narrow)


class LengthPayingArithmetic(Arithmetic):
    """Arithmetic whose reward is the reply's length and whose verdict is arithmetic."""

    def verify(self, example: Example, text: str) -> Outcome:
        judged = super().verify(example, text)
        return replace(judged, parts={"length": min(1.0, len(text) / 20)})


def test_eva_6_a_reward_that_rises_while_accuracy_falls_is_seen(tmp_path: Path) -> None:
    """Incident: the reward rose to .6-.7 while held-out accuracy fell from 28.2 to 22.3."""
    tokenizer, task = make_tokenizer(tmp_path), LengthPayingArithmetic(make_spec())
    before = evaluate(tokenizer, lambda a, b, request: str(a + b), task)
    after = evaluate(tokenizer, lambda a, b, request: "a long story about 0", task, step=20)
    change = compare_results(before, after).greedy
    assert change is not None
    assert change.reward is not None
    # Replies of one or two letters, then of twenty.
    assert 0.9 <= change.reward.estimate <= 0.95
    assert change.reward.low > 0.0
    # Ten sums of five problems, all lost: 5 of 8, with three more as if they had changed as far as can be.
    assert (change.estimate, change.low) == (-1.0, -1.0)
    assert -0.2 < change.high < -0.1


def test_rew_7_a_gain_of_form_is_told_from_a_gain_of_ability(tmp_path: Path) -> None:
    """Incident: under a lenient reward the strict form fell from 58 % to 1.2 % while accuracy rose."""
    tokenizer = make_tokenizer(tmp_path)
    plain = evaluate(tokenizer, lambda a, b, request: str(a + b))
    drifted = evaluate(tokenizer, lambda a, b, request: f"{a + b} it is", step=20)
    change = compare_results(plain, drifted).greedy
    assert change is not None
    assert change.estimate == 0.0
    assert change.format_ok is not None
    assert change.format_ok.estimate == -1.0
    # No reply has the form on both sides: nothing can be said of ability there.
    assert (change.in_format, change.num_in_format) == (None, 0)
