"""The run file of an evaluation: what it may say, what it leaves to the run, how it travels."""

from __future__ import annotations

from pathlib import Path

import pytest

from strop.errors import ConfigError
from strop.run.evaluation import read_file_setup
from strop.spec import RunSpec, load_spec
from strop.spec.eval_file import is_of_file, read_eval_file

EVAL_TEXT = """task.name = "arithmetic"
task.max_value = 20
sampling.temperature = 0.6
sampling.top_p = 0.95
eval.num_examples = 10
eval.num_samples = "none"
seed = 3
"""


def a_run(*words: str) -> RunSpec:
    return load_spec(None, ["name=run", "task.name=arithmetic", "model.uri=Org/Small", *words]).spec


def write(folder: Path, text: str = EVAL_TEXT, name: str = "held-out.toml") -> Path:
    path = folder / name
    path.write_text(text)
    return path


def test_what_the_file_does_not_say_of_the_model_is_as_in_the_run(tmp_path: Path) -> None:
    file = read_eval_file(write(tmp_path))
    setup = read_file_setup(file, a_run("model.prompt_format=base", "model.dtype=float32"))
    assert (setup.spec.model.prompt_format, setup.spec.model.dtype) == ("base", "float32")
    assert (setup.spec.task.name, setup.spec.seed, setup.split.value) == ("arithmetic", 3, "held_out")
    # A run file may not cut the distribution; an evaluation may.
    assert (setup.sampling.temperature, setup.sampling.top_p) == (0.6, 0.95)
    assert (file.name, file.counts.num_examples, file.counts.num_samples) == ("held-out", 10, None)
    own = read_eval_file(write(tmp_path, EVAL_TEXT + 'model.dtype = "bfloat16"\n'))
    assert read_file_setup(own, a_run("model.dtype=float32")).spec.model.dtype == "bfloat16"


def test_the_text_that_travels_says_the_same_from_any_folder(tmp_path: Path) -> None:
    write(tmp_path, 'task.name = "arithmetic"\ntask.max_value = 9\nplacement.threads = 2\n', "base.toml")
    text = 'extends = "base.toml"\nname = "short"\ntask.max_value = 12\nmodel.uri = "./Small"\n'
    file = read_eval_file(write(tmp_path, text))
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    again = read_eval_file(write(elsewhere, file.to_text(), "eval.toml"))
    assert (again.name, again.tasks, dict(again.values), again.counts, again.model_uri) == (
        "short",
        ("arithmetic",),
        {("task", "max_value"): 12, ("placement", "threads"): 2},
        file.counts,
        str(tmp_path / "Small"),
    )
    assert again.to_text() == file.to_text()
    assert read_file_setup(again, a_run()) == read_file_setup(file, a_run())


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("task.max_value = 9\n", "names no task"),
        ('name = "?"\ntask.name = "arithmetic"\n', "name='?' in"),
        (
            'task.name = "arithmetic"\ntrain.steps = 9\n',
            "held-out.toml:2): no part of evaluating checkpoints",
        ),
        ('task.name = "arithmetic"\neval.every = 9\n', "held-out.toml:2): no part of evaluating"),
        ('task.name = "arithmetic"\neval.num_examples = 0\n', "eval.num_examples=0 in"),
        ('task.name = "arithmetic"\ntask.maxvalue = 9\n', "unknown key task.maxvalue"),
        ('task.name = "arithmetics"\n', "arithmetics"),
        (
            'task.name = "arithmetic"\nmodel.uri = "Org/Large"\n',
            "the run whose checkpoints are evaluated trains 'Org/Small'",
        ),
    ],
)
def test_what_cannot_work_is_refused_with_the_file_named(tmp_path: Path, text: str, message: str) -> None:
    path = write(tmp_path, text)
    with pytest.raises(ConfigError) as caught:
        read_file_setup(read_eval_file(path), a_run())
    assert message in str(caught.value)
    assert "held-out.toml" in str(caught.value)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"the evaluation's file .*/none.toml is not there"):
        read_eval_file(tmp_path / "none.toml")


def test_the_same_model_by_a_path_is_the_same_model(tmp_path: Path) -> None:
    file = read_eval_file(write(tmp_path, 'task.name = "arithmetic"\nmodel.uri = "/models/Small"\n'))
    assert read_file_setup(file, a_run()).spec.task.name == "arithmetic"


@pytest.mark.parametrize(
    ("name", "is_of"),
    [
        ("held-out.arithmetic-step-000020.json", True),
        ("arithmetic-step-000020.json", False),
        ("held-out.arithmetic-step-000020", False),
    ],
)
def test_results_of_a_file_are_known_by_their_name(name: str, is_of: bool) -> None:
    assert is_of_file(Path("eval") / name) is is_of
