"""Incidents of configuration, plans, launchers and starts of runs."""

from __future__ import annotations

import itertools
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from strop.errors import CheckRefused, ConfigError
from strop.launch.contract import JobState, SchedulerStatus
from strop.launch.job_dir import job_path_of
from strop.plan.planning import make_plan
from strop.record import RunDir
from strop.run.training import train_here
from strop.spec import OptimizerSpec, all_keys, load_spec
from strop.spec.schema import find_settings
from strop.tasks import build_task
from tests.fixtures.scripted_jobs import World, world
from tests.fixtures.tiny_run import Notes

__all__ = ["world"]

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "strop"
SMALL = 'name = "x"\n[task]\nname = "arithmetic"\n'


def refusal(path: Path, *overrides: str) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        load_spec(path, overrides)
    return caught.value


def test_cfg_2_contradicting_overrides_are_refused_and_equal_ones_are_fine(tmp_path: Path) -> None:
    """Incident: of two conflicting overrides one was dropped silently."""
    path = tmp_path / "run.toml"
    path.write_text(SMALL)
    error = refusal(path, "train.steps=3", "seed=1", "train.steps=4")
    assert "override train.steps=3 and override train.steps=4 contradict each other" in str(error)
    # 1 and true are equal in Python and not in a run file.
    assert "contradict" in str(refusal(path, "train.steps=1", "train.steps=true"))
    assert load_spec(path, ["train.steps=3", "train={steps = 3}"]).spec.train.steps == 3
    # NaN does not equal itself in Python, and is refused for what it is.
    assert "contradict" not in str(refusal(path, "optimizer.lr=nan", "optimizer.lr=nan"))


def test_cfg_3_every_public_setting_has_a_reader() -> None:
    """Incident: settings that were parsed, documented, and read by nothing."""
    files = [path for path in PACKAGE.rglob("*.py") if path.parent.name != "spec" or path.name == "layout.py"]
    read = set(re.findall(r"\.(\w+)", "".join(path.read_text() for path in files)))
    assert {key for key in all_keys() if key.rpartition(".")[2] not in read} == set()


CANARY = "Zq7Zq7Zq7Zq7Zq7Zq7Zq7Zq7"


@pytest.mark.parametrize(
    ("override", "form"),
    [
        (f"model.uri=hf_{CANARY}", "a model hub token"),
        ("model.uri=AKIA" + "Q7" * 8, "an AWS access key"),
        (f"name=sk-{CANARY}", "an API key"),
        (f"task.source=https://ada:{CANARY}@example.org/data", "a password in an address"),
        (f"task.config.api_key={CANARY}", "a credential by its name"),
        (f"task.config.list=[{{x = 'ghp_{CANARY}'}}]", "a GitHub token"),
        (f"hf_{CANARY}=1", "a model hub token"),
        (f"unknown.key=glpat-{CANARY}", "a GitLab token"),
    ],
)
def test_sec_4_a_credential_in_a_run_file_is_refused_and_not_repeated(
    tmp_path: Path, override: str, form: str
) -> None:
    """Incident: tokens in saved configurations and arguments."""
    path = tmp_path / "run.toml"
    path.write_text(SMALL)
    assert f"override holds {form}" in str(refusal(path, override))
    assert CANARY not in str(refusal(path, override))
    assert "Q7Q7" not in str(refusal(path, override))


RUN_FILE = """
name = "{name}"
[model]
uri = "{model}"
[task]
name = "arithmetic"
max_value = 5
max_reply_tokens = 8
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
ROW = {"messages": [{"role": "user", "content": "1 + 1"}, {"role": "assistant", "content": "2"}]}


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
def recorded(paid_letters: None, tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> RunDir:
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


SOURCE = Path(__file__).parents[2] / "src"
# Every write and every socket is refused, as on a read-only disk without a network.
SEALED = """
import os, sys
sys.dont_write_bytecode = True
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
def refuse(event, args):
    if event == "open" and args[2] & WRITES and args[0] != os.devnull:
        raise OSError(30, "Read-only file system", args[0])
    if event in {"os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.link", "os.symlink", "os.truncate"}:
        raise OSError(30, "Read-only file system", str(args[0]))
    if event.startswith("socket.") and event != "socket.gethostname":
        raise OSError(101, f"Network is unreachable: {event}")
sys.addaudithook(refuse)
PROBE
from strop.cli import main
sys.exit(main())
"""


def plan_sealed(folder: Path, *words: str, probe: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", SEALED.replace("PROBE", probe), "plan", *words],
        cwd=folder,
        env={"PATH": "", "HOME": str(folder), "PYTHONPATH": ":".join(filter(None, sys.path))},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def write_run(folder: Path, model_dir: Path) -> None:
    (folder / "run.toml").write_text(
        f'name = "x"\n[model]\nuri = "{model_dir}"\n[task]\nname = "arithmetic"\nmax_reply_tokens = 16\n'
    )


def test_lau_9_a_plan_touches_no_disk_and_no_network(tmp_path: Path, tiny_model_dir: Path) -> None:
    """Incident: dry runs uploaded code, made buckets, queried schedulers or deleted their own folder."""
    write_run(tmp_path, tiny_model_dir)
    before = sorted([*tmp_path.rglob("*"), *tiny_model_dir.rglob("*")])
    ended = plan_sealed(tmp_path, "run.toml", "--json")
    assert ended.returncode == 0, ended.stderr
    planned = json.loads(ended.stdout)
    assert planned["unknown"] == []
    assert planned["prompt"]["text"].startswith("<|start|>user\nWhat is ")
    assert planned["time"]["total_s"] > 0
    # A model and data on a hub are named as unknown, not fetched.
    for words in (["model.uri=org/absent"], ["task.name=gsm8k"]):
        ended = plan_sealed(tmp_path, "run.toml", "--json", *words)
        assert ended.returncode == 0, ended.stderr
        assert len(json.loads(ended.stdout)["unknown"]) == 1
    assert sorted([*tmp_path.rglob("*"), *tiny_model_dir.rglob("*")]) == before


def test_smp_2_one_effective_limit_with_its_origin(tmp_path: Path, tiny_model_dir: Path) -> None:
    """Incident: loader constants overrode token budgets in 19 configs, and nobody saw it."""
    write_run(tmp_path, tiny_model_dir)

    def limit(*overrides: str) -> tuple[object, str]:
        planned = make_plan(load_spec(tmp_path / "run.toml", overrides), cache_dir=tmp_path)
        (value,) = (value for value in planned.limits if value.name == "task.max_reply_tokens")
        return value.value, value.origin

    assert limit() == (16, f"{tmp_path}/run.toml:6")
    assert limit("task.max_reply_tokens=4") == (4, "override")
    own = build_task(load_spec(tmp_path / "run.toml", ["task.max_reply_tokens=none"]).spec.task).limits
    assert limit("task.max_reply_tokens=none") == (own.max_reply_tokens, "the limit of task arithmetic")
    # A clamp would be silent.
    assert own.max_reply_tokens < 90
    assert limit("task.max_reply_tokens=90") == (90, "override")


def test_opt_3_a_plan_shows_the_normalizer_and_every_optimizer_value(
    tmp_path: Path, tiny_model_dir: Path
) -> None:
    """Incident: an unseen constant weakened gradients five times; 141 configs inherited values unseen."""
    write_run(tmp_path, tiny_model_dir)
    planned = make_plan(load_spec(tmp_path / "run.toml", ["optimizer.lr=3e-6"]), cache_dir=tmp_path)
    values = {value.name: value for value in planned.optimizer}
    of_spec = {f"optimizer.{name}" for name in OptimizerSpec.model_fields}
    assert set(values) == {*of_spec, "lr of the last optimizer step"}
    assert (values["optimizer.lr"].value, values["optimizer.lr"].origin) == (3e-6, "override")
    assert values["optimizer.beta2"].origin == "default"
    algorithm = {value.name: value for value in planned.algorithm}
    assert algorithm["weight of a token"].value == "1 / (64 rollouts x scored tokens of the rollout)"
    assert (algorithm["algorithm.clip_high"].value, algorithm["algorithm.clip_high"].origin) == (
        0.2,
        "grpo's own",
    )


PROGRAM = re.compile(r"""-m["',\s]+(strop(?:\.\w+)+)""")


def is_program(place: Path) -> bool:
    script = place.with_suffix(".py")
    return (place / "__main__.py").is_file() or (script.is_file() and '"__main__"' in script.read_text())


def test_cfg_4_no_launcher_starts_a_program_that_is_gone() -> None:
    """Incident: launchers named deleted scripts; tests stayed green, as the launcher was mocked."""
    named = {
        name
        for path in SOURCE.rglob("*")
        if path.suffix in (".py", ".j2", ".toml")
        for name in PROGRAM.findall(path.read_text())
    }
    assert len(named) >= 9
    assert {name for name in named if not is_program(SOURCE / name.replace(".", "/"))} == set()


SECRET = "canary-9d1e-secret-value"


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


def test_lau_9_a_check_asks_and_makes_nothing(world: World) -> None:
    plan = world.launcher.plan(world.request())
    before = sorted(world.folder.rglob("*"))
    world.launcher.check(plan)
    assert [call.verb for call in world.backend.calls] == ["render", "probe"]
    assert sorted(world.folder.rglob("*")) == before


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
            if SECRET.encode() in data:
                found.add(path.name)
    return found


@pytest.mark.parametrize("place", [".env", "--env-file", "environment"])
def test_sec_4_a_secret_is_in_one_private_file_until_the_end(repository: World, place: str) -> None:
    env_file = None
    if place == ".env":
        # Neither ignored by git nor committed: it would be packed as code.
        (repository.project / ".env").write_text(f"MY_API_KEY={SECRET}\n")
    elif place == "--env-file":
        env_file = repository.project / "keys.env"
        env_file.write_text(f"MY_API_KEY={SECRET}\n")
    else:
        repository.sites('[sites.local]\nsecrets = ["MY_API_KEY"]\n')
        repository.environ["MY_API_KEY"] = SECRET
    request = repository.request(env_file=env_file)
    ref = repository.launcher.submit(request).ref
    assert holders(repository.runs) == {"secrets.json"}
    assert (job_path_of(ref.home) / "secrets.json").stat().st_mode & 0o777 == 0o600
    plan = repository.plan_of(ref)
    assert SECRET not in repr(plan)
    assert plan.environment.secrets == ("MY_API_KEY",)
    assert not holders(repository.folder / "state")
    assert not holders(repository.folder / "scheduler")
    # Refused by the scheduler, it is nowhere.
    repository.backend.refusal = "no"
    with pytest.raises(CheckRefused):
        repository.launcher.submit(repository.request("name=second", env_file=env_file))
    assert holders(repository.runs / Path(ref.home).name) == {"secrets.json"}
    assert len(list(repository.runs.rglob("secrets.json"))) == 1
