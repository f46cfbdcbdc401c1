"""Incidents of launchers, as far as the part that all of them share goes. Each has its own for the rest."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from pathlib import Path

import pytest

from strop.errors import CheckRefused, ConfigError, StoreError
from strop.launch.build_request import make_plan
from strop.launch.contract import JobRef, JobState, SchedulerStatus
from strop.launch.job_dir import job_path_of, read_plan
from strop.launch.local.backend import LocalBackend
from strop.launch.snapshot import unpack_code
from strop.spec.reader import Flag
from tests.fixtures.scripted_jobs import World, make_world

CANARY = "canary-9d1e-secret-value"


@pytest.fixture
def world(tmp_path: Path) -> World:
    return make_world(tmp_path)


def git(folder: Path, *words: str) -> None:
    identity = ["-c", "user.name=A", "-c", "user.email=a@example.org", "-c", "commit.gpgsign=false"]
    subprocess.run(["git", *identity, *words], cwd=folder, check=True, capture_output=True)


@pytest.fixture
def repository(world: World) -> World:
    """The project as a repository with one commit."""
    git(world.project, "init", "-q")
    (world.project / ".gitignore").write_text("data/\n")
    git(world.project, "add", "-A")
    git(world.project, "commit", "-qm", "one")
    return world


def run_the_code_of(ref: JobRef, folder: Path, name: str = "train_more.py") -> str:
    """Do what a node does: unpack, verify, run."""
    plan = read_plan(job_path_of(ref.home))
    assert plan.code_sha256 is not None
    unpack_code(job_path_of(ref.home) / "code.tar.zst", folder, plan.code_sha256)
    done = subprocess.run([sys.executable, str(folder / name)], capture_output=True, text=True, check=True)
    return done.stdout.strip()


def test_lau_5_an_edit_that_was_not_committed_runs(repository: World, tmp_path: Path) -> None:
    (repository.project / "train_more.py").write_text("print('edited')\n")
    ref = repository.submit()
    assert run_the_code_of(ref, tmp_path / "code") == "edited"
    diff = (job_path_of(ref.home) / "code.diff").read_text()
    assert "+print('edited')" in diff


def test_lau_5_an_edit_after_the_submission_changes_nothing(repository: World, tmp_path: Path) -> None:
    ref = repository.submit()
    (repository.project / "train_more.py").write_text("print('too late')\n")
    git(repository.project, "commit", "-qam", "two")
    assert run_the_code_of(ref, tmp_path / "code") == "more"


def test_lau_5_a_module_that_nobody_committed_is_there(repository: World, tmp_path: Path) -> None:
    (repository.project / "helper.py").write_text("word = 'helped'\n")
    (repository.project / "train_more.py").write_text("import helper\nprint(helper.word)\n")
    (repository.project / "data").mkdir()
    (repository.project / "data" / "large.bin").write_bytes(b"x")
    assert run_the_code_of(repository.submit(), tmp_path / "code") == "helped"
    # What git ignores stays behind.
    assert not (tmp_path / "code" / "data").exists()


def test_lau_5_an_altered_bundle_is_refused(repository: World, tmp_path: Path) -> None:
    ref = repository.submit()
    other = make_world(tmp_path / "other")
    (other.project / "train_more.py").write_text("print('another')\n")
    bundle = job_path_of(ref.home) / "code.tar.zst"
    bundle.write_bytes((job_path_of(other.submit().home) / "code.tar.zst").read_bytes())
    with pytest.raises(CheckRefused) as caught:
        run_the_code_of(ref, tmp_path / "code")
    assert "the very code that was submitted" in str(caught.value)


def test_lau_5_the_run_directory_alone_restores_the_code(repository: World, tmp_path: Path) -> None:
    ref = repository.submit()
    moved = tmp_path / "archive"
    Path(ref.home).rename(moved)
    repository.project.rename(tmp_path / "gone")
    plan = read_plan(moved / "job")
    assert plan.code_sha256 is not None
    unpack_code(moved / "job" / "code.tar.zst", tmp_path / "code", plan.code_sha256)
    assert (tmp_path / "code" / "train_more.py").read_text() == "print('more')\n"


def test_lau_5_too_much_code_names_the_largest(repository: World) -> None:
    with (repository.project / "weights.bin").open("wb") as file:
        # 65 MiB of nothing: a file with a hole needs no room.
        file.truncate(65 << 20)
    with pytest.raises(ConfigError) as caught:
        repository.submit()
    assert "the largest files are weights.bin (68.2 MB)" in str(caught.value)
    assert not repository.runs.exists()


# Every pair of a record and an answer. A record without a code is one that has begun and not ended.
CODES: list[int | None] = [None, 0, 1, 2, 75, 76, 137]
ANSWERS = [None, *JobState]


@pytest.mark.parametrize(("code", "state"), list(itertools.product(CODES, ANSWERS)))
def test_lau_6_no_pair_of_record_and_answer_is_misread(
    world: World, code: int | None, state: JobState | None
) -> None:
    ref = world.submit()
    world.backend.end_attempt(world.backend.begin_attempt(ref), code)
    world.backend.answer(ref, None if state is None else SchedulerStatus(state=state, raw="RAW"))
    before = len(world.backend.calls)
    (found,) = world.launcher.status([ref])
    # Only every agent's 0 is a success, and nothing that was stopped.
    assert (found.state is JobState.SUCCEEDED) == (code == 0 and state is not JobState.CANCELLED)
    if state is JobState.CANCELLED:
        assert found.state is JobState.CANCELLED
    # A job of which nothing certain is known is not dead.
    if code is None and state in {None, JobState.UNKNOWN}:
        assert found.state is JobState.UNKNOWN
    # And looking at it has no consequence.
    assert [call.verb for call in world.backend.calls[before:]] == ["poll"]


def test_lau_6_a_failing_query_ends_nothing(world: World) -> None:
    ref = world.submit()
    world.backend.answer(ref, SchedulerStatus(state=JobState.RUNNING, raw="RUNNING"))
    world.backend.begin_attempt(ref)
    world.launcher.status([ref])
    world.backend.is_silent = True
    assert world.launcher.status([ref])[0].state is JobState.RUNNING
    with pytest.raises(StoreError):
        world.launcher.cancel(ref, grace_s=1.0)
    with pytest.raises(StoreError):
        world.launcher.resume(Path(ref.home), world.request())
    # It was asked to stop, and did not hear it; nothing was submitted again.
    assert world.backend.count("submit") == 1


SEALED = """
import sys
from pathlib import Path
from tests.fixtures.scripted_backend import FakeBackend
from strop.launch.build_request import make_plan
from strop.launch.local.backend import LocalBackend
from tests.fixtures.scripted_jobs import World

folder = Path(sys.argv[1])
world = World(folder=folder, backend=FakeBackend(folder / "scheduler"), environ={"HOME": "/"})
request = world.request()
make_plan(request, LocalBackend())

def refuse(event, args):
    if event in {"open", "os.mkdir", "os.rename", "subprocess.Popen"} or event.startswith("socket."):
        raise OSError(30, f"Read-only file system, no network: {event} {args}")
sys.addaudithook(refuse)
sys.stdout.write(make_plan(request, LocalBackend()).plan_hash)
"""


def test_lau_9_a_plan_needs_no_network_and_no_disk(world: World) -> None:
    expected = make_plan(world.request(), LocalBackend()).plan_hash
    done = subprocess.run(
        [sys.executable, "-c", SEALED, str(world.folder)],
        capture_output=True,
        text=True,
        check=False,
        cwd=Path(__file__).parents[2],
    )
    assert done.stdout == expected, done.stderr[-2000:]


def test_lau_9_a_check_asks_and_makes_nothing(world: World) -> None:
    plan = world.launcher.plan(world.request())
    before = sorted(world.folder.rglob("*"))
    world.launcher.check(plan)
    assert [call.verb for call in world.backend.calls] == ["render", "probe"]
    assert sorted(world.folder.rglob("*")) == before


@pytest.mark.parametrize(
    "overrides",
    [("train.stesp=3",), ("job.gpus=65",), ("job.gpus=2", "job.train_gpus=1"), ("job.time_limit=10",)],
)
def test_lau_9_a_bad_config_creates_no_path(world: World, overrides: tuple[str, ...]) -> None:
    before = sorted(world.folder.rglob("*"))
    with pytest.raises(ConfigError):
        world.submit(*overrides)
    assert sorted(world.folder.rglob("*")) == before


def test_lau_9_what_a_backend_cannot_do_creates_no_path(world: World) -> None:
    world.sites("[sites.local]\ngpus_per_node = 1\n")
    with pytest.raises(ConfigError):
        world.submit("job.gpus=2")
    assert not world.runs.exists()


VALUES = {"default": 3, "base": 4, "file": 5, "override": 6, "flag": 7}
SOURCES = [
    one for size in range(5) for one in itertools.combinations(("base", "file", "override", "flag"), size)
]


@pytest.mark.parametrize("given", SOURCES, ids=["+".join(one) or "default" for one in SOURCES])
def test_cfg_2_the_strongest_source_wins_and_every_dropped_value_is_told(
    world: World, given: tuple[str, ...]
) -> None:
    def line(source: str) -> str:
        return f"[job]\nmax_requeue = {VALUES[source]}\n" if source in given else ""

    text = (world.project / "run.toml").read_text()
    (world.project / "base.toml").write_text(text + line("base"))
    (world.project / "run.toml").write_text('extends = "base.toml"\n' + line("file"))
    overrides = [f"job.max_requeue={VALUES['override']}"] if "override" in given else []
    flags = {"job.max_requeue": VALUES["flag"]} if "flag" in given else {}
    request = world.request(*overrides, flags=flags)
    winner = next((one for one in ("flag", "override", "file", "base") if one in given), "default")
    plan = make_plan(request, world.backend)
    # The allocation and the settings are one value.
    assert plan.max_requeue == request.resolved.spec.job.max_requeue == VALUES[winner]
    home = world.launcher.submit(request).ref.home
    resolved = json.loads((job_path_of(home) / "resolved.json").read_text())["job.max_requeue"]
    assert resolved["value"] == VALUES[winner]
    assert (
        resolved["source"].partition(":")[0].rpartition("/")[2]
        == {
            "flag": "--max_requeue",
            "override": "override",
            "file": "run.toml",
            "base": "base.toml",
            "default": "default",
        }[winner]
    )
    # Files may inherit; an override or a flag that drops a value says so.
    below = [
        one for one in ("override", "file" if "file" in given else "base") if one in given and one != winner
    ]
    told = " ".join(plan.conflicts)
    if winner in {"flag", "override"}:
        assert all(f" {VALUES[one]} (" in told for one in below)
    else:
        assert told == ""


def test_cfg_2_flags_for_the_gpus_are_not_mixed_with_those_of_the_file(world: World) -> None:
    with (world.project / "run.toml").open("a") as file:
        file.write("[job]\ntrain_gpus = 4\n")
    plan = make_plan(world.request(flags={"job.train_gpus": 2, "job.infer_gpus": 2}), world.backend)
    assert (dict(plan.roles[0].gpus), plan.resources.gpus_per_node) == ({"infer": 2, "train": 2}, 4)
    assert "using 2 (--train_gpus), ignoring 4" in plan.conflicts[0]


def test_cfg_2_an_explicit_none_survives_to_the_node(world: World) -> None:
    from strop.spec import load_spec

    ref = world.submit("eval.every=none", "job.cpus=none")
    job_path = job_path_of(ref.home)
    assert json.loads((job_path / "resolved.json").read_text())["eval.every"] == {
        "value": None,
        "source": "override",
    }
    assert load_spec(job_path / "spec.toml").spec.eval.every is None


def test_cfg_2_strict_refuses_what_a_flag_beats(world: World) -> None:
    from strop.launch.build_request import SubmitOptions, read_request

    options = SubmitOptions(
        site="local",
        project_path=world.project,
        overrides=("job.nodes=3",),
        flags=(Flag(key="job.nodes", value=2, name="--nodes"),),
        is_strict=True,
    )
    with pytest.raises(ConfigError) as caught:
        read_request(str(world.project / "run.toml"), options, environ=world.environ, now=0.0)
    assert "using 2 (--nodes), ignoring 3 (override)" in str(caught.value)


def holders(folder: Path) -> set[str]:
    """Return the names of the files in which the canary is, raw or packed."""
    from pyarrow import CompressedInputStream, OSFile

    found = set()
    for path in folder.rglob("*"):
        if path.is_file():
            data = path.read_bytes()
            if path.name.endswith(".zst"):
                with OSFile(str(path)) as file, CompressedInputStream(file, "zstd") as stream:
                    data = stream.read()
            if CANARY.encode() in data:
                found.add(path.name)
    return found


@pytest.mark.parametrize("place", [".env", "--env-file", "environment"])
def test_sec_4_a_secret_is_in_one_private_file_until_the_end(repository: World, place: str) -> None:
    env_file = None
    if place == ".env":
        # Neither ignored by git nor committed: it would be packed as code.
        (repository.project / ".env").write_text(f"MY_API_KEY={CANARY}\n")
    elif place == "--env-file":
        env_file = repository.project / "keys.env"
        env_file.write_text(f"MY_API_KEY={CANARY}\n")
    else:
        repository.sites('[sites.local]\nsecrets = ["MY_API_KEY"]\n')
        repository.environ["MY_API_KEY"] = CANARY
    request = repository.request(env_file=env_file)
    ref = repository.launcher.submit(request).ref
    assert holders(repository.runs) == {"secrets.json"}
    assert (job_path_of(ref.home) / "secrets.json").stat().st_mode & 0o777 == 0o600
    plan = repository.plan_of(ref)
    assert CANARY not in repr(plan)
    assert plan.environment.secrets == ("MY_API_KEY",)
    assert not holders(repository.folder / "state")
    assert not holders(repository.folder / "scheduler")
    # Refused by the scheduler, it is nowhere.
    repository.backend.refusal = "no"
    with pytest.raises(CheckRefused):
        repository.launcher.submit(repository.request("name=second", env_file=env_file))
    assert holders(repository.runs / Path(ref.home).name) == {"secrets.json"}
    assert len(list(repository.runs.rglob("secrets.json"))) == 1


@pytest.mark.parametrize("setting", ["model.uri", "store.uri"])
def test_sec_4_a_key_that_was_pasted_into_the_run_is_refused(world: World, setting: str) -> None:
    token = "hf_" + "a1B2" * 8
    with pytest.raises(ConfigError) as caught:
        world.submit(f"{setting}={token}")
    assert token not in str(caught.value)
    assert not world.runs.exists()


def test_sec_4_a_key_that_was_pasted_into_a_profile_is_refused(world: World) -> None:
    token = "hf_" + "a1B2" * 8
    world.sites(f'[sites.lab]\nbackend = "slurm"\nsetup = ["export HF_TOKEN={token}"]\n')
    with pytest.raises(ConfigError) as caught:
        world.request(site="lab")
    assert "looks like a model hub token" in str(caught.value)
    assert token not in str(caught.value)
