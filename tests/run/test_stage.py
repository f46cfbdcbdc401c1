"""`strop stage`: everything a run names goes to its store once, and the run finds it there."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from strop.cli import main
from strop.errors import HubUnreachable, RemoteMissing, RemoteUnreachable, StoreError
from strop.plan.planning import make_plan
from strop.record import RunDir
from strop.record.rollouts import write_rollouts
from strop.rollout import Split
from strop.run.stage import Staged, stage_run
from strop.spec import load_spec
from strop.store import follow_store, get_model, open_store
from strop.tasks import build_task
from strop.train.data.offline import find_source
from strop.train.data.sft_sources import find_rollouts_files
from tests.fixtures.object_store import SpoilingProxy
from tests.fixtures.saved_data import save_split
from tests.fixtures.sockets import only_connects_to
from tests.record.test_rollouts import make_rollout
from tests.store.test_listed import shard_model, sync
from tests.store.test_models import PACKAGE_URI, cached_package_model, write_model

pytestmark = pytest.mark.usefixtures("away_from_home")
TRAIN = [{"question": f"{n} + 1?", "answer": f"#### {n + 1}"} for n in range(20)]
TEST = [{"question": f"{n} + 2?", "answer": f"#### {n + 2}"} for n in range(3)]


def write_run(folder: Path, model: str, source: str) -> str:
    path = folder / "run.toml"
    path.write_text(
        f'name = "staged"\n[model]\nuri = "{model}"\n[task]\nname = "gsm8k"\nsource = "{source}"\n'
        f'[store]\nuri = "{folder}/store"\n'
    )
    return str(path)


def write_data(folder: Path) -> Path:
    folder.mkdir(parents=True)
    for name, rows in (("train", TRAIN), ("test", TEST)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


@pytest.fixture
def local_run(tmp_path: Path) -> str:
    return write_run(tmp_path, str(write_model(tmp_path / "model")), str(write_data(tmp_path / "data")))


class Cached:
    """Stands for the hub client's cache of a model and of org/words."""

    def __init__(self, model: Path, folder: Path) -> None:
        self._model, self._folder = model, folder
        (folder / "main").mkdir(parents=True)
        for name, rows in (("train", TRAIN), ("test", TEST)):
            pq.write_table(pa.Table.from_pylist(rows), folder / "main" / f"{name}-00000-of-00001.parquet")

    def __call__(self, repo: str, revision: str | None, kind: str, only: Sequence[str] = ()) -> Path:
        return self._folder if kind == "dataset" else self._model


def by_kind(staged: list[Staged]) -> dict[str, Staged]:
    return {one.kind: one for one in staged}


def test_a_run_of_local_paths(local_run: str, tmp_path: Path) -> None:
    resolved = load_spec(local_run)
    seen = by_kind(stage_run(resolved, is_check=True))
    assert not (tmp_path / "store").exists()
    staged = by_kind(stage_run(resolved))
    assert {kind: one.num_moved for kind, one in staged.items()} == {"model": 3, "data": 2}
    assert {kind: one.num_moved for kind, one in seen.items()} == {"model": 3, "data": 2}
    assert staged["data"].size_bytes == staged["data"].moved_bytes == seen["data"].moved_bytes
    again = by_kind(stage_run(resolved))
    assert {kind: (one.num_moved, one.moved_bytes) for kind, one in again.items()} == {
        "model": (0, 0),
        "data": (0, 0),
    }
    assert again["model"].digest == staged["model"].digest
    # Where the paths are not, the advice leads to the same bytes.
    model_uri, source = (staged[kind].uri for kind in ("model", "data"))
    assert staged["model"].advice == f'model.uri = "{model_uri}"'
    assert staged["data"].advice == f'task.source = "{source}"'
    moved = load_spec(local_run, [f"model.uri={model_uri}", f"task.source={source}"])
    task = build_task(moved.spec.task)
    assert len(task.examples(Split.TRAIN)) == len(TRAIN)
    assert get_model(moved.spec.model.uri).digest == get_model(str(tmp_path / "model")).digest
    # Changed data is another record.
    (tmp_path / "data" / "train.jsonl").write_text(json.dumps(TRAIN[0]) + "\n")
    assert by_kind(stage_run(resolved))["data"].uri != source
    assert open_store(source).find_manifest(source)


def test_a_single_file_is_split_as_before(tmp_path: Path) -> None:
    write_model(tmp_path / "model")
    write_data(tmp_path / "data")
    run = write_run(tmp_path, str(tmp_path / "model"), str(tmp_path / "data" / "train.jsonl"))
    staged = by_kind(stage_run(load_spec(run)))["data"]
    assert staged.advice is not None
    source = staged.advice.removeprefix('task.source = "').rstrip('"')
    here, there = (build_task(load_spec(run, words).spec.task) for words in ((), (f"task.source={source}",)))
    for split in Split:
        assert [one.example_id for one in here.examples(split)] == [
            one.example_id for one in there.examples(split)
        ]


def write_order(path: Path, run: str) -> list[str]:
    """Write the ids of three training examples, last first, and return them."""
    chosen = build_task(load_spec(run).spec.task).examples(Split.TRAIN)[2::-1]
    path.write_text("".join(json.dumps({"example_id": one.example_id}) + "\n" for one in chosen))
    return [one.example_id for one in chosen]


def read_advice(staged: list[Staged]) -> list[str]:
    """Return what the run file shall say, as overrides."""
    said = "; ".join(one.advice for one in staged if one.advice is not None)
    return [word.replace(" = ", "=").replace('"', "") for word in said.split("; ")]


def test_the_order_of_a_mixtures_part_goes_along(tmp_path: Path) -> None:
    run = write_run(tmp_path, str(write_model(tmp_path / "model")), str(write_data(tmp_path / "data")))
    ids = write_order(tmp_path / "order.jsonl", run)
    mixture = tmp_path / "mixture.toml"
    mixture.write_text(
        Path(run).read_text().replace('[task]\nname = "gsm8k"', '[task.parts.words]\nname = "gsm8k"')
        + '[task.parts.sums]\nname = "arithmetic"\n[task]\nname = "mixture"\n'
    )
    order = {"task.parts.words.order_file": str(tmp_path / "order.jsonl")}
    resolved = load_spec(str(mixture), [f"{key}={value}" for key, value in order.items()])
    staged = stage_run(resolved)
    assert [one.kind for one in staged] == ["model", "data", "data"]
    advice = read_advice(staged)
    assert sorted(word.partition("=")[0] for word in advice) == [
        "model.uri",
        "task.parts.words.order_file",
        "task.parts.words.source",
    ]
    (tmp_path / "order.jsonl").unlink()
    (tmp_path / "data").rename(tmp_path / "gone")
    moved = build_task(load_spec(str(mixture), advice).spec.task)
    assert [one.example_id for one in moved.examples(Split.TRAIN) if one.task == "gsm8k"] == ids


def test_an_order_in_a_bucket(s3_root: str, tmp_path: Path) -> None:
    run = write_run(tmp_path, str(write_model(tmp_path / "model")), str(write_data(tmp_path / "data")))
    ids = write_order(tmp_path / "order.jsonl", run)
    uri = f"{s3_root}/orders/order.jsonl"
    open_store(uri).put_file(tmp_path / "order.jsonl", uri)
    (tmp_path / "order.jsonl").unlink()
    task = build_task(load_spec(run, [f"task.order_file={uri}"]).spec.task)
    assert [one.example_id for one in task.examples(Split.TRAIN)] == ids
    # What is not there is refused, and the message names it.
    absent = build_task(load_spec(run, [f"task.order_file={uri}.gone"]).spec.task)
    with pytest.raises(RemoteMissing, match=r"order\.jsonl\.gone"):
        absent.examples(Split.TRAIN)


@pytest.mark.parametrize(
    "terms",
    [["train.terms=rl+sft"], ["train.terms=distill", "teacher.source=initial"]],
    ids=["sft", "distill"],
)
def test_demonstrations_go_along(local_run: str, tmp_path: Path, terms: list[str]) -> None:
    rows = [{"prompt": f"{n} + 3?", "completion": f"#### {n + 3}"} for n in range(4)]
    path = tmp_path / "shown.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    staged = stage_run(load_spec(local_run, [*terms, f"sft.source={path}"]))
    (advice,) = [word for word in read_advice(staged) if word.startswith("sft.source=")]
    path.unlink()
    assert find_source(advice.removeprefix("sft.source=")).read_text().count("completion") == len(rows)


def test_a_teacher_goes_along_under_its_own_name(local_run: str, tmp_path: Path) -> None:
    teacher = write_model(tmp_path / "teacher", tokenizer_json=b'{"wise": 1}')
    words = ["train.terms=distill", "teacher.source=model", f"teacher.model={teacher}"]
    staged = [one for one in stage_run(load_spec(local_run, words)) if one.kind == "model"]
    assert [one.name for one in staged] == [str(tmp_path / "model"), str(teacher)]
    assert staged[1].advice == f'teacher.model = "{staged[1].uri}"'
    assert get_model(staged[1].uri).digest == get_model(str(teacher)).digest
    # The policy as its own teacher is sent once, and no other one of the run file that nobody asks.
    own = ["train.terms=distill", "teacher.source=model", f"teacher.model={tmp_path / 'model'}"]
    once, *_ = stage_run(load_spec(local_run, own))
    assert once.advice == f'model.uri = "{once.uri}"; teacher.model = "{once.uri}"'


def test_pairs_go_along_with_their_reference(local_run: str, tmp_path: Path) -> None:
    run = RunDir.create(tmp_path / "runs", "earlier", "", "digest", {})
    write_rollouts(run.rollouts_path(1), [make_rollout()])
    run.release()
    other = write_model(tmp_path / "other", tokenizer_json=b'{"other": 1}')
    words = ["train.terms=dpo", f"dpo.source={run.path}", f"reference.model={other}"]
    staged = stage_run(load_spec(local_run, words))
    advice = dict(word.split("=", 1) for word in read_advice(staged))
    assert get_model(advice["reference.model"]).digest == get_model(str(other)).digest
    shutil.rmtree(run.path)
    found = find_source(advice["dpo.source"], setting="dpo.source")
    assert [file.name for file in find_rollouts_files(found)] == ["step-000001.parquet"]


def test_a_run_of_hub_ids_needs_no_hub_afterwards(tmp_path: Path, tiny_model_dir: Path) -> None:
    run = write_run(tmp_path, "org/tiny", "org/words")
    resolved = load_spec(run)
    with pytest.MonkeyPatch.context() as patch:
        cached = Cached(tiny_model_dir, tmp_path / "rows")
        patch.setattr("strop.store.resolve.find_snapshot", cached)
        patch.setattr("strop.store.hub.find_snapshot", cached)
        staged = by_kind(stage_run(resolved))
    assert staged["model"].uri == f"{tmp_path}/store/models/org/tiny"
    assert staged["data"].uri == f"{tmp_path}/store/datasets/org/words"
    assert staged["model"].advice is None
    assert staged["data"].advice is None
    with only_connects_to() as attempts, follow_store(resolved.spec.store):
        assert get_model("org/tiny").source == "store"
        assert len(build_task(resolved.spec.task).examples(Split.HELD_OUT)) == len(TEST)
    assert attempts == []
    # On another machine, whose hub is dead, staging verifies what is there.
    with only_connects_to():
        again = by_kind(stage_run(resolved))
    assert {kind: one.num_moved for kind, one in again.items()} == {"model": 0, "data": 0}
    assert again["model"].digest == staged["model"].digest
    assert make_plan(resolved).schedule.num_train_examples == len(TRAIN)


def test_another_revision_is_refused_unless_it_shall_replace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = write_run(tmp_path, "org/tiny", str(write_data(tmp_path / "data")))
    model = write_model(tmp_path / "snapshot")
    monkeypatch.setattr("strop.store.resolve.find_snapshot", lambda *given: model)
    resolved = load_spec(run)
    stage_run(resolved)
    write_model(model, tokenizer_json=b'{"new": 1}')
    with pytest.raises(StoreError, match=r"tokenizer\.json differs.*Next: pin the revision"):
        stage_run(resolved)
    assert by_kind(stage_run(resolved, may_replace=True))["model"].num_moved == 1


def test_a_stand_in_is_never_staged_under_the_models_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("strop.store.models.SUBSTITUTES", {"org/tiny": PACKAGE_URI})
    cached_package_model(tmp_path / "cache")
    data = str(write_data(tmp_path / "data"))
    with only_connects_to():
        assert get_model("org/tiny").source == "package"
        with pytest.raises(HubUnreachable, match="what stands in for it is another model"):
            stage_run(load_spec(write_run(tmp_path, "org/tiny", data)))
        assert not (tmp_path / "store" / "models").exists()
        # Under its own name it may be.
        staged = by_kind(stage_run(load_spec(write_run(tmp_path, PACKAGE_URI, data))))["model"]
    assert "/models/strop-test-model==1.0-" in staged.uri


def test_a_model_and_data_named_by_uri_are_verified_where_they_are(s3_root: str, tmp_path: Path) -> None:
    model, source = f"{s3_root}/elsewhere/m", f"{s3_root}/elsewhere/d"
    run = write_run(tmp_path, model, source)
    with pytest.raises(RemoteMissing, match="elsewhere/m is not in the store"):
        stage_run(load_spec(run))
    open_store(model).put(write_model(tmp_path / "model"), model)
    open_store(source).put(write_data(tmp_path / "data"), source)
    staged = stage_run(load_spec(run))
    assert [(one.uri, one.num_files, one.num_moved) for one in staged] == [(model, 3, 0), (source, 2, 0)]


def test_staging_into_s3_goes_on_after_a_kill_of_the_store(
    proxy: SpoilingProxy, s3_root: str, local_run: str
) -> None:
    resolved = load_spec(local_run, [f"store.uri={s3_root}"])
    proxy.once("500", "PUT", r"tokenizer\.json$", times=100)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("botocore.retries.standard.ExponentialBackoff.delay_amount", lambda *_: 0.0)
        with pytest.raises(RemoteUnreachable, match=r"tokenizer\.json could not be sent"):
            stage_run(resolved)
    proxy.spoil = lambda exchange: None
    assert by_kind(stage_run(resolved))["model"].num_moved < 3
    proxy.seen.clear()
    assert {one.num_moved for one in stage_run(resolved)} == {0}
    assert {exchange.method for exchange in proxy.seen} <= {"GET", "HEAD"}


def test_the_command(local_run: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["stage", local_run, "--check"]) == 0
    assert "would send" in capsys.readouterr().out
    assert main(["stage", local_run, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert [(one["kind"], one["num_moved"]) for one in told] == [("model", 3), ("data", 2)]
    assert main(["stage", local_run]) == 0
    out = capsys.readouterr()
    assert out.out.count("nothing") == 2
    assert 'task.source = "' in out.err
    assert main(["stage", local_run, "store.uri=none"]) == 2


def test_what_another_tool_sent_is_staged_already(s3_root: str, tmp_path: Path) -> None:
    sync(shard_model(tmp_path / "m"), f"{s3_root}/models/big")
    for name, rows in (("train", TRAIN), ("test", TEST)):
        sync(save_split(rows, tmp_path / name), f"{s3_root}/datasets/gsm8k_{name}")
    words = ["name=x", "model.uri=org/big", "task.name=gsm8k", f"store.uri={s3_root}"]
    found = stage_run(load_spec(None, words))
    assert [(one.uri.removeprefix(s3_root), one.num_moved) for one in found] == [
        ("/models/big", 0),
        ("/datasets/gsm8k_train", 0),
        ("/datasets/gsm8k_test", 0),
    ]
