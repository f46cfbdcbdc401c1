"""Attempts that share their first turns: equal ids, worlds copied or played again, and what fails."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from strop.engine import GenerationRequest
from strop.environments import Environment, choose_environment, run_group
from strop.environments.groups import NUM_REFILLS
from strop.environments.guess_number import GuessNumber, GuessNumberSpec
from strop.environments.worlds import BuiltInWorld
from strop.errors import ConfigError, SandboxLost
from strop.rollout import Branch, FailureOwner, Group, Rollout, Split
from strop.tasks import Task, build_task
from strop.tokenizer import Tokenizer
from tests.environments.test_workspace import EDIT, Repair, make
from tests.environments.test_worlds import call, tokenizer_of
from tests.fixtures.builders import plan_for
from tests.fixtures.dummy_engine import DummyEngine, ScriptedReply
from tests.fixtures.sandboxes import needs_bubblewrap

Say = Callable[[GenerationRequest], str | ScriptedReply]


def grow(
    task: Task,
    tokenizer: Tokenizer,
    say: Say,
    *,
    number: int = 4,
    branches: int = 2,
    shared_turns: int = 1,
    make_environment: Callable[[], Environment] | None = None,
) -> tuple[Group, DummyEngine]:
    example = task.examples(Split.TRAIN)[0]
    plans = [
        plan_for(
            example,
            max_reply_tokens=2000,
            sample_index=index,
            run_seed=3,
            num_branches=branches,
            num_shared_turns=shared_turns,
        )
        for index in range(number)
    ]
    engine = DummyEngine(tokenizer, say)
    make_environment = make_environment or choose_environment(task)
    return asyncio.run(run_group(make_environment, engine, tokenizer, plans)), engine


def guessing() -> Task:
    # Of so many numbers none is found by chance.
    return build_task(GuessNumberSpec(max_value=10**6))


def guess(request: GenerationRequest) -> str:
    return str(random.Random(request.seed).randint(10, 99))


def ids_of(rollout: Rollout) -> list[int]:
    return [token for turn in rollout.turns for token in turn.token_ids.tolist()]


def test_shared_turns_are_sampled_once_and_are_the_same_ids(tmp_path: Path) -> None:
    group, engine = grow(guessing(), tokenizer_of(tmp_path), guess, shared_turns=2)
    rollouts = group.rollouts
    assert [rollout.sample_index for rollout in rollouts] == [0, 1, 2, 3]
    assert [rollout.branch for rollout in rollouts] == [Branch(of=of, num_turns=5) for of in (0, 0, 2, 2)]
    for first, second in (rollouts[:2], rollouts[2:]):
        for mine, others in zip(first.turns[:5], second.turns[:5], strict=True):
            assert mine is others
        assert first.turns[5].text != second.turns[5].text
        # All five turns of the game were played, and each told what came of it.
        assert [sum(turn.is_sampled for turn in one.turns) for one in (first, second)] == [5, 5]
    # Two trunks of two turns, and four times the three behind them.
    assert len(engine.requests) == 2 * 2 + 4 * 3
    assert len({request.seed for request in engine.requests}) == len(engine.requests)
    sampled = sum(rollout.num_new_tokens for rollout in rollouts)
    assert sampled == sum(len(turn.token_ids) for r in rollouts for turn in r.new_turns if turn.is_sampled)
    assert sampled < sum(rollout.num_sampled_tokens for rollout in rollouts)
    # What was asked is, id by id, what the rollout holds up to there.
    asked = {tuple(request.prompt_ids.tolist()) for request in engine.requests}
    for rollout in rollouts:
        for index, turn in enumerate(rollout.turns):
            if turn.is_sampled:
                assert tuple(ids_of(replace(rollout, turns=rollout.turns[:index]))) in asked


def test_a_group_without_branches_is_what_it_was(tmp_path: Path) -> None:
    tokenizer = tokenizer_of(tmp_path)
    group, _ = grow(guessing(), tokenizer, guess, branches=1)
    branched, _ = grow(guessing(), tokenizer, guess)
    assert all(rollout.branch is None for rollout in group.rollouts)
    # The first of each tree is the attempt that its plan would be alone.
    for index in (0, 2):
        assert ids_of(group.rollouts[index]) == ids_of(branched.rollouts[index])
        assert group.rollouts[index].outcome == branched.rollouts[index].outcome


def test_an_attempt_that_ends_before_has_no_branches_and_the_others_are_their_own(tmp_path: Path) -> None:
    task = guessing()
    example, tokenizer = task.examples(Split.TRAIN)[0], tokenizer_of(tmp_path)
    seen: list[int] = []

    class Found(GuessNumber):
        def step(self, text: str) -> Any:
            seen.append(1)
            return super().step(str(self._secret) if len(seen) == 1 else text)

    found: Task = BuiltInWorld(GuessNumberSpec(max_value=10**6), Found)
    group, _ = grow(found, tokenizer, guess, number=2)
    first, second = group.rollouts
    assert (first.outcome.reward, first.branch, second.branch) == (1.0, None, None)
    assert [sum(turn.is_sampled for turn in one.turns) for one in (first, second)] == [1, 5]
    assert first.example.example_id == example.example_id


class Moody(GuessNumber):
    """Says something else when it is played again."""

    num_made = 0

    def step(self, text: str) -> Any:
        Moody.num_made += 1
        return f"That was guess {Moody.num_made}."


def test_a_world_that_plays_otherwise_again_has_no_score(tmp_path: Path) -> None:
    task: Task = BuiltInWorld(GuessNumberSpec(), Moody)
    group, _ = grow(task, tokenizer_of(tmp_path), guess, number=2)
    for rollout in group.rollouts:
        failure = rollout.outcome.failure
        assert failure is not None
        assert (failure.owner, failure.kind) == (FailureOwner.TASK, "snapshot_mismatch")
        assert NUM_REFILLS not in rollout.outcome.metrics


def test_one_branch_that_the_engine_loses_goes_on_again_from_there(tmp_path: Path) -> None:
    lost: list[int] = []

    def lose_once(request: GenerationRequest) -> str | ScriptedReply:
        # The first reply behind the shared turn of the second tree.
        if len(request.prompt_ids) > 200 and len(lost) < 1:
            lost.append(request.seed)
            return ScriptedReply(text="4", is_aborted=True)
        return guess(request)

    tokenizer = tokenizer_of(tmp_path)
    whole, _ = grow(guessing(), tokenizer, guess)
    group, engine = grow(guessing(), tokenizer, lose_once)
    assert lost
    assert sum(NUM_REFILLS in rollout.outcome.metrics for rollout in group.rollouts) == 1
    # The shared turns were not played anew, and all is as it would have been.
    assert sum(request.seed == lost[0] for request in engine.requests) == 2
    assert [ids_of(one) for one in group.rollouts] == [ids_of(one) for one in whole.rollouts]
    assert all(rollout.branch is not None for rollout in group.rollouts)


@pytest.mark.parametrize("shared_turns", [5, 9])
def test_attempts_that_would_share_all_turns_are_refused(tmp_path: Path, shared_turns: int) -> None:
    with pytest.raises(ConfigError, match="5 turns at most"):
        grow(guessing(), tokenizer_of(tmp_path), guess, shared_turns=shared_turns)


def test_a_program_cannot_be_copied(tmp_path: Path) -> None:
    task = build_task(GuessNumberSpec())

    class Conducted:
        max_turns = 5

        async def act(self, recorder: object) -> None:
            raise AssertionError

        async def close(self) -> None:
            """Hold nothing."""

    with pytest.raises(ConfigError, match="a program conducts"):
        grow(task, tokenizer_of(tmp_path), guess, make_environment=Conducted)  # type: ignore[arg-type]


class Counted(Repair):
    """Counts what it was asked, in an attribute that its copies must not share."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    async def note(self, word: str) -> str:
        """Note a word, and tell all that were noted."""
        self.seen.append(word)
        return " ".join(self.seen)


BUBBLEWRAP: dict[str, Any] = {"sandbox": "bubblewrap", "min_isolation": "namespace"}
SHARED = [
    call("bash", command="mkdir -p sub; cd sub; x=5; greet() { echo hi $1; }; set -u; echo shared > file"),
    call("note", word="shared"),
]


class Script:
    """Says the shared lines first, and then those of the branch that asks, in turn."""

    def __init__(self, tokenizer: Tokenizer, shared: list[str], *branches: list[str]) -> None:
        self._tokenizer = tokenizer
        self._shared = shared
        self._waiting = [list(one) for one in branches]
        self._lines: dict[str, list[str]] = {}

    def __call__(self, request: GenerationRequest) -> str:
        text = self._tokenizer.decode(request.prompt_ids, with_special=True)
        num_said = text.count("<|start|>assistant") - 1
        if num_said < len(self._shared):
            return self._shared[num_said]
        known = [key for key in self._lines if text.startswith(key)]
        if not known:
            lines = self._waiting.pop(0)
            said = text + lines[0]
            self._lines[said] = lines[1:]
            return lines[0]
        return self._lines[max(known, key=len)].pop(0)


def told(rollout: Rollout) -> list[str]:
    return [turn.text for turn in rollout.turns if not turn.is_sampled][1:]


@needs_bubblewrap
def test_a_workspace_is_copied_with_files_shell_and_attributes(tmp_path: Path) -> None:
    tokenizer = tokenizer_of(tmp_path)
    look = 'pwd; cat file; echo "$x"; greet you; cat ../total.py | tail -1; ls -a ~ | grep -c strop; echo $-'
    script = Script(
        tokenizer,
        SHARED,
        [
            call("bash", command=f"echo one > file; x=6; {look}"),
            call("note", word="one"),
            EDIT,
            call("submit"),
        ],
        [call("bash", command=look), call("note", word="two"), call("submit")],
    )
    group, engine = grow(make(Counted, **BUBBLEWRAP), tokenizer, script, number=2, shared_turns=2)
    # Whichever asked first said the first of them.
    one, two = sorted(group.rollouts, key=lambda rollout: -(rollout.outcome.reward or 0.0))
    assert (one.outcome.reward, two.outcome.reward) == (1.0, 0.0), (one.outcome, two.outcome)
    assert [rollout.branch for rollout in group.rollouts] == [Branch(of=0, num_turns=5)] * 2
    for rollout, first, noted in ((one, ["one", "6"], "shared one"), (two, ["shared", "5"], "shared two")):
        shown = told(rollout)[2]
        assert "/tmp/sub\n" + "\n".join(first) + "\nhi you\n    return max(numbers)\n0\n" in shown
        # `set -u` holds.
        assert "u" in shown.rsplit("\n0\n")[1].split()[0]
        assert noted in told(rollout)[3]
    assert len(engine.requests) == 2 + 4 + 3


@needs_bubblewrap
def test_a_workspace_is_not_copied_while_programs_run(tmp_path: Path) -> None:
    """They would be missing in the copies. It is at the next turn, when none does."""
    tokenizer = tokenizer_of(tmp_path)
    shared = [
        call("bash", command="sleep 600 & echo $! > pid"),
        call("bash", command="kill $(cat pid); wait 2>/dev/null; true"),
    ]
    script = Script(tokenizer, [*shared, call("submit")])
    group, _ = grow(make(Repair, **BUBBLEWRAP), tokenizer, script, number=2)
    assert [rollout.branch for rollout in group.rollouts] == [Branch(of=0, num_turns=5)] * 2
    assert [rollout.outcome.reward for rollout in group.rollouts] == [0.0, 0.0]


@needs_bubblewrap
def test_a_lost_sandbox_costs_its_own_branch_alone(tmp_path: Path) -> None:
    num_graded: list[int] = []

    class Flaky(Repair):
        async def grade(self, sandbox: Any) -> bool:
            num_graded.append(1)
            if len(num_graded) == 1:
                raise SandboxLost("gone", kind="gone")
            return await super().grade(sandbox)

    tokenizer = tokenizer_of(tmp_path)
    # All branches say the same.
    script = Script(tokenizer, [call("bash", command="true"), EDIT, call("submit")])
    group, _ = grow(make(Flaky, **BUBBLEWRAP), tokenizer, script, number=2)
    assert [rollout.outcome.reward for rollout in group.rollouts] == [1.0, 1.0]
    assert sorted(rollout.outcome.metrics.get(NUM_REFILLS, 0.0) for rollout in group.rollouts) == [0.0, 1.0]


def test_a_sandbox_that_begins_elsewhere_each_time_is_refused(tmp_path: Path) -> None:
    """What the model was told of its directory would be wrong in the copies."""
    tokenizer = tokenizer_of(tmp_path)
    script = Script(tokenizer, [call("bash", command="true"), call("submit")])
    with pytest.raises(ConfigError, match="nothing to begin others with"):
        grow(make(), tokenizer, script, number=2)
