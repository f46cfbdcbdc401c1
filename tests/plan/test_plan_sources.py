"""`strop plan` asks nobody for the data of any task, and says what will have to be fetched."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from strop.errors import ConfigError, DataError
from strop.plan.plan import Plan
from strop.plan.planning import make_plan
from strop.spec import load_spec
from strop.spec.built_in import built_in_tasks
from tests.fixtures.sockets import only_connects_to

NEEDED: dict[str, tuple[str, ...]] = {
    "reasoning-gym": ("task.dataset=chain_sum",),
    "humaneval": ("task.source=openai/openai_humaneval",),
    "repo-repair": ("task.source=org/rows",),
    "rows": ("task.source=org/rows", "task.prompt=question", "task.reward=exact", "task.answer=answer"),
    "mixture": ("task.parts.a.name=mbpp", "task.parts.b.name=gsm8k", "task.parts.c.name=arithmetic"),
}
WITHOUT_DATA = frozenset({"arithmetic", "reasoning-gym", "guess-number"})
PACKAGES = frozenset({"verifiers", "openenv"})
"""What is asked there is made by a package in an environment of its own."""
PlanIt = Callable[..., Plan]


@pytest.fixture
def plan_it(tmp_path: Path, tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> PlanIt:
    """Plan a run of the tiny model where nothing forbids the hub but good manners."""
    from huggingface_hub import constants

    monkeypatch.setenv("STROP_CACHE", str(tmp_path / "cache"))
    for variable in ("HF_HUB_OFFLINE", "STROP_OFFLINE"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.chdir(tmp_path)
    Path("run.toml").write_text(f'name = "x"\n[model]\nuri = "{tiny_model_dir}"\n[task]\nname = "gsm8k"\n')
    return lambda *words: make_plan(load_spec("run.toml", words), cache_dir=tmp_path / "cache")


def list_files(folder: Path) -> set[Path]:
    return {path for path in folder.rglob("*") if path.is_file()}


# These are folders of the user's, which nobody fetches.
@pytest.mark.parametrize("task", sorted(built_in_tasks().keys() - PACKAGES - {"mlgym", "harbor"}))
@pytest.mark.parametrize("store", [None, "s3://nowhere/x"], ids=["hub", "store"])
def test_a_plan_asks_nobody_for_any_task(
    task: str, store: str | None, plan_it: PlanIt, tmp_path: Path
) -> None:
    if task == "reasoning-gym":
        pytest.importorskip("reasoning_gym")
    words = [f"task.name={task}", *NEEDED.get(task, ())]
    words += [] if store is None else [f"store.uri={store}"]
    before = list_files(tmp_path)
    with only_connects_to() as attempts:
        found = plan_it(*words)
    assert attempts == []
    assert list_files(tmp_path) == before
    said = [line for line in found.unknown if "is not on this machine; training fetches" in line]
    assert bool(said) == (task not in WITHOUT_DATA)


@pytest.mark.parametrize(
    ("words", "pieces"),
    [
        (("task.name=gsm8k",), ("of openai/gsm8k", "the data of task gsm8k is not")),
        (("task.name=mbpp",), ("full/train-00000-of-00001.parquet of google-research-datasets/mbpp",)),
        (("task.name=gsm8k", "task.source=s3://bucket/rows/"), ("training fetches s3://bucket/rows/,",)),
        (
            ("task.name=mixture", *NEEDED["mixture"]),
            ("of google-research-datasets/mbpp and ", "of openai/gsm8k"),
        ),
    ],
)
def test_what_is_to_be_fetched_is_named(
    words: tuple[str, ...], pieces: tuple[str, ...], plan_it: PlanIt
) -> None:
    (said,) = plan_it(*words).unknown
    for piece in pieces:
        assert piece in said


def test_a_model_elsewhere_is_not_asked_for_either(plan_it: PlanIt) -> None:
    with only_connects_to() as attempts:
        found = plan_it("task.name=arithmetic", "model.uri=org/absent")
    assert attempts == []
    assert "model org/absent is not on this machine" in found.unknown[0]


def test_the_copy_in_stores_cache_is_read(
    plan_it: PlanIt, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from strop.store import follow_store
    from strop.store.data_files import fetch_data_files
    from strop.store.resolve import only_local
    from tests.fixtures.sources import DATA, fill_store, follow

    root = fill_store(tmp_path)
    with follow_store(follow(root)):
        with only_local() as missing, pytest.raises(Exception, match="is not on this machine") as caught:
            fetch_data_files("org/data", [DATA])
        assert missing == [f"{DATA} of org/data"]
        assert type(caught.value).__name__ == "RemoteMissing"
        fetched = fetch_data_files("org/data", [DATA])
        with only_local() as missing:
            assert fetch_data_files("org/data", [DATA]) == fetched
        assert missing == []


@pytest.mark.parametrize("order", ["local", "parts"])
def test_what_is_here_is_read_and_what_is_wrong_with_it_is_said(
    order: str, plan_it: PlanIt, tmp_path: Path
) -> None:
    folder = tmp_path / "rows"
    folder.mkdir()
    for split in ("train", "test"):
        rows: list[dict[str, Any]] = [{"question": f"{split} {n}?", "answer": f"#### {n}"} for n in range(9)]
        pq.write_table(pa.Table.from_pylist(rows), folder / f"{split}.parquet")
    words = ["task.name=gsm8k", f"task.source={folder}"]
    if order == "parts":
        words = ["task.name=mixture", "task.parts.a.name=gsm8k", f"task.parts.a.source={folder}"]
    assert plan_it(*words).schedule.num_train_examples == 9
    (folder / "train.parquet").unlink()
    (folder / "train.jsonl").write_text(json.dumps({"question": "x"}) + "\n")
    with pytest.raises(DataError, match=r"train\.jsonl, row 1 has answer=None"):
        plan_it(*words)


def test_a_task_for_evaluation_only_is_refused_as_training_refuses_it(
    plan_it: PlanIt, tmp_path: Path
) -> None:
    row = {"prompt": "Write.", "instruction_id_list": ["punctuation:no_comma"], "kwargs": [{}], "key": 1}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    with pytest.raises((DataError, ConfigError)):
        plan_it("task.name=ifeval", f"task.source={tmp_path / 'rows.jsonl'}")
