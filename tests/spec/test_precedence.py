"""Which value wins where files and an override speak of one setting."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from strop.errors import ConfigError
from strop.spec import load_spec
from strop.spec.description import explain
from strop.spec.sources import add_override

SMALL = 'name = "x"\ntask.name = "arithmetic"\n'


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_an_explicit_none_beats_a_value_and_stays_none(folder: Path) -> None:
    (folder / "run.toml").write_text(SMALL + "[job]\ncpus = 2\n")
    assert load_spec("run.toml", ['job.cpus="none"']).spec.job.cpus is None


def test_halves_of_two_splits_are_as_they_are_written(folder: Path) -> None:
    # The measured failure: a file with 4, and 2 and 2 on the command line, became 4 and 2.
    (folder / "run.toml").write_text(SMALL + "[job]\ntrain_gpus = 4\n")
    resolved = load_spec("run.toml", ["job.train_gpus=2", "job.infer_gpus=2"])
    assert resolved.spec.job.gpu_roles == {"infer": 2, "train": 2}
    with pytest.raises(ConfigError, match="shared out in two ways"):
        load_spec("run.toml", ["job.gpus=2"])
    assert load_spec("run.toml", ["job.gpus=2", "job.train_gpus=none"]).spec.job.gpu_roles == {"train": 2}


@pytest.mark.parametrize("text", ["/a", "two words", 'q"uote', "a=b", "7", "none"])
def test_an_option_that_stands_for_a_setting_is_a_text_and_refuses_its_setting(text: str) -> None:
    words = add_override(["name=x", "task.name=arithmetic"], "output.dir", text, "--output-dir")
    assert load_spec(None, words).spec.output.dir == (None if text == "none" else str(Path(text).absolute()))
    assert add_override(["a=1"], "output.dir", None, "--output-dir") == ["a=1"]
    with pytest.raises(ConfigError, match=r"--output-dir together with output\.dir="):
        add_override(["output.dir=b"], "output.dir", text, "--output-dir")


# Every setting of a job with two values that differ from its default.
CHOICES: dict[str, tuple[object, ...]] = {
    "nodes": (2, 3, 4),
    "cpus_per_gpu": (4, 5, 6),
    "cpus": (2, 3, 4),
    "max_requeue": (5, 6, 7),
    "grace_s": (30.0, 31.0, 32.0),
    "max_silence_s": (60.0, 61.0, 62.0),
    "train_gpus": (1, 2, 3),
    "infer_gpus": (1, 2, 3),
}
layer = st.dictionaries(st.sampled_from(sorted(CHOICES)), st.integers(0, 2))


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(base=layer, file=layer, override=layer)
def test_the_winner_is_the_one_that_explain_names(
    folder: Path, base: dict[str, int], file: dict[str, int], override: dict[str, int]
) -> None:
    def lines(values: dict[str, int]) -> str:
        return "".join(f"{key} = {CHOICES[key][index]}\n" for key, index in values.items())

    (folder / "base.toml").write_text(SMALL + "[job]\n" + lines(base))
    (folder / "run.toml").write_text('extends = "base.toml"\n[job]\n' + lines(file))
    resolved = load_spec("run.toml", [f"job.{key}={CHOICES[key][index]}" for key, index in override.items()])
    for key in CHOICES:
        found = explain(f"job.{key}", resolved)
        assert found.value == getattr(resolved.spec.job, key)
        origin = str(found.origin)
        for place, values in (("override", override), ("run.toml:", file), ("base.toml:", base)):
            if key in values:
                assert (origin.startswith(place), found.value) == (True, CHOICES[key][values[key]])
                break
        else:
            assert origin == "default"
