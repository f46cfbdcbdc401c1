"""Rewards that compare the replies of a group: `forms/groups.jsonl` has functions and what replies earn."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from strop.engine import GenerationRequest
from strop.environments import choose_environment, run_group, run_groups
from strop.evaluate import EvalSettings, plan_evaluation, rescore
from strop.io.notices import listen
from strop.rollout import Outcome, Rollout, Split
from strop.spec import load_spec
from strop.tasks import Task, build_task, build_warm_task
from strop.tasks.judging import Judge
from strop.tokenizer import Tokenizer
from tests.fixtures.builders import plan_for
from tests.fixtures.dummy_engine import DummyEngine
from tests.fixtures.judge_server import REPLY, judge_server
from tests.fixtures.judged import judge_task
from tests.fixtures.judging import failed, run_self_test
from tests.fixtures.tiny_tokenizer import tiny_tokenizer
from tests.tasks.user.test_rows import spec_of

LINES = Path(__file__).parents[1].joinpath("forms", "groups.jsonl").read_text("utf-8").splitlines()
SHORTEST = "def score(completions, **columns):\n    {}\n".format(json.loads(LINES[0])["code"])


@pytest.fixture
def tokenizer(tmp_path: Path) -> Tokenizer:
    return Tokenizer.load(tiny_tokenizer(tmp_path / "tokenizer"))


def attempt(
    task: Task, tokenizer: Tokenizer, replies: Sequence[str | None], judge: Judge | None = None
) -> Sequence[Rollout]:
    """Attempt one example; None: the engine fails at each try."""
    example = task.examples(Split.TRAIN)[0]
    plans = [plan_for(example, max_reply_tokens=32, sample_index=place) for place in range(len(replies))]
    script = [OSError("cable") if reply is None else reply for reply in replies]
    engine = DummyEngine(tokenizer, script + [OSError("cable")] * 2)

    async def run() -> Sequence[Rollout]:
        group = await run_group(choose_environment(task, judge), engine, tokenizer, plans)
        if judge is not None:
            await judge.close()
        return group.rollouts

    return asyncio.run(run())


def earned(outcome: Outcome) -> float | str | None:
    return outcome.reward if outcome.failure is None else "/".join(failed(outcome))


@pytest.mark.parametrize("form", [json.loads(line) for line in LINES], ids=lambda form: form["why"])
def test_a_group_is_judged_as_a_whole(tmp_path: Path, tokenizer: Tokenizer, form: dict[str, Any]) -> None:
    head = f"def score({form.get('args', 'completions')}):\n    "
    task = build_task(spec_of(tmp_path, code=head + form["code"], max_reward=form.get("max_reward", 1.0)))
    rollouts = attempt(task, tokenizer, form["replies"])
    assert [earned(rollout.outcome) for rollout in rollouts] == form["right"]
    for outcome in (rollout.outcome for rollout in rollouts):
        assert outcome.is_correct is (
            None if outcome.reward is None else outcome.reward >= task.limits.max_reward
        )
        assert outcome.failure is None or outcome.failure.kind.isidentifier()


def test_rewards_of_both_forms_are_added_in_workers(tmp_path: Path, tokenizer: Tokenizer) -> None:
    code = (
        SHORTEST + "\ndef right(reply, answer):\n    1 / len(reply.strip('x'))\n    return answer in reply\n"
    )
    rewards = [f"{tmp_path / 'reward.py'}:{name}" for name in ("right", "score")]
    spec = spec_of(tmp_path, code=code, reward=rewards, reward_weights=[1.0, 0.5], max_reward=1.5)
    task = build_task(spec)
    judge = Judge(task, partial(build_warm_task, spec))
    right = str(task.examples(Split.TRAIN)[0].answer)
    failing, long, best = attempt(task, tokenizer, ["x", f"{right}....", f"{right}."], judge)
    # What cannot be judged by itself is not in the group.
    assert earned(failing.outcome) == "task/ZeroDivisionError"
    assert (long.outcome.parts, best.outcome.parts) == (
        {"right": 1.0, "score": 0.0},
        {"right": 1.0, "score": 0.5},
    )
    assert (long.outcome.is_correct, best.outcome.is_correct) == (False, True)


def test_an_evaluation_says_that_the_greedy_reply_is_alone(tmp_path: Path, tokenizer: Tokenizer) -> None:
    task = build_task(spec_of(tmp_path, code=SHORTEST))
    settings = EvalSettings(run_seed=0, step=0, split=Split.HELD_OUT, num_examples=2, num_samples=2)
    told: list[str] = []
    with listen(told.append):
        planned = plan_evaluation(task=task, tokenizer=tokenizer, settings=settings, model_digest="m")
    assert (planned.plan.compares, len(told)) == (True, 1)

    def say(request: GenerationRequest) -> str:
        return "long, and alone" if request.sampling.temperature == 0 else "9" * (1 + request.seed % 5)

    groups = asyncio.run(
        run_groups(
            choose_environment(task), DummyEngine(tokenizer, say), tokenizer, planned.rollout_plans_P_G
        )
    )
    for group in groups:
        greedy, *samples = group.rollouts
        lengths = [len(one.reply.text) for one in samples if one.reply]
        assert greedy.outcome.reward == 1.0
        assert [one.outcome.reward for one in samples] == [float(n == min(lengths)) for n in lengths]
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    assert asyncio.run(rescore(planned.plan, rollouts, task))[1] == []


NEAREST = """
def score(completions, answer, **columns):
    misses = [abs(int(c) - int(a)) if c.isdigit() else 99 for c, a in zip(completions, answer)]
    return [float(miss == min(misses)) for miss in misses]
"""


def test_the_self_test_judges_nonsense_beside_a_right_reply(tmp_path: Path) -> None:
    for code, probes in ((NEAREST, set()), (SHORTEST, {"empty", "garbage"})):
        task = build_task(spec_of(tmp_path, code=code))
        examples = [one for one in task.examples(Split.TRAIN) if len(one.answer or "") > 1][:3]
        assert {finding.probe for finding in run_self_test(task, examples)} >= probes
        assert probes or run_self_test(task, examples) == []


@pytest.mark.usefixtures("own_cache")
@pytest.mark.parametrize(
    ("scores", "right"),
    [
        ([0.25, 0.75], [0.25, 0.75, 0.25, 0.0]),
        ([0.5, 0.5], [0.5, 0.5, 0.5, 0.0]),
        *(([0.5, wrong], "engine/judge_unparsable") for wrong in (2, float("nan"), -1)),
        *((wrong, "engine/judge_unparsable") for wrong in ([1.0], [1.0] * 3, 0.5, [0.5, "1"], [True, 0])),
    ],
)
def test_a_judge_grades_groups_at_once(tmp_path: Path, tokenizer: Tokenizer, scores: Any, right: Any) -> None:
    def say(question: str) -> str:
        shown = [text for _, text in REPLY.findall(question)]
        assert sorted(shown) == ["a", "b"]
        graded = isinstance(right, list)
        ordered = [dict(zip("ab", scores, strict=True))[text] for text in shown] if graded else scores
        return json.dumps({"scores": ordered})

    with judge_server(say) as server:
        task = judge_task(tmp_path, server.url, compares=True)
        rollouts = attempt(task, tokenizer, ["a", "b", "a", "<think>"])
    expected = right if isinstance(right, list) else [right] * 3 + [0.0]
    assert [earned(rollout.outcome) for rollout in rollouts] == expected
    assert len(server.requests) == 1


def test_a_mixture_compares_by_part(tmp_path: Path, tokenizer: Tokenizer) -> None:
    spec_of(tmp_path, code=SHORTEST)
    part = {"name": "rows", "source": f"{tmp_path}/q.jsonl", "prompt": "question", "answer": "answer"}
    words = [f"task.parts.a.{key}={value}" for key, value in part.items()]
    words += [f"task.parts.a.reward={tmp_path}/reward.py:score", "name=x"]
    mixture = build_task(load_spec(None, ["task.name=mixture", *words]).spec.task)
    assert [earned(one.outcome) for one in attempt(mixture, tokenizer, ["12", "1"])] == [0.0, 1.0]
