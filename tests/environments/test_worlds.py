"""Environments of an author's: a class with reset, step or tools, and score; what it may get wrong."""

from __future__ import annotations

import asyncio
import json
import tempfile
import textwrap
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from strop.audit import self_test
from strop.environments import Action, RolloutPlan, choose_environment, run_rollout
from strop.errors import ConfigError
from strop.rollout import RESTART, Example, FailureOwner, FinishReason, Outcome, Rollout, Split
from strop.spec.reader import load_spec
from strop.spec.task import TaskSpec
from strop.tasks import Task, build_task
from strop.tokenizer import Tokenizer
from tests.fixtures.builders import plan_for
from tests.fixtures.dummy_engine import DummyEngine
from tests.fixtures.judging import failed
from tests.fixtures.tiny_tokenizer import tiny_tokenizer
from tests.fixtures.tool_templates import HERMES, MISTRAL, ONE_CALL

COUNTING = '''
import asyncio
from strop.environments import Done, ToolError

class Counting:
    """Count up to the goal by calls of a tool."""

    max_turns = 4

    def examples(self, split):
        first = 1 if split == "train" else 3
        return [{"goal": goal, "answer": str(goal)} for goal in (first, first + 1)]

    def reset(self, example, seed):
        self.goal, self.total, self.closed = example.fields["goal"], 0, False
        return f"Count to {self.goal}."

    def add(self, number: int, times: int = 1) -> str:
        """Add a number, perhaps several times."""
        self.total += number * times
        return f"The total is {self.total}."

    async def wait(self, seconds: float) -> None:
        """Wait."""
        await asyncio.sleep(seconds)

    def give_up(self) -> Done:
        """Give up."""
        return Done("gave up")

    def break_it(self, how: str) -> object:
        """Break."""
        if how == "told":
            raise ToolError("that cannot be")
        if how == "raise":
            raise RuntimeError("a bug")
        if how == "object":
            return object()
        many = {"bytes": b"\\x00" * 5000, "much": "x" * 10_000_000}
        return (many | {"list": [1, {"a": 2}], "surrogate": "\\ud800"})[how]

    def _hidden(self):
        return None

    def score(self):
        return float(self.total == self.goal)

    def gold_replies(self, example):
        goal = example.fields["goal"]
        return [['```tool\\n{"name": "add", "arguments": {"number": %d}}\\n```' % goal, "Done."]]
'''
FOLDER = tempfile.TemporaryDirectory()
TEMPLATES = {"hermes": HERMES, "llama": ONE_CALL, "mistral": MISTRAL, "fence": None}


def call(name: str, form: str = "fence", **arguments: Any) -> str:
    """Return a call as a model of a family writes it."""
    given = json.dumps(arguments)
    return {
        "hermes": f'<tool_call>\n{{"name": "{name}", "arguments": {given}}}\n</tool_call>',
        "llama": f'{{"name": "{name}", "parameters": {given}}}',
        "mistral": f'[TOOL_CALLS][{{"name": "{name}", "arguments": {given}}}]',
        "fence": f'```tool\n{{"name": "{name}", "arguments": {given}}}\n```',
    }[form]


def build(source: str = COUNTING, *words: str, name: str = "Counting") -> Task:
    """Build the environment of a file, as a run file names it; equal ones once."""
    return build_spec(source, *words, name=name)[0]


@cache
def build_spec(source: str, *words: str, name: str) -> tuple[Task, TaskSpec]:
    """Return an environment and its section."""
    path = Path(tempfile.mkdtemp(dir=FOLDER.name), "own.py")
    path.write_text(textwrap.dedent(source))
    spec = load_spec(None, ["name=x", f"environment.name={path}:{name}", *words]).spec.task
    return build_task(spec), spec


def tokenizer_of(tmp_path: Path, form: str = "fence") -> Tokenizer:
    folder = tiny_tokenizer(tmp_path / f"tokenizer-{form}")
    template = TEMPLATES[form]
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
    return Tokenizer.load(folder)


def plan_of(task: Task, *, max_reply_tokens: int = 400, run_seed: int = 0) -> RolloutPlan:
    """Plan an attempt at the first training example."""
    return plan_for(task.examples(Split.TRAIN)[0], max_reply_tokens=max_reply_tokens, run_seed=run_seed)


def attempt(task: Task, tokenizer: Tokenizer, replies: list[str], **planned: Any) -> Rollout:
    """Attempt the first training example with scripted replies."""
    environment, engine = choose_environment(task)(), DummyEngine(tokenizer, replies)
    return asyncio.run(run_rollout(environment, engine, tokenizer, plan_of(task, **planned)))


def play_here(tmp_path: Path, task: Task, *replies: str) -> Rollout:
    """Attempt the first training example with scripted replies and a tokenizer without a tool template."""
    return attempt(task, tokenizer_of(tmp_path), list(replies), max_reply_tokens=4000)


def play(task: Task, example: Example, *replies: str) -> tuple[list[str], Outcome]:
    """Attempt an example without a model; return what the world says, reply by reply, and the outcome."""

    async def act() -> tuple[list[str], Outcome]:
        world = choose_environment(task)()
        try:
            said = [await world.reset(example, 0)]
            for reply in replies:
                result = await world.step(Action(text=reply, finish_reason=FinishReason.EOS))
                said.append(tuple(result.messages))
                if result.done:
                    break
            told = ["\n".join(message.text for message in messages) for messages in said]
            return told, await world.score()
        finally:
            await world.close()

    return asyncio.run(act())


@pytest.mark.parametrize("form", TEMPLATES)
def test_tools_are_called_in_the_form_of_the_model(tmp_path: Path, form: str) -> None:
    task = build()
    replies = [call("add", form, number=3), call("add", form, number=-1, times=2), "It is done."]
    rollout = attempt(task, tokenizer_of(tmp_path, form), replies)
    assert rollout.outcome.reward == 1.0, rollout.outcome
    assert rollout.outcome.is_correct
    assert rollout.outcome.format_ok
    metrics = rollout.outcome.metrics
    assert (metrics["num_tool_calls"], metrics["num_format_errors"], metrics["num_turns"]) == (2.0, 0.0, 3.0)
    assert metrics["stopped_by_done"] == 1.0
    assert [turn.text for turn in rollout.turns if turn.is_sampled] == replies
    assert not any(turn.role == RESTART for turn in rollout.turns)
    opening, _, answer, *_ = [turn.text for turn in rollout.turns]
    assert '"add"' in opening
    assert "Add a number, perhaps several times." in opening
    assert "_hidden" not in opening
    assert "The total is 3." in answer


@pytest.mark.parametrize(
    ("reply", "told"),
    [
        (call("subtract", number=1), "there is no tool 'subtract'; there is add, break_it, give_up, wait"),
        (call("add"), "add was called with wrong arguments: number: Field required"),
        (call("add", number="three"), "number: Input should be a valid integer"),
        (call("add", number=1, other=2), "other: Extra inputs are not permitted"),
        (call("reset", number=1), "there is no tool 'reset'"),
        ('```tool\n{"name": "add", "arg', "a tool call that cannot be read: it is no JSON"),
    ],
)
def test_a_wrong_call_is_told_counted_and_scored(tmp_path: Path, reply: str, told: str) -> None:
    """A fault of the policy's: what it earned then is what it earned."""
    rollout = attempt(build(), tokenizer_of(tmp_path), [reply, call("add", number=1), "Done."])
    assert told in rollout.turns[2].text
    assert rollout.outcome.metrics["num_format_errors"] == 1.0
    assert rollout.outcome.reward == 1.0
    assert rollout.outcome.format_ok is False


@pytest.mark.parametrize(("reply", "is_formed"), [(" ", False), ("I am done.", True)])
def test_white_space_is_no_reply_in_the_asked_form(tmp_path: Path, reply: str, is_formed: bool) -> None:
    assert attempt(build(), tokenizer_of(tmp_path), [reply]).outcome.format_ok is is_formed


def test_a_model_that_has_lost_the_form_is_stopped(tmp_path: Path) -> None:
    bad = call("subtract")
    rollout = attempt(build(COUNTING), tokenizer_of(tmp_path), [bad] * 9)
    assert rollout.outcome.metrics["num_turns"] == 3.0
    assert rollout.outcome.reward == 0.0


@pytest.mark.parametrize(
    ("how", "told"),
    [
        ("told", "error: that cannot be"),
        ("bytes", "(5000 bytes of binary data)"),
        ("list", '[1, {"a": 2}]'),
        ("surrogate", "?"),
        ("much", "characters left out ...]"),
    ],
)
def test_what_a_tool_returns_is_a_text_within_its_budget(tmp_path: Path, how: str, told: str) -> None:
    rollout = attempt(build(), tokenizer_of(tmp_path), [call("break_it", how=how), "Done."])
    assert told in rollout.turns[2].text
    assert len(rollout.turns[2].text) < 4200
    assert rollout.outcome.reward == 0.0
    assert rollout.outcome.metrics["num_tool_errors"] == float(how == "told")


@pytest.mark.parametrize(
    ("reply", "kind"),
    [
        (call("break_it", how="raise"), "RuntimeError"),
        (call("break_it", how="object"), "no_text"),
        (call("wait", seconds=600), "tool_timeout"),
        ("Its step returns nothing.", "DataError"),
    ],
)
def test_a_fault_of_a_tool_is_no_reward(tmp_path: Path, reply: str, kind: str) -> None:
    limit_s = 0.05 if kind == "tool_timeout" else 60.0
    task = build(f"{COUNTING}\n    def step(self, text): ...\n", f"environment.tool_limit_s={limit_s}")
    rollout = attempt(task, tokenizer_of(tmp_path), [reply])
    assert rollout.outcome.reward is None
    assert failed(rollout.outcome) == (FailureOwner.TASK, kind)


def test_a_tool_may_end_the_attempt(tmp_path: Path) -> None:
    rollout = attempt(build(), tokenizer_of(tmp_path), [call("give_up"), call("add", number=1)])
    assert rollout.outcome.metrics["num_turns"] == 1.0
    assert rollout.outcome.reward == 0.0


def test_rew_9_the_last_turn_is_executed_before_the_score(tmp_path: Path) -> None:
    task = build(COUNTING, "environment.max_turns=2")
    rollout = attempt(task, tokenizer_of(tmp_path), [call("add", number=3), call("add", number=-2)])
    assert rollout.outcome.reward == 1.0
    assert rollout.outcome.metrics["out_of_turns"] == 1.0


def test_an_attempt_ends_at_its_tokens_and_is_marked_as_cut(tmp_path: Path) -> None:
    task = build(COUNTING, "environment.max_attempt_tokens=70")
    rollout = attempt(task, tokenizer_of(tmp_path), [call("add", number=1)] * 4)
    sampled = [turn for turn in rollout.turns if turn.is_sampled]
    assert sum(len(turn.token_ids) for turn in sampled) <= 70
    assert rollout.outcome.truncated
    assert rollout.outcome.metrics["stopped_by_tokens"] == 1.0
    assert rollout.outcome.reward == 1.0


def test_right_attempts_of_the_class_pass_the_self_test() -> None:
    task = build()
    assert asyncio.run(self_test(task, task.examples(Split.TRAIN))) == []
    broken = build(COUNTING.replace("self.total == self.goal", "True"))
    probes = {one.probe for one in asyncio.run(self_test(broken, broken.examples(Split.TRAIN)))}
    assert {"empty", "garbage"} <= probes


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (('f"Count to {self.goal}."', "f\"Count to {__import__('random').random()}.\""), "for the same seed"),
        (("def score", "def scored"), "has no score"),
        (("def add(self, number: int", "def add(self, number"), "without a type"),
        (("(self, how: str)", "(self, how: 'Nothing')"), "Nothing"),
        (("(self, how: str)", "(self, how: asyncio.Lock)"), "JSON has no form"),
        (("max_turns = 4", ""), "how many turns"),
    ],
)
def test_a_class_that_cannot_work_is_refused(edit: tuple[str, str], message: str) -> None:
    source = COUNTING.replace(*edit)
    assert source != COUNTING

    def use() -> None:
        task = build(source)
        task.render(task.examples(Split.TRAIN)[0])
        choose_environment(task)()

    with pytest.raises(ConfigError, match=message):
        use()


def test_an_environment_without_step_and_tools_is_refused() -> None:
    source = """
    class Nothing:
        max_turns = 1
        def examples(self, split): return [{"a": split}]
        def reset(self, example, seed): return "Go."
        def score(self): return 0.0
    """
    task = build(source, name="Nothing")
    with pytest.raises(ConfigError, match="neither step nor a tool"):
        task.render(task.examples(Split.TRAIN)[0])


def test_a_reply_that_is_cut_inside_a_call_is_none(tmp_path: Path) -> None:
    rollout = attempt(build(), tokenizer_of(tmp_path), [call("add", number=1)], max_reply_tokens=20)
    assert rollout.outcome.truncated
    assert rollout.outcome.metrics["num_format_errors"] == 1.0
    assert rollout.outcome.reward == 0.0
