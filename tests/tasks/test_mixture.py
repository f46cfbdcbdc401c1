"""Mixtures: each example posed, limited and judged by its part, in an order that follows from the seed."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from strop.errors import ConfigError, DataError
from strop.rollout import Split
from strop.spec import load_spec, write_spec
from strop.spec.parts import MixtureSpec
from strop.tasks import Task, build_task
from strop.tasks.mixture import Mixture
from strop.train.batch import ExampleSchedule
from tests.fixtures.judging import verdict

# 4 * 4 - 4 = 12 small sums and 4 * 4 - 8 = 8 large ones to train on.
SMALL: dict[str, Any] = {"name": "arithmetic", "min_value": 1, "max_value": 4, "num_held_out": 4}
LARGE: dict[str, Any] = {"name": "arithmetic", "min_value": 100, "max_value": 103, "num_held_out": 8}
TENS: dict[str, Any] = {**SMALL, "min_value": 10, "max_value": 13, "max_reply_tokens": 9}


def mixed(mode: str = "weighted", **parts: dict[str, Any]) -> Mixture:
    task = build_task(MixtureSpec(name="mixture", mode=mode, parts=parts))  # type: ignore[arg-type]
    assert isinstance(task, Mixture)
    return task


def epoch(task: Mixture, seed: int = 0, number: int = 0) -> list[str]:
    """Return the parts of an epoch's examples, 's' or 'l' by the size of the sum."""
    examples = task.examples(Split.TRAIN)
    return ["s" if examples[index].fields["a"] < 100 else "l" for index in task.epoch_order(seed, number)]


def test_each_example_is_the_business_of_its_part() -> None:
    task = mixed(sums=SMALL, tens=TENS)
    parts: list[Task] = [
        build_task(part.task)
        for part in MixtureSpec(name="mixture", parts={"sums": SMALL, "tens": TENS}).read_parts().values()
    ]
    for split in Split:
        own = [(part, example) for part in parts for example in part.examples(split)]
        assert list(task.examples(split)) == [example for _, example in own]
        for part, example in own:
            assert task.render(example) == part.render(example)
            assert task.gold_replies(example) == part.gold_replies(example)
            assert task.limits_of(example) == part.limits
            for text in (*part.gold_replies(example), "asdf"):
                assert verdict(task, example, text) == verdict(part, example, text)


def test_its_own_limits_are_the_widest_of_its_parts() -> None:
    task = mixed(sums=SMALL, gym={"name": "reasoning-gym", "dataset": "chain_sum", "num_train": 4})
    assert (task.limits.max_reply_tokens, task.limits.verify_limit_s) == (2048, 5.0)
    example = task.examples(Split.TRAIN)[0]
    assert task.limits_of(example).max_reply_tokens == 32


def test_an_epoch_holds_every_example_as_often_as_asked() -> None:
    task = mixed(small={**SMALL, "count": 5}, large={**LARGE, "repeat": 3})
    counts = Counter(task.epoch_order(0, 0))
    # 5 of the 12 small sums once, all 8 large ones three times.
    assert counts == {**dict.fromkeys(range(5), 1), **dict.fromkeys(range(5, 13), 3)}


def test_parts_follow_each_other_in_sequence() -> None:
    assert epoch(mixed("sequential", large=LARGE, small=SMALL)) == ["l"] * 8 + ["s"] * 12


def test_draws_follow_the_weights() -> None:
    # The first draw of 400 epochs: weight 9 to 1.
    task = mixed(large={**LARGE, "weight": 9.0}, small=SMALL)
    first = [epoch(task, number=number)[0] for number in range(400)]
    # Three standard errors of a share over 400 draws are 0.045.
    assert first.count("l") / 400 == pytest.approx(0.9, abs=0.045)


def test_the_order_follows_from_seed_and_epoch_alone() -> None:
    task, again = mixed(small=SMALL, large=LARGE), mixed(small=SMALL, large=LARGE)
    assert list(task.epoch_order(3, 7)) == list(again.epoch_order(3, 7))
    orders = {tuple(task.epoch_order(seed, number)) for seed in range(3) for number in range(3)}
    assert len(orders) == 9


def test_a_schedule_never_serves_a_repeated_example_twice_in_a_step() -> None:
    task = mixed(small={**SMALL, "count": 3}, large={**LARGE, "repeat": 4, "count": 2})
    schedule = ExampleSchedule(
        task.examples(Split.TRAIN), seed=0, prompts_per_step=4, epoch_order=task.epoch_order
    )
    served: Counter[str] = Counter()
    # An epoch has 3 + 2 * 4 = 11 places; 4 * 11 steps of 4 are 16 epochs, but for what still waits.
    for step in range(44):
        ids = [example.example_id for example in schedule.examples(step)]
        assert len(set(ids)) == 4
        served.update(ids)
    assert sum(served.values()) == 176
    by_part = [served[example.example_id] for example in task.examples(Split.TRAIN)]
    # Repeated four times, but at most once a step: a third of what comes is small.
    assert min(by_part[3:]) > max(by_part[:3]) >= 16


def test_a_part_may_have_an_order_of_its_own(tmp_path: Path) -> None:
    small = build_task(MixtureSpec(name="mixture", parts={"a": SMALL}).read_parts()["a"].task)
    chosen = [small.examples(Split.TRAIN)[index].example_id for index in (4, 1)]
    order = tmp_path / "order.jsonl"
    order.write_text("".join(f'{{"example_id": "{example_id}"}}\n' for example_id in chosen))
    task = mixed("sequential", small={**SMALL, "order_file": str(order)}, large=LARGE)
    examples = task.examples(Split.TRAIN)
    assert [examples[index].example_id for index in task.epoch_order(0, 0)][:2] == chosen
    assert len(examples) == 2 + 8


def test_examples_of_two_parts_and_a_count_beyond_the_part_are_refused() -> None:
    task = mixed(one=SMALL, two={**SMALL, "max_value": 5})
    with pytest.raises(DataError, match=r"task\.parts\.one\.repeat"):
        task.render(task.examples(Split.TRAIN)[0])
    with pytest.raises(DataError, match=r"task\.parts\.small\.count=13\. Allowed: 1 to 12"):
        mixed(small={**SMALL, "count": 13}).examples(Split.TRAIN)


def test_the_version_follows_parts_and_mode() -> None:
    versions = {
        mixed(small=SMALL).version,
        mixed("sequential", small=SMALL).version,
        mixed(small={**SMALL, "weight": 2.0}).version,
        mixed(small={**SMALL, "max_value": 6}).version,
        mixed(other=SMALL).version,
    }
    assert len(versions) == 5
    assert mixed(small=SMALL).version in versions


RUN = """
name = "mixed"
[task]
name = "mixture"
mode = "sequential"
[task.parts.sums]
name = "arithmetic"
max_value = 30
weight = 2
[task.parts.problems]
name = "gsm8k"
repeat = 2
"""


def test_a_run_file_names_the_parts_and_comes_back_from_its_record(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(RUN)
    resolved = load_spec(str(tmp_path / "run.toml"), ["task.parts.sums.max_value=40"])
    assert isinstance(resolved.spec.task, MixtureSpec)
    sums, problems = resolved.spec.task.read_parts().values()
    assert (sums.task.name, sums.weight, sums.repeat) == ("arithmetic", 2.0, 1)
    assert resolved.spec.task.parts["sums"]["max_value"] == 40
    assert (problems.task.name, problems.weight, problems.repeat) == ("gsm8k", 1.0, 2)
    (tmp_path / "copy.toml").write_text(write_spec(resolved))
    assert load_spec(str(tmp_path / "copy.toml"), []).spec == resolved.spec


def test_paths_of_parts_are_taken_from_the_file_that_names_them(tmp_path: Path) -> None:
    run = 'name = "x"\n[task]\nname = "mixture"\n[task.parts.words]\nname = "gsm8k"\nsource = "data.jsonl"\n'
    (tmp_path / "run.toml").write_text(run)
    task = load_spec(str(tmp_path / "run.toml"), []).spec.task
    assert isinstance(task, MixtureSpec)
    assert task.parts["words"]["source"] == str(tmp_path / "data.jsonl")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "a mixture of nothing"),
        (["task.parts.a.name=arithmetic", "task.max_reply_tokens=8"], "each part has its own"),
        (["task.parts.a.name=arithmetik"], r"task\.parts\.a"),
        (["task.parts.a.name=arithmetic", "task.parts.a.max_valu=3"], r"task\.parts\.a\.max_valu=3"),
        (["task.parts.a.name=arithmetic", "task.parts.a.weight=0"], r"task\.parts\.a\.weight=0"),
        (["task.parts.a.max_value=3"], r"task\.parts\.a"),
        (["task.parts.a=3"], r"task\.parts\.a=3.* is no table"),
        (["task.parts.a.name=mixture"], r"task\.parts\.a"),
    ],
)
def test_a_mixture_that_cannot_be_is_refused(words: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_spec(None, ["name=x", "task.name=mixture", *words])
