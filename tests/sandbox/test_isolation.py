"""What programs see of the host, and what a sandbox's record says of it."""

from __future__ import annotations

from pathlib import Path

from strop.sandbox import Guard, IsolationLevel, Mount
from strop.sandbox.served import ServedSandbox
from tests.fixtures.sandboxes import in_sandbox, needs_bubblewrap, sandbox_of, where_users_differ


@needs_bubblewrap
def test_only_declared_paths_are_there(tmp_path: Path) -> None:
    (tmp_path / "given").mkdir()
    (tmp_path / "given/file").write_text("seen\n")
    mounts = (Mount(host_path=str(tmp_path / "given"), inside_path="/data"),)

    async def work(sandbox: ServedSandbox) -> None:
        result = await sandbox.exec(
            ["/bin/sh", "-c", "cat /data/file; echo x > /data/file; ls /"], wall_limit_s=60
        )
        prefix_tops = {sandbox.python_argv[0].split("/")[1]}
        seen, *names = result.stdout.decode().split()
        usual = {"bin", "sbin", "lib", "lib32", "lib64", "libx32", "usr", "etc", "proc", "dev", "tmp", "data"}
        assert seen == "seen"
        assert set(names) - usual <= prefix_tops | {"root", "home", "opt"}
        etc = await sandbox.exec(["/bin/ls", "-A", "/etc"], wall_limit_s=60)
        assert set(etc.stdout.decode().split()) <= {"ld.so.cache", "alternatives"}

    in_sandbox("bubblewrap", work, mounts=mounts)
    assert (tmp_path / "given/file").read_text() == "seen\n"


@needs_bubblewrap
def test_a_mount_that_is_declared_writable_is(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out").chmod(0o777)
    mounts = (Mount(host_path=str(tmp_path / "out"), inside_path="/out", read_only=False),)
    in_sandbox(
        "bubblewrap",
        lambda sandbox: sandbox.exec(["/bin/sh", "-c", "echo made > /out/file"], wall_limit_s=60),
        mounts=mounts,
    )
    assert (tmp_path / "out/file").read_text() == "made\n"


@where_users_differ
async def test_what_was_reached_is_recorded(backend: str) -> None:
    async with sandbox_of(backend) as sandbox:
        reached = sandbox.isolation
        assert reached.backend == backend
        assert reached.network == ("host" if backend == "process" else "none")
        assert reached.no_new_privs
        assert reached.caps.startswith("0/")
        assert reached.host_uid != 0
        assert Guard.NONE not in (reached.memory, reached.pids, reached.disk, reached.files)
        if backend == "process":
            assert reached.level is IsolationLevel.RLIMIT
            assert not (reached.pidns)
            assert not (reached.netns)
            assert not (reached.userns)
        else:
            is_container = backend == "podman"
            assert reached.level is (IsolationLevel.CONTAINER if is_container else IsolationLevel.NAMESPACE)
            assert reached.userns is not is_container
            assert reached.pidns
            assert reached.mountns
            assert reached.netns
            assert not reached.nested_userns
            assert reached.host_root_maps_to == ("0" if is_container else "unmapped")
            assert (reached.pids, reached.disk) == (Guard.ENFORCED, Guard.ENFORCED)
