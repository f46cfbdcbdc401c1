"""CFG-3: each way of learning that a run file offers takes a step; none is only a word in a table."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from strop.record import RunDir
from strop.run.training import train_here
from strop.spec import all_keys, load_spec
from strop.spec.schema import find_settings
from tests.fixtures.tiny_run import Notes

RUN_FILE = """
name = "{name}"
[model]
uri = "{model}"
[task]
name = "reverse-text"
partial_marks = "any-order"
max_reply_tokens = 8
num_train = 20
num_held_out = 4
[train]
steps = 1
prompts_per_step = 2
group_size = 4
accept = "weights: a random model; audit: a random model"
[eval]
num_examples = 1
[placement]
threads = 1
"""
# What decides how a run learns. Models, engines, places, stores and tasks have tests of their own.
SECTIONS = ("algorithm", "dpo", "optimizer", "reference", "sft", "teacher", "train", "tripwires")
DPO = ("train.terms=dpo", "dpo.source={run}", "dpo.pairs_per_step=4")
SFT = ("sft.source={rows}", "sft.rows_per_step=1")
DISTILL = ("train.terms=distill", "teacher.source=initial")
NEEDS: dict[str, tuple[str, ...]] = {
    "algorithm": ("train.mini_batches=2",),
    "algorithm.mode=single": (),
    "algorithm.credit=turn": ("task.name=guess-number", "task.max_reply_tokens=4"),
    "dpo": DPO,
    "reference": ("reference.kl_beta=0.1",),
    "sft": ("train.terms=rl+sft", *SFT),
    "teacher": DISTILL,
    "teacher.source=model": (*DISTILL[:1], "teacher.model={model}"),
    "teacher.source=current": (*DISTILL[:1], "teacher.context=Look again."),
    "train.terms=sft": SFT,
    "train.terms=rl+sft": SFT,
    "train.terms=dpo": DPO,
    "train.terms=distill": DISTILL,
    # Random replies end at their limit.
    "tripwires.on_alarm=stop": ("tripwires.max_truncated_frac=none",),
}
"""What a choice is given beside it, or else all choices of a section."""
ROW = {"messages": [{"role": "user", "content": "Backwards: ab"}, {"role": "assistant", "content": "ba"}]}


def choices() -> Iterator[str]:
    """All but the defaults: each other choice of their section is run with them."""
    for key in sorted(all_keys()):
        if key.partition(".")[0] in SECTIONS:
            for setting in find_settings(tuple(key.split("."))):
                yield from (f"{key}={one}" for one in setting.choices if one != setting.info.default)


def train(folder: Path, model_dir: Path, name: str, words: list[str]) -> RunDir:
    run_file = folder / f"{name}.toml"
    run_file.write_text(RUN_FILE.format(name=name, model=model_dir))
    resolved = load_spec(run_file, [*words, f"output.root={folder / 'runs'}"])
    return RunDir.open(train_here(resolved, Notes(), on_run=lambda run: None).run_path)


@pytest.fixture(scope="module")
def recorded(tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    """A run whose rollouts others learn from."""
    return train(tmp_path_factory.mktemp("recorded"), tiny_model_dir, "recorded", ["train.steps=2"])


@pytest.mark.slow
@pytest.mark.parametrize("chosen", list(choices()))
def test_cfg_3_each_choice_of_how_to_learn_takes_a_step(
    chosen: str, tmp_path: Path, own_cache: Path, tiny_model_dir: Path, recorded: RunDir
) -> None:
    """Incident: a loss variant that the configuration offered raised NameError when reached."""
    key = chosen.partition("=")[0]
    rows = tmp_path / "rows.jsonl"
    rows.write_text(f"{json.dumps(ROW)}\n")
    needed = [
        words.format(run=recorded.path, model=tiny_model_dir, rows=rows)
        for words in NEEDS.get(chosen, NEEDS.get(key.partition(".")[0], ()))
        if not words.startswith(f"{key}=")
    ]
    run = train(tmp_path, tiny_model_dir, "chosen", [*needed, chosen])
    assert run.is_finished
    (line,) = run.metrics.read()
    assert line["step"] == 1.0
