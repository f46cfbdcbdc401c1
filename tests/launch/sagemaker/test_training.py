"""A real training in the real entry, with state and mirror in a real S3 server."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from strop.io.atomic import AtomicDirectory
from strop.launch.contract import RolePlan
from strop.launch.sagemaker.checkpoint_sync import restore_newest
from strop.launch.sagemaker.client import SiteObjects
from strop.launch.sagemaker.options import SageMakerSite
from strop.record.mirror.claim import RunIdentity, claim_mirror, read_latest
from strop.store.opening import open_store
from tests.fixtures.mirrored import PlayedRun
from tests.fixtures.object_store import make_objects, store_environment, use_store
from tests.fixtures.own_code import own_settings, remove_own_code, write_own_code
from tests.launch.sagemaker.building import PROFILE
from tests.launch.sagemaker.rehearsal import Rehearsal
from tests.launch.sagemaker.test_emulator import HOST, wait_for_nobody, wait_for_state, wait_until

pytestmark = pytest.mark.slow
LIMIT_S = 900.0
"""For a training and its mirror: an uploader of the lowest priority has waited minutes for its turn."""
TRAIN = RolePlan(
    name="train", argv=("python3", "-m", "strop.cli", "train", "{run}/job/spec.toml", "output.dir={run}")
)
NUM_STEPS = 12
SETTINGS = (
    "model.dtype=float32",
    f"train.steps={NUM_STEPS}",
    "train.prompts_per_step=2",
    "train.group_size=2",
    "train.checkpoint_every=2",
    "eval.num_examples=4",
    "eval.num_samples=2",
    "placement.threads=1",
)


@pytest.fixture
def rehearsal(tmp_path: Path, store_address: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Rehearsal]:
    use_store(monkeypatch, store_address)
    profile = SageMakerSite(**PROFILE, endpoint_url=store_address)
    found = Rehearsal(tmp_path, objects=SiteObjects(profile))
    yield found
    found.close()


def test_lau_2_a_training_goes_on_from_its_state_after_a_kill_and_after_a_stop(
    rehearsal: Rehearsal, tiny_model_dir: Path, store_address: str, tmp_path: Path
) -> None:
    """LAU-2, A6: what was saved is in S3 while the run goes on, and a new start continues at its step.

    The task is the user's own, and only what travelled with the job is still there.
    """
    write_own_code(rehearsal.project, "submitted")
    prefix = tmp_path.name.replace("_", "-")
    request = rehearsal.submit(
        overrides=(f"model.uri={tiny_model_dir}", *SETTINGS, *own_settings(rehearsal.project)),
        profile={"prefix": prefix, "endpoint_url": store_address},
        roles=(TRAIN,),
        local=True,
    )
    remove_own_code(rehearsal.project)
    environment = {
        **store_environment(store_address),
        "STROP_STORE_URI": f"s3://strop-test/{prefix}",
        "HF_HUB_OFFLINE": "1",
    }
    settings = {"environment": environment}
    first = rehearsal.start(request, **settings)
    wait_for_state(rehearsal, request)
    first.kill()
    wait_for_nobody(first)
    second = rehearsal.start(request, **settings)
    root = f"s3://strop-test/{prefix}/checkpoints/{request['TrainingJobName']}"

    def is_mirrored() -> bool:
        assert rehearsal.objects is not None
        return any("_step" in found.uri and "COMPLETE" in found.uri for found in rehearsal.objects.list(root))

    wait_until(lambda: "train| step" in second.log_of(HOST) or second.poll() is not None, "it did not begin")
    wait_until(lambda: is_mirrored() or second.poll() is not None, "nothing was mirrored", limit_s=LIMIT_S)
    code = second.stop()
    # On a fast machine it may have finished first.
    assert code in {75, 0}, second.log_of(HOST)
    if code == 75:
        # Whatever the platform had copied is gone: the run's own mirror is enough.
        assert rehearsal.objects is not None
        for stored in list(rehearsal.objects.list(request["CheckpointConfig"]["S3Uri"].rstrip("/"))):
            if "/step-" in stored.uri:
                rehearsal.objects.remove(stored.uri)
    third = rehearsal.start(request, **settings)
    assert third.wait(LIMIT_S) == 0, third.log_of(HOST)
    assert third.check_end() == []
    steps = [line["step"] for line in rehearsal.metrics(request, HOST)]
    assert steps == list(range(1, NUM_STEPS + 1))
    assert code == 0 or "has step" in third.log_of(HOST)
    assert "no state is there" not in second.log_of(HOST) + third.log_of(HOST)
    assert rehearsal.objects is not None
    names = {stored.uri[len(root) + 1 :] for stored in rehearsal.objects.list(root)}
    assert any(name.startswith("small-try_step") and name.endswith("/COMPLETE") for name in names), names
    verdict = rehearsal.objects.read(f"{root}/traces/attempts/{request['TrainingJobName']}-2/verdict.json")
    assert json.loads(verdict)["exit_code"] == 0


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
    claim_mirror(store, uri, RunIdentity(name="a", spec_digest="d", created_at=1.0), owner="x", attempt=1)
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
    uploader = played.uploader(root, make_objects(), uri=f"{root}/checkpoints/job-1")
    assert uploader.look(is_flush=True)
    if kept is not None:
        with AtomicDirectory(tmp_path / f"ckpt/algo-1/step-{kept:06d}") as partial:
            (partial / "w").write_text("w")
    write_spec(tmp_path, root, "tiny")
    found = restore_newest(tmp_path / "ckpt", tmp_path / "home", "job-2", reaches_store=True, parent="job-1")
    assert found.step == wanted, found.reason
    assert ("checkpoints/job-1 has step 4" in found.reason) == (kept in {None, 2})
    assert (tmp_path / f"home/checkpoints/step-{wanted:06d}/COMPLETE").is_file()
    # The parent's claim is its own: nothing of it is touched.
    latest = read_latest(open_store(root), f"{root}/checkpoints/job-1")
    assert latest is not None
    assert latest[0].owner == "owner of attempt 1"


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
