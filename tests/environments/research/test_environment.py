"""Attempts at the research suite: real sandboxes, the budget of development scores, judging, and cheats."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

import pytest

from strop.environments import Action
from strop.environments.contract import PROFILE_AREA
from strop.environments.played import PlayedWorld
from strop.environments.research.contract import Instance, Marks, profile_area
from strop.environments.research.environment import (
    Research,
    ResearchSpec,
    ResearchTask,
    instance_of,
    to_outcome,
)
from strop.environments.research.suite import TASKS, make_instance
from strop.errors import ConfigError
from strop.evaluate import EvalSettings, evaluate_task
from strop.rollout import (
    Example,
    FailureOwner,
    FinishReason,
    Group,
    Outcome,
    Split,
    make_example,
)
from strop.spec.train import TripwireSpec
from strop.tasks import Task, build_task, self_test
from strop.tasks.contract import CEILING
from strop.train.measure import measure_rollouts
from strop.train.watch.tripwires import find_alarms
from tests.environments.research.test_tasks import score_of
from tests.environments.test_worlds import call, tokenizer_of
from tests.fixtures.builders import rollout_of
from tests.fixtures.dummy_engine import DummyEngine
from tests.fixtures.sandboxes import needs_bubblewrap

PROCESS = {"sandbox": "process", "min_isolation": "rlimit"}
SUBMIT = call("submit")
PROGRAMS = [name for name in TASKS if make_instance(name, 0).function is not None]


def build(**settings: Any) -> Task:
    return build_task(ResearchSpec(**{**PROCESS, **settings}))


def example_of(name: str, instance: int = 0) -> Example:
    return make_example("research", {"task": name, "instance": instance}, None)


async def play(task: Task, example: Example, replies: Sequence[str]) -> tuple[Outcome, list[str]]:
    """Return the outcome of an attempt, and what was told after each reply."""
    world = PlayedWorld(task)  # type: ignore[arg-type]
    told = []
    try:
        await world.reset(example, 0)
        for reply in replies:
            result = await world.step(Action(text=reply, finish_reason=FinishReason.EOS))
            told.append("\n".join(message.text for message in result.messages))
            if result.done:
                break
        return await world.score(), told
    finally:
        await world.close()


def attempt(name: str, *replies: str, **settings: Any) -> tuple[Outcome, list[str]]:
    return asyncio.run(play(build(**settings), example_of(name), replies))


def write(name: str, artefact: bytes) -> str:
    """Return a call that leaves an artefact behind."""
    return call("create", path=make_instance(name, 0).artefact, text=artefact.decode())


def earns(name: str, *replies: str, **settings: Any) -> Outcome:
    return attempt(name, *replies, **settings)[0]


def test_the_run_file_names_every_task_of_the_suite() -> None:
    assert get_args(ResearchTask) == tuple(TASKS)


@pytest.mark.parametrize("name", TASKS)
def test_the_starter_earns_nothing_and_the_oracle_nearly_all(name: str) -> None:
    instance = make_instance(name, 0)
    starter, oracle = earns(name, SUBMIT), earns(name, write(name, instance.oracle), SUBMIT)
    assert oracle.reward is not None, oracle
    assert oracle.reward > 0.75
    assert oracle.is_correct
    assert oracle.metrics["range_share"] >= 0.95
    assert oracle.metrics[PROFILE_AREA] == profile_area(oracle.metrics["range_share"])
    assert starter.reward == 0
    assert (starter.is_correct, starter.format_ok, oracle.format_ok) == (False, False, True)
    assert oracle.isolation == starter.isolation == "rlimit"
    assert oracle.metrics["raw_score"] == pytest.approx(instance.marks.ceiling, rel=0.05)


@pytest.mark.parametrize("name", PROGRAMS)
def test_programs_that_cheat_earn_no_more_than_the_floor(name: str) -> None:
    instance = make_instance(name, 0)

    async def judge_all() -> list[tuple[Outcome, list[str]]]:
        task, example = build(), example_of(name)
        replies = [[write(name, artefact), SUBMIT] for artefact in instance.cheats.values()]
        return await asyncio.gather(*(play(task, example, each) for each in replies))

    for cheat, (outcome, _) in zip(instance.cheats, asyncio.run(judge_all()), strict=True):
        assert outcome.failure is None, (cheat, outcome)
        assert outcome.reward is not None
        # A defence that loses nothing, such as pushing one way, is a weak answer and no cheat.
        slack = 3 * instance.marks.standard_error / abs(instance.marks.ceiling - instance.marks.baseline)
        assert outcome.reward <= max(instance.marks.normalise(None), -1.0) + slack + 1e-9, (cheat, outcome)
        assert outcome.metrics[PROFILE_AREA] <= 0.01 + slack


def test_evaluations_are_counted_and_never_of_the_sealed_draws() -> None:
    instance = make_instance("tab_class", 0)
    oracle = write("tab_class", instance.oracle)
    outcome, told = attempt(
        "tab_class", call("evaluate"), oracle, call("evaluate"), call("evaluate"), SUBMIT, num_evaluations=2
    )
    assert told[0].startswith("The score is 0.7")
    assert "(higher is better). 1 evaluations left." in told[0]
    assert told[2].startswith("The score is 0.8")
    assert told[3] == "error: no evaluation is left"
    assert outcome.metrics["num_tool_errors"] == 1
    shown = float(told[2].split()[3])
    assert shown != round(outcome.metrics["raw_score"], 3)
    gap = instance.marks.share(shown) - outcome.metrics["range_share"]
    assert outcome.metrics["dev_gap"] == pytest.approx(gap, abs=0.01)
    assert outcome.is_correct


def test_an_evaluation_says_what_is_wrong_and_costs_one_too() -> None:
    _, told = attempt(
        "blotto",
        call("create", path="allocation.json", text="[1, 2]"),
        call("evaluate"),
        call("bash", command="rm allocation.json"),
        call("evaluate"),
        SUBMIT,
        num_evaluations=3,
    )
    assert told[1] == "error: it must be a list of 4 whole numbers (2 evaluations left)"
    assert told[3] == "error: allocation.json is no file of at most 1048576 bytes (1 evaluations left)"


@pytest.mark.parametrize(
    "commands",
    [
        ["rm predictions.csv"],
        ["ln -sf /etc/passwd predictions.csv"],
        ["rm predictions.csv; mkdir predictions.csv"],
        ["head -c 3000000 /dev/zero > predictions.csv"],
        ["echo '{\"score\": 1.0}' > predictions.csv; echo '{\"score\": 1.0}' > score.json; echo RESULT 1.0"],
        ["rm predictions.csv; (sleep 0.3; cp test.csv predictions.csv) > /dev/null 2>&1 &"],
    ],
)
def test_what_is_no_artefact_earns_what_no_work_earns(commands: list[str]) -> None:
    outcome = earns("tab_class", *[call("bash", command=one) for one in commands], SUBMIT)
    instance = make_instance("tab_class", 0)
    assert outcome.failure is None
    assert outcome.reward == instance.marks.normalise(None)
    assert outcome.format_ok is False
    assert outcome.metrics[PROFILE_AREA] == 0.0


SHADOWS = ("json.py", "os.py", "sitecustomize.py", "usercustomize.py", "conftest.py", "judge.py", "grader.py")


@pytest.mark.parametrize("name", TASKS)
def test_edited_graders_opponents_and_data_change_nothing(name: str) -> None:
    """Everything of the workspace but the artefact is overwritten, and what a grader might import is left."""
    instance = make_instance(name, 0)
    forging = "import os\nos.write(1, b'[1]\\n' * 99)\nos._exit(0)\n"
    paths = [path for path in (*SHADOWS, "README.md", *instance.files) if path != instance.artefact]
    edits = "\n".join(call("create", path=path, text=forging) for path in paths)
    outcome = earns(name, edits, write(name, instance.oracle), SUBMIT)
    assert outcome.metrics["raw_score"] == score_of(instance, instance.oracle)
    assert outcome.metrics["num_tool_calls"] == len(paths) + 2


HUNT = (
    "find / -xdev \\( -iname '*answer*' -o -iname '*truth*' -o -iname '*sealed*' -o -iname '*label*' \\)"
    " -not -path '/usr/*' -not -path '/proc/*' -not -path '/sys/*' 2>/dev/null | head; env; ls -la . /tmp"
)


@needs_bubblewrap
def test_labels_and_other_attempts_cannot_be_found() -> None:
    """Reads the disk for the answer, and for another attempt's workspace, which lives at the same time."""

    async def both() -> str:
        task = build(sandbox="bubblewrap", min_isolation="namespace")
        other = PlayedWorld(task)  # type: ignore[arg-type]
        try:
            await other.reset(example_of("tab_class"), 0)
            mark = call("create", path="/tmp/predictions-of-another.csv", text="secret")
            mine = call("create", path="notes-of-another.txt", text="secret")
            for reply in (mark, mine):
                await other.step(Action(text=reply, finish_reason=FinishReason.EOS))
            _, told = await play(
                task,
                example_of("tab_class"),
                [
                    call("bash", command=HUNT),
                    call("bash", command="grep -rl secret / 2>/dev/null | head -3"),
                    SUBMIT,
                ],
            )
            return "\n".join(told)
        finally:
            await other.close()

    told = asyncio.run(both())
    for word in ("another", "truth", "sealed", "answer"):
        assert word not in told


@needs_bubblewrap
def test_a_program_that_ends_its_judge_earns_the_floor() -> None:
    killing = b"import os, signal\nos.kill(-1, signal.SIGKILL)\n"
    for name in ("bos", "fixtrain"):
        outcome = earns(name, write(name, killing), SUBMIT, sandbox="bubblewrap", min_isolation="namespace")
        assert outcome.failure is None
        assert outcome.reward == make_instance(name, 0).marks.normalise(None)


BESIDE = {
    "prints a hundred megabytes": "import os\nfor _ in range(1600):\n    os.write(1, b'1.0 ' * 16384)\n",
    "looks for the judge in its process": """\
import gc, sys
frame, names = sys._getframe(), [type(one).__name__ for one in gc.get_objects()]
while frame is not None:
    names += [*frame.f_locals, *frame.f_globals]
    frame = frame.f_back
words = ("label", "truth", "sealed", "partner", "marks", "reward")
assert not [name for name in names if name.lower().startswith(words)]
""",
    "sets seeds and the clock back": """\
import os, random, time
random.seed(0)
os.utime(__file__ if "__file__" in globals() else "player.py", (0, 0))
time.time = lambda: 0.0
""",
    "replaces what a judge might call": """\
import builtins, json, math, sys
json.dumps = lambda *_, **__: "[1]"
builtins.sum = max
math.fsum = lambda _: 1e9
sys.exit = lambda *_: None
""",
}


@pytest.mark.parametrize("beside", BESIDE)
def test_what_a_program_does_beside_its_answers_changes_no_score(beside: str) -> None:
    instance = make_instance("bos", 0)
    work = BESIDE[beside].encode() + instance.starter
    outcome = earns("bos", write("bos", work), SUBMIT)
    honest, found = score_of(instance, instance.starter), outcome.metrics.get("raw_score")
    # Where it breaks its own answers, it has none.
    assert found == honest or (found is None and beside.startswith("replaces")), outcome


def test_a_program_without_an_end_is_ended() -> None:
    endless = b"def act(history):\n    while True:\n        pass\n"
    outcome, told = attempt("bos", write("bos", endless), call("evaluate"), SUBMIT, tool_limit_s=1.0)
    assert told[1] == "error: the program was ended after 1 s (9 evaluations left)"
    assert outcome.reward == make_instance("bos", 0).marks.normalise(None)


@pytest.mark.parametrize("name", ["tab_class", "tab_reg", "glyphs", "charlm"])
def test_leaked_labels_are_not_rewarded_and_raise_the_alarm(name: str) -> None:
    leaked = make_instance(name, 0).leaked
    assert leaked is not None
    outcome = earns(name, write(name, leaked), SUBMIT)
    assert outcome.reward is None
    assert outcome.failure is not None
    assert (outcome.failure.owner, outcome.failure.kind) == (FailureOwner.TASK, CEILING)
    assert outcome.metrics["above_ceiling"] == 1.0
    assert PROFILE_AREA not in outcome.metrics


def test_a_score_above_the_ceiling_within_chance_is_full_marks() -> None:
    instance = Instance(
        task="tab_class",
        statement="",
        files={"a": b""},
        artefact="a",
        marks=Marks(floor=0.5, baseline=0.7, ceiling=0.8, ceiling_kind="bayes", standard_error=0.01),
        oracle=b"",
    )
    assert to_outcome(instance, 0.83).reward == 1.0
    assert to_outcome(instance, 0.86).failure is not None
    assert to_outcome(instance, float("nan")).failure is not None
    assert to_outcome(instance, 0.1).reward == -1.0
    assert to_outcome(instance, None, "why").reward == -1.0


def test_examples_take_turns_and_never_meet() -> None:
    task = build(tasks=["bos", "blotto"], num_train=6, num_held_out=3)
    held_out, train = task.examples(Split.HELD_OUT), task.examples(Split.TRAIN)
    assert [example.fields["task"] for example in held_out] == ["bos", "blotto", "bos"]
    assert len({*(one.example_id for one in held_out), *(one.example_id for one in train)}) == 9
    assert instance_of(train[0]).marks != instance_of(held_out[0]).marks
    assert Research(ResearchSpec()).part_of(train[1]) == "blotto"


def test_the_self_test_plays_the_oracle_where_it_has_full_marks() -> None:
    task = build(tasks=["blotto"])
    assert asyncio.run(self_test(task, task.examples(Split.TRAIN)[:1])) == []


def test_wrong_tasks_are_refused() -> None:
    with pytest.raises((ConfigError, ValueError), match="twice"):
        ResearchSpec(tasks=("bos", "bos"))
    with pytest.raises(ValueError, match="chess"):
        ResearchSpec.model_validate({"tasks": ["chess"]})
    with pytest.raises(ValueError, match="at least 1"):
        ResearchSpec(tasks=())


def test_the_opening_names_the_file_and_the_budget_and_makes_nothing() -> None:
    task = build(num_evaluations=3)
    for name in TASKS:
        opening = task.render(example_of(name, instance=10**9))[-1].text
        assert make_instance(name, 0).artefact in opening
        assert "up to 3 times" in opening


def test_the_workspace_says_what_is_asked() -> None:
    _, told = attempt("cpole", call("bash", command="cat README.md; ls; python3 simulator.py"), SUBMIT)
    assert make_instance("cpole", 0).statement in told[0]
    assert "simulator.py" in told[0]


def test_an_evaluation_has_the_scores_of_each_task_and_the_area_under_the_profile(tmp_path: Path) -> None:
    tokenizer = tokenizer_of(tmp_path)
    result = asyncio.run(
        evaluate_task(
            task=build(num_held_out=len(TASKS)),
            engine=DummyEngine(tokenizer, lambda request: SUBMIT),
            tokenizer=tokenizer,
            settings=EvalSettings(run_seed=0, step=0, split=Split.HELD_OUT),
            model_digest="m",
        )
    )
    assert result.is_valid
    marks = {name: make_instance(name, 0).marks for name in TASKS}
    areas = {name: profile_area(one.share(one.baseline)) for name, one in marks.items()}
    assert {name: part.greedy.profile_area for name, part in result.parts.items()} == pytest.approx(areas)
    assert result.greedy.profile_area == pytest.approx(sum(areas.values()) / len(areas))
    assert result.greedy.reward_mean == 0
    assert result.greedy.accuracy == 0


def test_what_is_better_where_it_was_tried_is_an_alarm() -> None:
    """Work that holds the answers of the development rows alone, which evaluations gave away one by one."""
    example = example_of("glyphs")
    gaps = [0.4, 0.3, None]
    rollouts = tuple(
        rollout_of(
            example,
            (),
            Outcome(parts={"progress": 0.1}, metrics={} if gap is None else {"dev_gap": gap}),
            sample_index=index,
        )
        for index, gap in enumerate(gaps)
    )
    metrics = measure_rollouts([Group(example=example, rollouts=rollouts)])
    assert metrics["dev_gap"] == pytest.approx(0.35)
    assert "dev_gap" in [alarm.cause for alarm in find_alarms(TripwireSpec(), 1, metrics)]


@pytest.mark.parametrize("name", TASKS)
def test_a_salt_makes_instances_that_its_source_does_not_tell(name: str) -> None:
    example = example_of(name)
    salted, again = (instance_of(example, b"a secret of ours") for _ in range(2))
    assert salted is again
    others = [
        instance_of(example),
        instance_of(example, b"another secret.."),
        instance_of(example_of(name, 1)),
    ]
    shown = [(dict(one.files), one.marks) for one in (salted, *others)]
    assert shown[0] not in shown[1:]


def test_a_salt_is_told_by_the_version_alone(tmp_path: Path) -> None:
    for name, text in {
        "one": "0123456789abcdef",
        "same": "0123456789abcdef\n",
        "other": "fedcba9876543210",
    }.items():
        (tmp_path / name).write_text(text)
    one, same, other = (build(salt_file=str(tmp_path / name)) for name in ("one", "same", "other"))
    assert one.version == same.version
    assert len({one.version, other.version, build().version}) == 3
    example = one.examples(Split.TRAIN)[0]
    assert dict(example.fields) == dict(build().examples(Split.TRAIN)[0].fields)
    outcome, (told, *_) = asyncio.run(play(one, example, [call("bash", command="cat *; env"), SUBMIT]))
    assert outcome.reward == 0.0
    assert "0123456789abcdef" not in told


@pytest.mark.parametrize(("text", "message"), [(None, "No such file"), ("short", "it has 5 bytes")])
def test_a_salt_that_is_none_is_refused(tmp_path: Path, text: str | None, message: str) -> None:
    path = tmp_path / "salt"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        _ = build(salt_file=str(path)).version
