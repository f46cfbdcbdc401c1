"""What a start finds of the state that earlier ones left, with mirrors in a real S3 server."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from strop.io.atomic import AtomicDirectory
from strop.launch.sagemaker.checkpoint_sync import restore_newest
from strop.launch.sagemaker.client import SiteObjects
from strop.launch.sagemaker.options import SageMakerSite
from strop.record import RunState
from strop.record.mirror import claim_mirror, read_latest
from strop.store.opening import open_store
from tests.fixtures.mirrored import PlayedRun
from tests.fixtures.object_store import make_objects, use_store
from tests.launch.sagemaker.building import PROFILE
from tests.launch.sagemaker.rehearsal import Rehearsal


@pytest.fixture
def rehearsal(tmp_path: Path, store_address: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Rehearsal]:
    use_store(monkeypatch, store_address)
    profile = SageMakerSite(**PROFILE, endpoint_url=store_address)
    found = Rehearsal(tmp_path, objects=SiteObjects(profile))
    yield found
    found.close()


def write_spec(folder: Path, root: str, name: str = "a") -> None:
    path = folder / "home/job/spec.toml"
    path.parent.mkdir(parents=True)
    path.write_text(f'name = "{name}"\n[task]\nname = "arithmetic"\n[store]\nuri = "{root}"\n')


def test_a_start_that_was_lost_before_its_first_checkpoint_does_not_bar_the_next(
    rehearsal: Rehearsal, tmp_path: Path
) -> None:
    """A run that begins anew is another run: the claim of the lost one would refuse its mirror."""
    root = f"s3://strop-test/{tmp_path.name.replace('_', '-')}"
    uri = f"{root}/checkpoints/job-1"
    store = open_store(uri)
    claim_mirror(store, uri, RunState(name="a", spec_digest="d", created_at=1.0, num_attempts=1), "x")
    write_spec(tmp_path, root)
    found = restore_newest(tmp_path / "ckpt", tmp_path / "home", "job-1", reaches_store=True)
    assert found.step is None
    assert read_latest(store, uri) is None


@pytest.mark.parametrize(("kept", "wanted"), [(None, 4), (2, 4), (4, 4), (6, 6)])
def test_the_next_job_goes_on_from_the_mirror_of_the_one_before_where_that_is_ahead(
    rehearsal: Rehearsal, tmp_path: Path, kept: int | None, wanted: int
) -> None:
    """7.3: the platform copies the state when it likes; what a reclaim took is in the parent's mirror."""
    root = f"s3://strop-test/{tmp_path.name.replace('_', '-')}"
    played = PlayedRun.create(tmp_path / "elsewhere").train(1, 2, 3, 4)
    played.run.path = played.run.path.rename(tmp_path / "job-1")
    played.mirror(root, make_objects()).look(is_last=True)
    claimed = read_latest(open_store(root), f"{root}/checkpoints/job-1")
    assert claimed is not None
    if kept is not None:
        with AtomicDirectory(tmp_path / f"ckpt/algo-1/step-{kept:06d}") as partial:
            (partial / "w").write_text("w")
    write_spec(tmp_path, root, "tiny")
    found = restore_newest(tmp_path / "ckpt", tmp_path / "home", "job-2", reaches_store=True, parent="job-1")
    assert found.step == wanted, found.reason
    assert ("checkpoints/job-1 has step 4" in found.reason) == (kept in {None, 2})
    assert (tmp_path / f"home/checkpoints/step-{wanted:06d}/COMPLETE").is_file()
    # The parent's claim is its own: nothing of it is touched.
    assert read_latest(open_store(root), f"{root}/checkpoints/job-1") == claimed


def test_a_store_that_is_away_leaves_the_state_that_is_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    with AtomicDirectory(tmp_path / "ckpt/algo-1/step-000003") as partial:
        (partial / "w").write_text("w")
    write_spec(tmp_path, "s3://strop-test/x")
    found = restore_newest(tmp_path / "ckpt", tmp_path / "home", "job-1", reaches_store=True)
    assert found.step == 3
    assert "the mirror was not read" in found.reason
