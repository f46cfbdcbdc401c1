"""The life cycle of a run over several training jobs: what its watcher submits, and what it does not."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from strop.errors import CheckRefused
from strop.launch.contract import JobEnvironment, JobRef
from strop.launch.job_dir import job_path_of, read_plan, read_ref
from strop.launch.launcher import Launcher, watch
from strop.launch.sagemaker.job_log import JobLog
from strop.launch.sagemaker.local_mode import Emulator, EmulatorSettings
from strop.launch.snapshot import take_snapshot
from tests.fixtures.object_store import store_environment
from tests.fixtures.sagemaker import FakeSageMaker, JobScript, Stage
from tests.fixtures.scripted_jobs import Killed, be_killed
from tests.fixtures.sockets import free_port
from tests.launch.sagemaker.aws import Site
from tests.launch.sagemaker.building import NOON
from tests.launch.sagemaker.rehearsal import ENDLESS, SOURCE, expected_metrics
from tests.launch.sagemaker.test_emulator import HOST, wait_until
from tests.launch.sagemaker.test_verbs import launcher_of, request_of, write_verdict

SAVED = JobScript(
    stages=(Stage(secondary="Starting", duration_s=60.0), Stage(secondary="Training", duration_s=600.0)),
    failure_reason="requeue: host algo-1 saved step 20",
)


def save(site: Site, ref: JobRef, step: int, *, is_whole: bool = True) -> None:
    """Leave a state where the platform would have copied it to."""
    root = f"{ref.details['jobs'][0]['state_uri']}/algo-1/step-{step:06d}"
    site.objects.write(f"{root}/weights", b"w")
    if is_whole:
        site.objects.write(f"{root}/COMPLETE", b"{}")


class Watcher:
    """Watches with the fake's clock; a script says what happens at a pause, by the number of the pause."""

    def __init__(
        self, site: Site, launcher: Launcher, ref: JobRef, script: Mapping[int, Callable[[], Any]]
    ) -> None:
        self.site, self.launcher, self.home, self.script = site, launcher, Path(ref.home), script
        self.said: list[str] = []
        self.num_pauses = 0

    def run(self) -> None:
        watch(self.launcher, self.home, self.said.append, pause=self._pause, now=lambda: self.site.fake.now)

    def _pause(self, duration_s: float) -> None:
        self.num_pauses += 1
        assert self.num_pauses < 30, self.said
        self.script.get(self.num_pauses, lambda: None)()
        self.site.fake.advance(400.0)

    @property
    def ref(self) -> JobRef:
        return read_ref(job_path_of(self.home))


def created(site: Site) -> list[dict[str, Any]]:
    return site.fake.sent("create_training_job")


def test_75_is_followed_by_a_job_with_a_new_name_and_the_same_run(site: Site, tmp_path: Path) -> None:
    launcher = launcher_of(site, tmp_path)
    site.fake.next_scripts = [SAVED]
    first = launcher.submit(request_of(site)).ref
    save(site, first, 20)
    watcher = Watcher(site, launcher, first, {4: lambda: write_verdict(site, watcher.ref, 0)})
    watcher.run()
    one, two = created(site)
    assert two["TrainingJobName"] != one["TrainingJobName"] == first.job_id
    name = two["TrainingJobName"]
    # The first job: 60 s + 600 s are over after the second pause of 400 s: 12:13:20 UTC.
    assert name == "job-20261121-121320"
    assert two["CheckpointConfig"] == one["CheckpointConfig"]
    assert (two["HyperParameters"], two["Tags"]) == (one["HyperParameters"], one["Tags"])
    (channel,) = [each for each in two["InputDataConfig"] if each["ChannelName"] == "config"]
    assert channel["DataSource"]["S3DataSource"]["S3Uri"].endswith(f"/config/{name}/")
    assert f"config/{name}/plan.json" in site.list_keys()
    assert not [key for key in site.list_keys() if "secret" in key or "cancelled" in key]
    row = JobLog(site.project / "docs/job_log.md").read()[-1]
    assert (row.job_name, row.facts["parent"]) == (name, first.job_id)
    assert watcher.said[-1] == f"{name}: succeeded"
    # What another job of this plan changed in the request: names and places alone.
    same = {"TrainingJobName", "InputDataConfig"}
    assert {key: one[key] for key in one if key not in same} == {
        key: two[key] for key in two if key not in same
    }


@pytest.mark.parametrize("is_whole", [True, False])
def test_a_wall_time_goes_on_from_a_whole_state_alone(site: Site, tmp_path: Path, is_whole: bool) -> None:
    launcher = launcher_of(site, tmp_path)
    ref = launcher.submit(request_of(site, max_runtime="5m")).ref
    save(site, ref, 20, is_whole=is_whole)
    watcher = Watcher(site, launcher, ref, {})
    # Either way the end is none: the second job runs out of time too, without having come further.
    began = "from step 20, and now there is step 20" if is_whole else "without one, and now there is none"
    with pytest.raises(CheckRefused, match=f"timeout .*no newer checkpoint: it began {began}"):
        watcher.run()
    assert len(created(site)) == (2 if is_whole else 1)


def test_what_only_the_mirror_has_is_gone_on_from_too(site: Site, tmp_path: Path) -> None:
    launcher = launcher_of(site, tmp_path)
    ref = launcher.submit(request_of(site, max_runtime="5m")).ref
    save(site, ref, 20)
    site.objects.write(f"{ref.details['jobs'][0]['record_uri']}/small-try_step40/COMPLETE", b"{}")
    with pytest.raises(CheckRefused, match="it began from step 40"):
        Watcher(site, launcher, ref, {}).run()
    assert len(created(site)) == 2


def test_a_stopped_job_is_never_followed(site: Site, tmp_path: Path) -> None:
    launcher = launcher_of(site, tmp_path)
    ref = launcher.submit(request_of(site)).ref
    save(site, ref, 20)
    write_verdict(site, ref, 75)
    stop = {2: lambda: site.backend.stop(ref, None, grace_s=1.0)}
    with pytest.raises(CheckRefused, match="ended as cancelled"):
        Watcher(site, launcher, ref, stop).run()
    assert len(created(site)) == 1


@pytest.mark.parametrize("is_listed", [True, False])
def test_a_kill_after_the_submission_is_one_job(
    site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_listed: bool
) -> None:
    launcher = launcher_of(site, tmp_path)
    site.fake.next_scripts = [SAVED]
    ref = launcher.submit(request_of(site)).ref
    save(site, ref, 20)
    site.fake.advance(1000.0)
    with monkeypatch.context() as patch:
        patch.setattr("strop.launch.submit.write_ref", lambda ref: be_killed())
        with pytest.raises(Killed):
            Watcher(site, launcher, ref, {}).run()
    assert len(created(site)) == 2
    assert read_ref(job_path_of(ref.home)).job_id == ref.job_id
    if not is_listed:
        # A listing may not show a job yet that was just created: then its name is what makes it one.
        monkeypatch.setattr(site.backend, "recover", lambda plan: None)
    watcher = Watcher(site, launcher, ref, {2: lambda: write_verdict(site, watcher.ref, 0)})
    watcher.run()
    names = {request["TrainingJobName"] for request in created(site)}
    assert names == {ref.job_id, watcher.ref.job_id}
    assert created(site)[0]["TrainingJobName"] == "job-20261121-120000"
    assert watcher.ref.submitted_at > NOON


@pytest.mark.slow
def test_a_real_program_is_brought_to_its_end_over_two_jobs(
    site: Site, tmp_path: Path, store_address: str
) -> None:
    """The wall time ends the first job in the middle; the second one goes on at the very next step."""
    emulators: list[Emulator] = []
    num_steps = [ENDLESS]

    def make_instance() -> Emulator:
        if emulators:
            # The second job has a little to do after whatever the first one had saved.
            num_steps.append((site.backend.find_saved_step(ref) or 0) + 5)
        environment = {
            "TRAINEE_STEPS": str(num_steps[-1]),
            "TRAINEE_STEP_S": "0.1",
            **store_environment(store_address),
            "PYTHONPATH": str(SOURCE),
            "STROP_CACHE": str(tmp_path / "cache"),
            "STROP_STORE_URI": f"s3://strop-test/{site.prefix}",
        }
        settings = EmulatorSettings(environment=environment, sync_every_s=0.2, port=free_port())
        emulators.append(Emulator(tmp_path / f"instance-{len(emulators)}", site.objects, settings))
        return emulators[-1]

    site.fake = FakeSageMaker(now=NOON, make_instance=make_instance)
    site.clients.by_service["sagemaker"] = site.fake
    launcher = launcher_of(site, tmp_path)
    request = request_of(site, max_runtime="5m", environment=JobEnvironment())
    shutil.copy(Path(__file__).with_name("trainee.py"), site.project / "program.py")
    excluded = [site.project / "runs", site.project / "docs"]
    request = replace(request, snapshot=take_snapshot(site.project, excluded=excluded))
    ref = launcher.submit(request).ref
    state_uri = ref.details["jobs"][0]["state_uri"]

    def has_state() -> bool:
        return site.backend.find_saved_step(ref) is not None

    def run_out_of_time() -> None:
        wait_until(has_state, "no state came")
        site.fake.advance(250.0)
        wait_until(lambda: emulators[0].poll() is not None, "it did not stop")

    def finish() -> None:
        site.fake.advance(200.0)
        wait_until(lambda: emulators[1].poll() is not None, "it did not end")
        site.fake.advance(60.0)

    script: list[Callable[[], Any]] = [
        lambda: site.fake.advance(200.0),
        run_out_of_time,
        lambda: site.fake.advance(130.0),
        finish,
    ]
    said: list[str] = []
    try:
        watch(
            launcher, Path(ref.home), said.append, pause=lambda _: script.pop(0)(), now=lambda: site.fake.now
        )
    finally:
        for emulator in emulators:
            emulator.kill()
    assert [emulator.codes for emulator in emulators] == [{HOST: 75}, {HOST: 0}]
    assert said[-1].endswith(": succeeded")
    assert any("timeout" in line for line in said)
    text = site.objects.read(f"{state_uri}/{HOST}/run/metrics.jsonl").decode()
    # No step is missing, none is trained twice, and the numbers are those of an undisturbed run.
    assert [json.loads(line) for line in text.splitlines()] == expected_metrics(num_steps[-1])
    step = read_plan(job_path_of(ref.home)).start_step
    assert step is not None
    assert f"train| begin at step {step}" in emulators[1].log_of(HOST)
