from __future__ import annotations

import time
from pathlib import Path

import pytest

from strop.spec import load_spec, num_train_examples, write_spec

RECIPES = sorted((Path(__file__).parents[2] / "recipes").glob("*.toml"))


def test_there_are_recipes() -> None:
    assert {path.stem for path in RECIPES} >= {"arithmetic", "reverse-text", "gsm8k"}


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_loads_and_survives_writing(path: Path, tmp_path: Path) -> None:
    resolved = load_spec(path)
    assert resolved.spec.name == path.stem
    assert resolved.notices == ()
    written = tmp_path / "spec.toml"
    written.write_text(write_spec(resolved))
    assert load_spec(written).spec == resolved.spec


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_opens_with_a_comment_and_names_no_place(path: Path) -> None:
    text = path.read_text()
    assert text.startswith("# ")
    assert "[output]" not in text
    assert "[placement]" not in text


def test_the_demo_asks_for_what_its_promise_is_measured_on() -> None:
    spec = load_spec(RECIPES[[path.stem for path in RECIPES].index("arithmetic")]).spec
    assert (spec.train.prompts_per_step, spec.train.rollouts_per_prompt) == (8, 8)
    assert spec.task.max_reply_tokens == 32
    # 20 * 20 = 400 pairs, 100 of them held out.
    assert num_train_examples(spec.task) == 300


def test_reading_a_recipe_takes_milliseconds() -> None:
    load_spec(RECIPES[0])
    seconds = []
    for _ in range(5):
        started_s = time.process_time()
        load_spec(RECIPES[0], ["train.steps=3"])
        seconds.append(time.process_time() - started_s)
    # Of processor time, and the best of five: a busy machine does not fail the test.
    assert min(seconds) < 0.05
