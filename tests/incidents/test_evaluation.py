"""Incidents of the evaluation group, by id."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import takewhile
from pathlib import Path
from typing import Any

import pytest

from strop.cluster import Roles
from strop.engine import Engine, GenerationRequest
from strop.errors import CheckRefused
from strop.evaluate import (
    EvalResult,
    EvalSettings,
    compare_results,
    refuse_invalid,
)
from strop.evaluate.stored import StoredBaseline, list_rows
from strop.rollout import Example, Outcome, Split
from strop.run.held_out import Evaluation
from strop.tasks import Task
from strop.tasks.judging import Judge
from strop.tokenizer import Tokenizer
from tests.evaluate.arithmetic_world import (
    Answer,
    add,
    make_engine,
    make_task,
    make_tokenizer,
)
from tests.fixtures.commands import Run
from tests.fixtures.dummy_engine import ScriptedReply
from tests.fixtures.evaluating import evaluate_task
from tests.fixtures.spell import SpellTask
from tests.fixtures.tiny_run import Composition, new_run, tiny_spec
from tests.fixtures.tiny_tokenizer import tiny_tokenizer
from tests.incidents.faulty_engines import native_engine, perturbed_engine

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


def test_eva_1_another_form_of_what_was_trained_on_is_no_held_out_score(tmp_path: Path) -> None:
    """Incident: a + b was trained on for 72 of 94 held-out sums b + a."""
    tokenizer, task = make_tokenizer(tmp_path), make_task()
    with pytest.raises(CheckRefused, match=r"2 of 10 .* trained on"):
        evaluate(tokenizer, trained_ids=frozenset({task.problem_of(task.examples(Split.HELD_OUT)[0])}))


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


NUM_TOKENS = 24
"""Reply budget of the tasks here that a random model is asked."""
ASK = ("model.dtype=float32", "placement.threads=1", "--split", "held_out", "--task", "arithmetic")


def train(run: Run, name: str, *words: str) -> Path:
    ended = run("train", "run.toml", f"output.dir={name}", *words)
    assert ended.code == 0, ended.err
    return Path(name)


def test_eva_1_trained_ids_are_refused_as_test_by_the_command(run: Run, folder: Path) -> None:
    """Incident: 90.1 % on a test set was 337 of 374, and 374 is the size of the training split."""
    trained = train(run, "trained")
    assert run("eval", trained, *ASK, "--limit", "4").code == 0
    # With 300 examples held out instead of 100, most of those called held-out were trained on.
    refused = run("eval", trained, *ASK, "num_held_out=300")
    assert (refused.code, refused.out) == (76, "")
    assert "of 300 examples of task arithmetic called held_out were trained on, the first is" in refused.err
    without = run("eval", trained, "--task", "arithmetic", "--limit", "4")
    assert without.code == 2
    assert "Missing option '--split'" in without.err
    as_train = run("eval", trained, *ASK[:2], "--split", "train", "--task", "arithmetic", "--limit", "4")
    assert as_train.code == 0


def evaluate_model(path: Path, engine: Engine, task: Task, *, split: Split = Split.HELD_OUT) -> EvalResult:
    tokenizer = Tokenizer.load(path)
    settings = EvalSettings(run_seed=0, step=0, split=split)
    return asyncio.run(
        evaluate_task(task=task, engine=engine, tokenizer=tokenizer, settings=settings, model_digest="m")
    )


class Records(SpellTask):
    """Keeps what is said."""

    def __init__(self) -> None:
        super().__init__(max_reply_tokens=NUM_TOKENS)
        self.said: dict[str, str] = {}

    async def verify(self, example: Example, text: str) -> Outcome:
        self.said[example.example_id] = text
        return await super().verify(example, text)


class SaysTheSame(SpellTask):
    """Wants the replies that a model is known to give."""

    def __init__(self, said: Mapping[str, str], *, pays_length: bool = False) -> None:
        super().__init__(max_reply_tokens=NUM_TOKENS)
        self._said = said
        self._pays_length = pays_length

    async def verify(self, example: Example, text: str) -> Outcome:
        wanted = self._said[example.example_id]
        is_same = text == wanted
        num_same = len(list(takewhile(bool, (a == b for a, b in zip(text, wanted, strict=False)))))
        share = num_same / max(len(wanted), len(text), 1)
        reward = min(len(text) / NUM_TOKENS, 1.0) if self._pays_length else share
        return Outcome(parts={"reward": reward}, is_correct=is_same, format_ok=True, extracted=text)

    def gold_replies(self, example: Example) -> tuple[str, ...]:
        return (self._said[example.example_id],)


def record_replies(path: Path) -> dict[str, str]:
    """Return what the tiny model says to each example of both splits, greedily."""
    recorder = Records()
    for split in Split:
        evaluate_model(path, native_engine(path), recorder, split=split)
    return recorder.said


def test_eva_4_an_engine_that_scores_equal_weights_otherwise_is_told(tiny_model_dir: Path) -> None:
    """Incident: evaluation at TP 8 gave 10 % where 28 % was right, and nobody knows why."""
    task = SaysTheSame(record_replies(tiny_model_dir))
    baseline = evaluate_model(tiny_model_dir, native_engine(tiny_model_dir), task)
    assert baseline.greedy.accuracy == 1.0
    stored = StoredBaseline(name="known", results={Path("known.json"): baseline})
    again = evaluate_model(tiny_model_dir, native_engine(tiny_model_dir), task)
    other = evaluate_model(tiny_model_dir, perturbed_engine(tiny_model_dir, 30.0), task)
    for result, is_told in ((again, False), (other, True)):
        row = list_rows([result], [stored])[0]
        assert "the same weights" in row.note
        assert ("score otherwise" in row.note) is is_told


@pytest.mark.usefixtures("folder")
def test_eva_7_two_arms_that_differ_in_more_than_declared_get_no_verdict(run: Run) -> None:
    """Incident: arms meant to differ in the learning rate also differed in fp16 and bf16; single seeds."""
    one = train(run, "one")
    other = train(run, "other", "optimizer.lr=1e-4", "model.dtype=bfloat16")
    third = train(run, "third", "optimizer.lr=1e-4")
    refused = run("compare", one, other, "--vary", "optimizer.lr", "--json")
    assert (refused.code, refused.out) == (76, "")
    assert "differ in more than optimizer.lr: model.dtype 'float32' and 'bfloat16'. Allowed: " in refused.err
    undeclared = " ".join(run("compare", one, other).out.split())
    assert "no verdict on a cause: nothing was declared with --vary, and these differ: " in undeclared
    found = json.loads(run("compare", one, third, "--vary", "optimizer.lr", "--json").out)
    assert [setting["key"] for setting in found["settings"]] == ["optimizer.lr"]
    assert found["others"][0]["change"]["num_seeds"] == 1
    shown = run("compare", one, third, "--vary", "optimizer.lr").out
    assert "of one seed each: what another seed would change is not in them" in " ".join(shown.split())


def measure(made: Composition) -> Callable[[Roles], Roles]:
    """Let a composition evaluate as `strop train` does."""

    def change(roles: Roles) -> Roles:
        made.evaluate = Evaluation(made.spec, made.task, Judge(made.task), roles, "m", made.run_dir)
        return roles

    return change


@pytest.mark.parametrize("pays_length", [True, False])
def test_eva_6_a_reward_that_pays_length_only_is_seen_within_two_evaluations(
    pays_length: bool, tmp_path: Path, tiny_model_dir: Path
) -> None:
    """Incident: the reward rose to .6-.7 while held-out accuracy fell from 28.2 to 22.3."""
    spec = tiny_spec(
        train={"steps": 16, "prompts_per_step": 4, "group_size": 8, "checkpoint_every": 16}
        | {"accept": "weights: random; audit: pays length"},
        eval={"every": 8},
        # A random model chooses among near ties: larger steps change what it says without any reward.
        optimizer={"lr": 1e-2 if pays_length else 1e-6},
    )
    task = SaysTheSame(record_replies(tiny_model_dir), pays_length=pays_length)
    made = Composition(spec, tiny_model_dir, new_run(tmp_path), task=task)
    made.run(measure(made))
    accuracies = [summary.greedy_accuracy for summary in made.notes.summaries]
    rewards = [line["reward_mean"] for line in made.notes.steps]
    alarms = [event for event in made.notes.events if event.cause == "reward_eval_divergence"]
    if not pays_length:
        assert alarms == []
        return
    assert accuracies[0] > accuracies[-1]
    assert rewards[-1] > rewards[0]
    # Evaluated at 0, 8 and 16; how a processor rounds decides which of the two sees it.
    assert alarms
    assert all(alarm.step in {8, 16} for alarm in alarms)
    assert "the training reward rose from" in alarms[0].detail
    assert alarms[0].kind.value == "tripwire"
