"""Importing strop costs nothing and touches nothing. Every check runs in a fresh process."""

from __future__ import annotations

import importlib
import importlib.util
import json
import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest

import strop

HEAVY = ("torch", "transformers", "pyarrow", "duckdb", "fastapi", "uvicorn", "reasoning_gym")

# Reports, after its imports: writes, network calls and child processes that an audit hook saw,
# and the heavy modules that are loaded now.
PROBE = """
import sys
seen = []
def watch(event, args):
    if event == "open" and isinstance(args[1], str) and set(args[1]) & set("wax+"):
        seen.append(f"write {args[0]}")
    elif event.startswith(("socket.", "subprocess.", "os.mkdir", "os.rename", "os.remove", "os.fork")):
        seen.append(event)
sys.dont_write_bytecode = True
sys.addaudithook(watch)
import MODULE
loaded = [name for name in HEAVY if name in sys.modules]
assert not seen, f"importing touched: {seen}"
assert not loaded, f"importing loaded: {loaded}"
"""


def run_fresh(*words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *words], cwd=cwd, capture_output=True, text=True, timeout=300, check=False
    )


def light_modules() -> list[str]:
    rooms = [f"strop.{module.name}" for module in pkgutil.iter_modules(strop.__path__)]
    return ["strop", *rooms]


@pytest.mark.parametrize("module", light_modules())
def test_importing_a_room_loads_nothing_heavy_and_touches_nothing(module: str, tmp_path: Path) -> None:
    code = PROBE.replace("MODULE", module).replace("HEAVY", repr(HEAVY))
    ended = run_fresh("-c", code, cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout == ""
    assert ended.stderr == ""
    assert list(tmp_path.iterdir()) == []


def test_a_role_that_trains_nothing_hears_signals_without_torch(tmp_path: Path) -> None:
    code = "import sys, strop.train.watch.process; sys.exit('torch' in sys.modules)"
    assert run_fresh("-c", code, cwd=tmp_path).returncode == 0


def test_the_probe_sees_a_write_and_a_heavy_module(tmp_path: Path) -> None:
    code = PROBE.replace("HEAVY", repr((*HEAVY, "json"))).replace(
        "import MODULE", "import json; open('a', 'w')"
    )
    ended = run_fresh("-c", code, cwd=tmp_path)
    assert "importing touched: ['write a']" in ended.stderr


# `-X importtime` lists every module that a command loads, on standard error.
@pytest.mark.skipif(importlib.util.find_spec("strop.cli") is None, reason="the command line is not built yet")
@pytest.mark.parametrize("words", [("--help",), ("explain", "--help"), ("plan", "--help")])
def test_a_light_command_never_loads_torch(words: tuple[str, ...], tmp_path: Path) -> None:
    code = "import sys; from strop.cli import main; sys.exit(main())"
    ended = run_fresh("-X", "importtime", "-c", code, *words, cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr[-2000:]
    loaded = {line.rpartition("|")[2].strip() for line in ended.stderr.splitlines()}
    assert "strop.cli" in loaded
    assert not loaded & {"torch", "transformers"}
    assert list(tmp_path.iterdir()) == []


# What takes a tenth of a second or more together, and a plan of arithmetic on Slurm has no use for.
NEEDLESS_FOR_A_PLAN = {
    "torch", "transformers", "ray", "vllm", "pyarrow", "huggingface_hub", "asyncio", "http.client", "ssl",
    "multiprocessing", "fastapi", "httpx",
    "strop.evaluate", "strop.tasks.judge_model", "strop.tasks.judging", "strop.tasks.code",
    "strop.tasks.mathematics", "strop.tasks.instructions", "strop.tasks.mixture",
    "strop.launch.sagemaker.backend", "strop.view.report",
}  # fmt: skip
NEEDLESS_FOR_A_LIST = NEEDLESS_FOR_A_PLAN | {"numpy", "jinja2", "tokenizers", "strop.tasks"}


@pytest.mark.parametrize(
    ("words", "needless"),
    [
        (("plan", "RECIPE", "--on", "slurm"), NEEDLESS_FOR_A_PLAN),
        # It counts the held-out examples, as the run will.
        (("submit", "RECIPE", "--on", "slurm", "--dry-run", "--no-snapshot"), NEEDLESS_FOR_A_PLAN),
        (("ls",), NEEDLESS_FOR_A_LIST),
        (("status",), NEEDLESS_FOR_A_LIST),
    ],
)
def test_a_command_that_people_wait_for_loads_nothing_that_it_has_no_use_for(
    words: tuple[str, ...], needless: set[str], tiny_model_dir: Path, tmp_path: Path
) -> None:
    (tmp_path / "run.toml").write_text(
        f'name = "light"\n[model]\nuri = {json.dumps(str(tiny_model_dir))}\n[task]\nname = "arithmetic"\n'
    )
    (tmp_path / "runs").mkdir()
    code = "import sys; from strop.cli import main; sys.exit(main())"
    given = [word.replace("RECIPE", "run.toml") for word in words]
    ended = run_fresh("-X", "importtime", "-c", code, *given, cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr[-2000:]
    loaded = {line.rpartition("|")[2].strip() for line in ended.stderr.splitlines()}
    assert "strop.cli" in loaded
    assert sorted(loaded & needless) == []


def test_the_version_is_the_packages_own() -> None:
    pyproject = Path(__file__).parents[1] / "pyproject.toml"
    assert f'\nversion = "{strop.__version__}"\n' in pyproject.read_text(encoding="utf-8")


def test_the_agent_of_a_node_needs_little(tmp_path: Path) -> None:
    """It is process 1 of images that hold no numbers and no models: all of them have what it imports."""
    code = "import sys, strop.launch.node.agent, strop.launch.node.__main__; print(*sys.modules)"
    ended = run_fresh("-c", code, cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr
    foreign = {name.partition(".")[0] for name in ended.stdout.split()} - set(sys.stdlib_module_names)
    known = {"strop", "pydantic", "pydantic_core", "annotated_types"}
    known |= {"typing_extensions", "typing_inspection"}
    assert {name for name in foreign if not name.startswith("_")} <= known


@pytest.mark.parametrize("name", [room.name for room in pkgutil.iter_modules(strop.__path__)])
def test_a_room_has_every_name_that_it_promises(name: str) -> None:
    room = importlib.import_module(f"strop.{name}")
    assert [one for one in getattr(room, "__all__", ()) if not hasattr(room, one)] == []
