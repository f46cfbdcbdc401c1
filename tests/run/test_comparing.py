"""Two runs or more beside the first: on the same examples, corrected for their number, over their seeds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from strop.errors import CheckRefused, ConfigError, CorruptRecord, StoreError
from strop.evaluate import EvalResult, result_name, write_result
from strop.record import RunDir
from strop.run.runs import compare_many
from tests.fixtures.records import RecordSize, make_eval_result

SIZE = RecordSize(num_steps=10, num_rollouts=4)


def make_run(
    root: Path, name: str, *, rate: float = 1e-5, seed: int = 0, gain: float = 0.0, **changes: Any
) -> Path:
    """Write a run with one evaluation, of a learning rate and a seed."""
    spec = (
        f'name = "{name}"\nseed = {seed}\n[model]\nuri = "m"\n[task]\nname = "arithmetic"\n'
        f"[optimizer]\nlr = {rate}\n"
    )
    with RunDir.create(root, name, spec, "digest", {}, now=1_780_000_000.0) as run:
        result = make_eval_result(10, SIZE, seed=seed, gain=gain).model_copy(update=changes)
        write_result(result, run.path / "eval" / result_name(result))
    return run.path


def test_each_run_is_compared_with_the_first(tmp_path: Path) -> None:
    base, better, same = (
        make_run(tmp_path, name, rate=rate, gain=gain)
        for name, rate, gain in (("base", 1e-5, 0.0), ("better", 1e-4, 0.15), ("same", 1e-6, 0.0))
    )
    found = compare_many([base, better, same])
    assert found.baseline.name == base.name
    assert [other.arm.name for other in found.others] == [better.name, same.name]
    gained, equal = (other.change.greedy for other in found.others)
    assert gained is not None
    assert equal is not None
    assert gained.low > 0.05
    assert equal.estimate == 0.0
    # Two comparisons: the smaller p counts twice.
    assert found.others[0].p_values == {"greedy": pytest.approx(2 * gained.p_value)}
    assert found.others[1].p_values == {"greedy": 1.0}
    (setting,) = found.settings
    assert (setting.key, setting.values) == ("optimizer.lr", (1e-5, 1e-4, 1e-6))
    assert found.notes == ()


def test_one_comparison_is_not_corrected(tmp_path: Path) -> None:
    found = compare_many([make_run(tmp_path, "a"), make_run(tmp_path, "b", rate=1e-4, gain=0.1)])
    (other,) = found.others
    assert other.change.greedy is not None
    assert other.p_values == {"greedy": other.change.greedy.p_value}


def test_seeds_of_one_configuration_are_one_arm(tmp_path: Path) -> None:
    before = [make_run(tmp_path, f"a{seed}", seed=seed) for seed in (0, 1)]
    after = [make_run(tmp_path, f"b{seed}", rate=1e-4, seed=seed, gain=0.15) for seed in (0, 1, 2)]
    found = compare_many([before[0], *after, before[1]])
    (other,) = found.others
    assert (found.baseline.paths, found.baseline.seeds) == (tuple(before), [0, 1])
    assert (other.arm.paths, other.arm.seeds) == (tuple(after), [0, 1, 2])
    assert other.change.num_seeds == 2
    assert other.arm.label == f"{after[0].name} (3 seeds)"
    means = [
        sum(result.greedy.accuracy or 0.0 for result in arm.results) / len(arm.results)
        for arm in (found.baseline, other.arm)
    ]
    assert other.change.greedy is not None
    assert other.change.greedy.estimate == pytest.approx(means[1] - means[0])
    assert other.over_seeds["greedy"].estimate == pytest.approx(means[1] - means[0])
    assert [setting.key for setting in found.settings] == ["optimizer.lr"]
    assert f"seeds: {before[0].name} 0 1, {after[0].name} 0 1 2" in found.notes[0]


def test_runs_that_all_differ_in_their_seed_are_compared_one_by_one(tmp_path: Path) -> None:
    paths = [make_run(tmp_path, f"a{seed}", seed=seed) for seed in (0, 1, 2)]
    found = compare_many(paths, declared=["seed"])
    assert [other.arm.seeds for other in found.others] == [[1], [2]]
    assert [setting.key for setting in found.settings] == ["seed"]


def test_what_was_not_declared_is_refused_with_the_values_of_all(tmp_path: Path) -> None:
    paths = [make_run(tmp_path, f"a{place}", rate=rate) for place, rate in enumerate((1e-5, 1e-4, 1e-6))]
    with pytest.raises(CheckRefused, match=r"they differ in more than seed: optimizer\.lr 1e-05 and 0\.0001"):
        compare_many(paths, declared=["seed"])


def test_a_run_that_is_named_twice_counts_once(tmp_path: Path) -> None:
    one, other = make_run(tmp_path, "a"), make_run(tmp_path, "b", rate=1e-4)
    found = compare_many([one, other, other.parent / "." / other.name])
    assert len(found.others) == 1
    assert found.notes == ("a run that is named twice is compared once",)
    alone = compare_many([one, one])
    assert alone.notes == ("a run is compared with itself",)
    assert alone.others[0].change.greedy is not None
    assert alone.others[0].change.greedy.estimate == 0.0


@pytest.mark.parametrize("number", [0, 1])
def test_fewer_than_two_are_refused(tmp_path: Path, number: int) -> None:
    with pytest.raises(ConfigError, match=f"a comparison of {number} runs"):
        compare_many([make_run(tmp_path, "a")][:number])


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"task": "guess-number"}, "different protocols: task 'arithmetic' and 'guess-number'"),
        ({"max_reply_tokens": 9}, "different protocols: max_reply_tokens 200 and 9"),
    ],
)
def test_another_task_or_protocol_is_refused_by_name(
    tmp_path: Path, changes: dict[str, Any], told: str
) -> None:
    one, same = make_run(tmp_path, "a"), make_run(tmp_path, "b", rate=1e-4)
    other = make_run(tmp_path, "c", rate=1e-6, **changes)
    with pytest.raises(CheckRefused) as refused:
        compare_many([one, same, other])
    assert f"{other.name} cannot be compared with {one.name}: " in str(refused.value)
    assert told in str(refused.value)


def test_a_run_without_evaluation_and_a_damaged_one_are_named(tmp_path: Path) -> None:
    one, other = make_run(tmp_path, "a"), make_run(tmp_path, "b", rate=1e-4)
    (path,) = (other / "eval").iterdir()
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(CorruptRecord, match=path.name):
        compare_many([one, other])
    path.unlink()
    with pytest.raises(StoreError, match=f"{other} has no evaluation"):
        compare_many([one, other])
    (other / "run.json").unlink()
    with pytest.raises(StoreError, match="is not a run directory"):
        compare_many([one, other])


def test_a_run_beside_a_stored_result_is_compared_by_what_was_evaluated(tmp_path: Path) -> None:
    run = make_run(tmp_path, "a")
    result: EvalResult = make_eval_result(4, SIZE, seed=3)
    write_result(result, tmp_path / "base.json")
    found = compare_many([tmp_path / "base.json", run])
    assert {setting.key for setting in found.settings} == {"step", "model_digest", "run_seed"}
    assert found.notes == (f"the last evaluations are of different steps: base.json 4, {run.name} 10",)


def test_runs_of_one_name_are_told_apart_by_their_places(tmp_path: Path) -> None:
    one, other = make_run(tmp_path / "x", "a"), make_run(tmp_path / "y", "a", rate=1e-4)
    found = compare_many([one, other])
    assert [found.baseline.name, found.others[0].arm.name] == [str(one), str(other)]
