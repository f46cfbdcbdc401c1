"""Ray itself: started as told, with every byte of the environment, naming every death, leaving nothing."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from strop.cluster.ray.deaths import DeathWatch
from strop.cluster.ray.node import OBJECT_STORE_BYTES
from strop.cluster.ray.roles import RayRole, RoleFacts, RoleStart, RunningRole
from strop.cluster.ray.runtime import RayHead
from strop.errors import CheckRefused, EngineError
from strop.hardware.ports import LOOPBACK
from strop.spec.layout import RoleKind, RoleSlot
from strop.store import ModelHandle
from tests.fixtures.ray_traces import descendants, files_of_nodes, is_alive, needs_ray

pytestmark = [pytest.mark.slow, needs_ray]

TOKEN_NAME = "ray.token"
RAYS_USUAL = Path("/tmp/ray")
NO_MODEL = ModelHandle(path=Path("unused"), digest="")
SECRET = "a,b 'c' \"d\"\nnew\\n$HOME"


def launcher_of(head: RayHead) -> int:
    assert head._launcher is not None
    return head._launcher.pid


class EchoRole(RayRole):
    """A role without a model."""

    computes = False

    def begin(self, source: ModelHandle = NO_MODEL, beside: RoleFacts | None = None) -> RoleFacts:
        facts = super().begin(source, beside)
        sys.stdout.write("the last words of this role\n")
        sys.stdout.flush()
        return facts

    def read(self, name: str) -> str | None:
        return os.environ.get(name)

    def refuse(self) -> None:
        raise EngineError("refused by the role")


@dataclass
class Scene:
    """A head that runs, and what it was started with."""

    head: RayHead
    work_dir: Path
    loop: asyncio.AbstractEventLoop
    usual_before: set[Path]
    """What other Ray clusters of this machine had left in Ray's usual directory."""

    def start_role(self, index: int) -> RunningRole:
        """Make an actor of a role."""
        import ray

        slot = RoleSlot(kind=RoleKind.WORKER, index=index, node=0)
        path = self.work_dir / f"{slot.name}.log"
        make = ray.remote(concurrency_groups={"watch": 1})
        start = RoleStart(slot=slot, log_path=path)
        return RunningRole(start=start, actor=make(EchoRole).options(num_cpus=0).remote(start))


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    """One runtime for all tests here; the job's secret is in the environment that it starts with."""
    work_dir = tmp_path_factory.mktemp("ray")
    loop = asyncio.new_event_loop()
    before = files_of_nodes()
    usual_before = set(RAYS_USUAL.glob("*"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JOB_SECRET", SECRET)
        # As in the process of a node that joins a run.
        patch.delenv("GOMP_SPINCOUNT", raising=False)
        __import__("ray")  # As a task's own module may.
        head = RayHead(work_dir, 1, work_dir / TOKEN_NAME)
        loop.run_until_complete(head.start())
        launcher = launcher_of(head)
        handler = signal.getsignal(signal.SIGTERM)
        yield Scene(head, work_dir, loop, usual_before)
        mine = descendants(launcher) | {launcher}
        assert len(mine) > 4
        loop.run_until_complete(head.stop())
        loop.run_until_complete(head.stop())
    # Nothing is left the moment that `stop` returns: no process, no file, no token.
    assert not [pid for pid in mine if is_alive(pid)]
    assert files_of_nodes() <= before
    assert not (work_dir / TOKEN_NAME).exists()
    assert signal.getsignal(signal.SIGTERM) == handler
    assert "RAY_AUTH_MODE" not in os.environ
    assert (work_dir / "ray-0" / "raylet.out").stat().st_size > 0
    loop.close()


def test_everything_is_as_it_was_set(scene: Scene) -> None:
    import ray

    assert list(scene.head.temp_dir.glob("session_2*/sockets/raylet"))
    assert ray.cluster_resources()["object_store_memory"] == OBJECT_STORE_BYTES
    assert set(RAYS_USUAL.glob("*")) == scene.usual_before
    assert oct((scene.work_dir / TOKEN_NAME).stat().st_mode & 0o777) == "0o600"
    (node,) = scene.loop.run_until_complete(scene.head.await_nodes(60.0))
    assert node["NodeName"].startswith("0@")


def test_sec_3_ray_listens_on_loopback_alone_and_wants_the_token(scene: Scene) -> None:
    mine = descendants(launcher_of(scene.head))
    sockets = [entry for entry in psutil.net_connections(kind="tcp") if entry.pid in mine]
    listening = [entry.laddr for entry in sockets if entry.status == psutil.CONN_LISTEN]
    assert len(listening) >= 3
    assert {address.ip.removeprefix("::ffff:") for address in listening} == {LOOPBACK}
    # Of its dashboard, nothing: Ray's own default would be port 8265.
    assert 8265 not in {address.port for address in listening}
    code = (
        "import os, sys; os.environ['RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER'] = '0'\n"
        "from ray._raylet import GcsClient\n"
        "client = GcsClient(address=sys.argv[1], cluster_id=sys.argv[2])\n"
        "print(client.internal_kv_keys(b'', None, timeout=60))"
    )
    import ray

    context = ray.get_runtime_context()
    asked = [sys.executable, "-c", code, str(context.gcs_address), "00" * 28]
    bare = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    found = subprocess.run(asked, env=bare, capture_output=True, text=True, timeout=300, check=False)
    assert found.returncode != 0
    assert "InvalidAuthToken" in found.stderr, found.stderr


def test_nodes_that_do_not_join_are_named(scene: Scene) -> None:
    scene.head._num_nodes = 3
    try:
        with pytest.raises(CheckRefused, match=r"node 1, 2 did .*all 3 nodes"):
            scene.loop.run_until_complete(scene.head.await_nodes(0.2))
    finally:
        scene.head._num_nodes = 1


def test_lau_4_a_role_has_the_runs_environment_to_the_byte(scene: Scene) -> None:
    launcher = launcher_of(scene.head)

    async def act() -> None:
        role = scene.start_role(0).actor
        await role.begin.remote()
        assert await role.read.remote("JOB_SECRET") == SECRET
        # Waiting threads spin for a bounded time.
        assert 0 < int(await role.read.remote("GOMP_SPINCOUNT")) < 300_000
        niceness = os.getpriority(os.PRIO_PROCESS, 0)
        assert {os.getpriority(os.PRIO_PROCESS, pid) for pid in descendants(launcher)} == {niceness}
        with pytest.raises(EngineError, match="refused by the role"):
            await DeathWatch().guard(role.refuse.remote())

    scene.loop.run_until_complete(act())
    # Neither value nor name of a secret is in a command line.
    for pid in descendants(launcher):
        # One may end meanwhile.
        with suppress(OSError):
            assert SECRET.encode() not in Path(f"/proc/{pid}/cmdline").read_bytes()


def test_a_full_object_store_goes_on_from_disk(scene: Scene) -> None:
    """Ray writes what does not fit into shared memory below its own directory."""
    import numpy as np
    import ray

    parts = [ray.put(np.full(OBJECT_STORE_BYTES // 2, number, np.uint8)) for number in range(3)]
    assert [int(ray.get(part)[-1]) for part in parts] == [0, 1, 2]
