"""A task of several parts: each has its own limit, and numbers of its own."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from statistics import fmean

import pytest

from strop.record.rollouts import read_rollouts
from strop.rollout import Example, Outcome, Rollout
from strop.tasks import TaskLimits
from tests.fixtures.spell import SpellTask
from tests.fixtures.tiny_run import ACCEPTED, Composition, new_run, tiny_spec

SHORT, LONG = 3, 64


class Halves(SpellTask):
    """Every reply earns the same; those to even examples are cut at 3 tokens, the others at 64."""

    def limits_of(self, example: Example) -> TaskLimits:
        limit = SHORT if self.part_of(example) == "short" else LONG
        return TaskLimits(max_reply_tokens=limit, stop_strings=self.limits.stop_strings)

    def part_of(self, example: Example) -> str:
        return "odd" if example.fields["n"] % 2 else "short"

    def verify(self, example: Example, text: str) -> Outcome:
        return Outcome(parts={"there": 0.5, "form": 0.1 * text.isascii()}, is_correct=text.isascii())


class Short(Halves):
    """All examples are of the part with the low limit."""

    def part_of(self, example: Example) -> str:
        return "short"

    def verify(self, example: Example, text: str) -> Outcome:
        return Outcome(parts={"there": 0.5})


def test_a_reply_that_is_cut_loses_reward_by_the_limit_of_its_own_part(
    tmp_path: Path, tiny_model_dir: Path
) -> None:
    """Incident: a reply cut at its 16 tokens kept its full reward in a mixture whose widest limit was 64.

    The rewards are all equal, so that only the shaping can tell replies apart. By the widest limit no group
    would show a difference, and all would be sampled again for ever.
    """
    spec = tiny_spec(
        algorithm={"overlong": "shape", "zero_variance": "resample"},
        train={"steps": 1, "accept": f"{ACCEPTED}; verifier: all replies earn the same"},
    )
    made = Composition(spec, tiny_model_dir, new_run(tmp_path), task=Short())
    made.run()
    (line,) = made.notes.steps
    assert line["truncated_frac"] > 0.0
    assert line["zero_variance_frac"] == 0.0
    assert line["num_signal_tokens"] == line["num_scored_tokens"] > 0.0
    assert set(made.notes.causes("tripwire")) <= {"truncation"}


def expect(rollouts: list[Rollout], task: Halves) -> dict[str, float]:
    by_label: Mapping[str, list[Rollout]] = defaultdict(list)
    for rollout in rollouts:
        by_label[task.part_of(rollout.example)].append(rollout)
    found: dict[str, float] = {}
    for label, members in by_label.items():
        found |= {
            f"reward_mean_{label}": fmean(one.outcome.reward or 0.0 for one in members),
            f"accuracy_{label}": fmean(bool(one.outcome.is_correct) for one in members),
            f"truncated_frac_{label}": fmean(one.outcome.truncated for one in members),
            f"reply_tokens_mean_{label}": fmean(one.num_sampled_tokens for one in members),
        }
    for name in ("there", "form"):
        found[f"reward_part_{name}"] = fmean(one.outcome.parts[name] or 0.0 for one in rollouts)
    return found


def test_a_run_records_the_reward_and_the_length_of_every_part(tmp_path: Path, tiny_model_dir: Path) -> None:
    spec = tiny_spec(train={"accept": f"{ACCEPTED}; verifier: all replies earn alike"})
    task = Halves()
    made = Composition(spec, tiny_model_dir, new_run(tmp_path), task=task)
    made.run()
    begins = ("reward_mean_", "accuracy_", "truncated_frac_", "reply_tokens_mean_", "reward_part_")
    seen: set[str] = set()
    for line in made.run_dir.metrics.read():
        rollouts = read_rollouts(made.run_dir.rollouts_path(int(line["step"])))
        found = {name: value for name, value in line.items() if name.startswith(begins)}
        assert found == pytest.approx(expect(rollouts, task))
        seen |= found.keys()
    assert {"reward_mean_odd", "reward_mean_short", "reply_tokens_mean_odd", "reward_part_form"} <= seen
    # The sum over the parts of the reward is the reward.
    assert line["reward_part_there"] + line["reward_part_form"] == pytest.approx(line["reward_mean"])


def test_a_task_of_one_part_has_no_numbers_by_part(tmp_path: Path, tiny_model_dir: Path) -> None:
    made = Composition(tiny_spec(train={"steps": 1}), tiny_model_dir, new_run(tmp_path))
    made.run()
    (line,) = made.notes.steps
    assert not [name for name in line if name.startswith(("reward_mean_", "reward_part_", "accuracy_"))]
