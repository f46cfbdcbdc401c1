"""Blends: the weighted sum by hand, parts without a score, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from strop.errors import ConfigError, DataError
from strop.rollout import Example, FailureOwner, Message, Outcome, Split, make_example
from strop.spec import load_spec
from strop.tasks import TaskLimits, build_task, build_warm_task
from strop.tasks.blend import Blend, BlendSpec
from strop.tasks.traits import judge_digests_of
from tests.fixtures.judge_server import judge_server, scored, shown_reply
from tests.fixtures.judging import failed, run_self_test

SUMS: dict[str, Any] = {"name": "arithmetic", "min_value": 1, "max_value": 4, "num_held_out": 4}
JUDGE: dict[str, Any] = {
    "name": "llm-judge",
    "judge_url": "http://127.0.0.1:1/v1",
    "judge_model": "scripted",
    "judge_revision": "1",
}


pytestmark = pytest.mark.usefixtures("own_cache")


class Says:
    """A task whose verifier says what a test wants."""

    name = "says"
    version = "1"
    limits = TaskLimits(max_reply_tokens=8)

    def __init__(self, outcome: Outcome | Exception, *, max_reward: float = 1.0) -> None:
        self._outcome = outcome
        self.limits = TaskLimits(max_reply_tokens=8, max_reward=max_reward)

    def examples(self, split: Split) -> Sequence[Example]:
        return [make_example(self.name, {"n": split.value}, "1")]

    def render(self, example: Example) -> tuple[Message, ...]:
        return (Message(role="user", content="?"),)

    def verify(self, example: Example, text: str) -> Outcome:
        if isinstance(self._outcome, Exception):
            raise self._outcome
        return self._outcome

    def gold_replies(self, example: Example) -> tuple[str, ...]:
        return ("1",)


def gives(reward: float | None, is_correct: bool | None = None, format_ok: bool | None = None) -> Says:
    return Says(Outcome(parts={"x": reward}, is_correct=is_correct, format_ok=format_ok))


def judge(tasks: Mapping[str, Says], parts: Mapping[str, dict[str, Any]], **settings: Any) -> Outcome:
    """Blend tasks that say what they say; the sections only carry weights."""
    tables: dict[str, Any] = {label: {"name": "arithmetic", **own} for label, own in parts.items()}
    task = Blend(BlendSpec(name="blend", parts=tables, **settings), tasks)
    return task.verify(make_example("says", {"n": "x"}, "1"), "text")


def test_the_reward_is_the_weighted_sum_and_every_part_is_kept() -> None:
    outcome = judge(
        {"right": gives(1.0, True, True), "style": gives(0.5, False, None)},
        {"right": {"weight": 0.8}, "style": {"weight": 0.4}},
    )
    # 0.8 * 1 + 0.4 * 0.5.
    assert outcome.parts == {"right": 0.8, "style": 0.2}
    assert outcome.reward == pytest.approx(1.0)
    assert (outcome.is_correct, outcome.format_ok) == (True, True)
    assert (outcome.metrics["score_right"], outcome.metrics["score_style"]) == (1.0, 0.5)


def test_a_part_counts_as_a_share_of_its_full_marks() -> None:
    big = Says(Outcome(parts={"x": 3.0}, is_correct=True), max_reward=4.0)
    outcome = judge({"big": big, "other": gives(0.0)}, {"big": {"weight": 2.0}, "other": {}})
    # 2 * 3/4 + 1 * 0.
    assert outcome.reward == 1.5


def test_a_part_without_a_score_leaves_none() -> None:
    lost = Says(Outcome.lost(FailureOwner.ENGINE, "judge_unparsable", "prose"))
    outcome = judge({"right": gives(1.0, True), "judge": lost}, {"right": {}, "judge": {}})
    assert outcome.reward is None
    assert outcome.parts == {"right": 1.0, "judge": None}
    assert failed(outcome)[1] == "judge_unparsable"


@pytest.mark.parametrize("failing", [gives(None), Says(TypeError("no"))])
def test_a_part_of_weight_0_is_recorded_and_never_matters(failing: Says) -> None:
    parts = {"right": {"weight": 1.0}, "watch": {"weight": 0.0}}
    outcome = judge({"right": gives(1.0, True), "watch": failing}, parts)
    assert (outcome.reward, outcome.parts) == (1.0, {"right": 1.0})
    outcome = judge({"right": gives(1.0, True), "watch": gives(0.25)}, parts)
    assert (outcome.reward, outcome.metrics["score_watch"]) == (1.0, 0.25)


def test_an_exception_of_a_part_with_a_weight_is_no_score() -> None:
    tasks = {"right": gives(1.0, True), "other": Says(TypeError("broken"))}
    with pytest.raises(TypeError, match="broken"):
        judge(tasks, {"right": {}, "other": {}})


def blend(**settings: Any) -> Blend:
    parts = settings.pop("parts", {"sums": SUMS, "judge": JUDGE})
    task = build_task(BlendSpec(name="blend", parts=parts, **settings))
    assert isinstance(task, Blend)
    return task


def test_a_verifier_is_weighed_against_a_judge() -> None:
    def praise_short(question: str) -> str:
        return scored(0.5 if len(shown_reply(question)) < 8 else 0.0)

    with judge_server(praise_short) as server:
        judge = {**JUDGE, "judge_url": server.url, "weight": 0.25}
        task = blend(parts={"sums": {**SUMS, "weight": 0.75}, "judge": judge})
        example = task.examples(Split.TRAIN)[0]
        outcome = task.verify(example, str(example.answer))
    # 0.75 * 1 + 0.25 * 0.5.
    assert outcome.reward == 0.875
    assert outcome.is_correct is True
    assert task.render(example)[0].text in server.questions[0]
    assert (task.limits.max_reward, task.limits.verify_limit_s) == (1.0, 65.0)
    assert len(judge_digests_of(task)) == 1


def test_the_part_with_the_data_poses_limits_and_ends() -> None:
    own = build_task(BlendSpec(name="blend", parts={"sums": SUMS}).read_parts()["sums"].task)
    task = blend(parts={"sums": SUMS, "again": {**SUMS, "num_held_out": 2}})
    assert list(task.examples(Split.TRAIN)) == list(own.examples(Split.TRAIN))
    assert (task.limits.max_reply_tokens, task.limits.stop_strings) == (32, own.limits.stop_strings)
    assert run_self_test(task, task.examples(Split.TRAIN)[:4]) == []


def test_the_version_follows_weights_data_and_judges() -> None:
    plain = blend().version
    assert blend().version == plain
    others = [
        blend(parts={"sums": SUMS, "judge": {**JUDGE, "weight": 0.5}}),
        blend(parts={"sums": SUMS, "judge": {**JUDGE, "judge_revision": "2"}}),
        blend(parts={"sums": {**SUMS, "max_value": 5}, "judge": JUDGE}),
    ]
    assert len({plain, *(task.version for task in others)}) == 4
    assert blend(parts={"sums": SUMS, "judge": {**JUDGE, "judge_concurrency": 2}}).version == plain


def test_rew_6_an_example_that_a_part_cannot_judge_is_refused() -> None:
    # A sum names no instructions to follow.
    task = blend(parts={"sums": SUMS, "words": {"name": "rlvr-ifeval", "source": "unused.jsonl"}})
    with pytest.raises(DataError, match=r"part words of the blend cannot judge example [0-9a-f]{16} of task"):
        task.examples(Split.TRAIN)


def test_a_verifier_that_pays_no_gold_reply_fails_the_self_test() -> None:
    # Letters are not what answers a sum: the blend could never pay full marks.
    task = blend(parts={"sums": SUMS, "words": {"name": "mmlu", "source": "unused.jsonl"}})
    findings = run_self_test(task, task.examples(Split.TRAIN)[:2])
    assert {finding.probe for finding in findings} == {"gold"}
    assert {finding.reward for finding in findings} == {1.0}


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"parts": {}}, "nothing"),
        ({"parts": {"a": {"name": "nothing-known"}}}, r"task\.parts\.a"),
        ({"parts": {"a": {**SUMS, "wieght": 1.0}}}, r"task\.parts\.a\.wieght"),
        ({"parts": {"a": {**SUMS, "weight": -1.0}}}, r"task\.parts\.a\.weight"),
        ({"parts": {"a": {**SUMS, "weight": 0.0}}}, "nothing"),
        ({"parts": {"a": {"name": "blend"}}}, r"task\.parts\.a"),
        ({"parts": {"a": {**SUMS, "order_file": "o.jsonl"}}}, "order"),
        ({"parts": {"a": SUMS}, "max_reply_tokens": 8}, "limit"),
    ],
)
def test_blends_that_cannot_be_meant_are_refused(settings: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        BlendSpec(name="blend", **settings)


def test_a_judge_in_a_blend_is_not_the_policy(tmp_path: Path) -> None:
    lines = ['name = "x"', "[model]", 'uri = "org/small"', "[task]", 'name = "blend"']
    for label, part in (("sums", SUMS), ("judge", {**JUDGE, "judge_model": "org/small"})):
        lines += [f"[task.parts.{label}]", *(f"{key} = {json.dumps(part[key])}" for key in part)]
    (tmp_path / "run.toml").write_text("\n".join(lines))
    with pytest.raises(ConfigError, match="itself"):
        load_spec(tmp_path / "run.toml")


def test_a_warm_blend_wants_what_its_judge_wants(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_SUCH_KEY", raising=False)
    with pytest.raises(ConfigError, match="NO_SUCH_KEY"):
        build_warm_task(
            BlendSpec(name="blend", parts={"a": SUMS, "b": {**JUDGE, "judge_key_env": "NO_SUCH_KEY"}})
        )
