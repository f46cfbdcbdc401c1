"""podman of an ordinary user: what its containers are, and what a host says that does not allow them."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import subprocess
import tarfile
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import strop
from strop.errors import SandboxRefused
from strop.sandbox import rootless
from strop.sandbox.daemon_handle import python_candidates
from strop.sandbox.linux import can_reach
from strop.sandbox.rootless import claim_id, require_ranges
from tests.fixtures.sandboxes import IS_ROOT

needs_rootless_podman = pytest.mark.skipif(
    not IS_ROOT
    or ("STROP_CI" not in os.environ and not all(map(shutil.which, ("podman", "newuidmap", "unshare")))),
    reason="root, to be an ordinary user, and podman and uidmap (as root, run make system-deps)",
)
_NUM_IDS = 8
_numbers = itertools.count()


@dataclass(frozen=True, kw_only=True)
class User:
    """A user of this test alone: its lines are in files that only its own processes see."""

    uid: int
    home: Path
    python: str

    def run(self, code: str, *, path: str = "/usr/bin:/bin", num_ids: int = _NUM_IDS) -> Any:
        """Run Python as this user; return what it prints as JSON."""
        ids = f"strop-test:{self.uid << 3}:{num_ids}\n" if num_ids else ""
        passwd = (
            Path("/etc/passwd").read_text() + f"strop-test:x:{self.uid}:{self.uid}::{self.home}:/bin/sh\n"
        )
        steps = []
        for name, text in (("passwd", passwd), ("subuid", ids), ("subgid", ids)):
            (self.home / name).write_text(text)
            steps.append(f"touch /etc/{name} && mount --bind {self.home / name} /etc/{name}")
        words = ["setpriv", "--reuid", str(self.uid), "--regid", str(self.uid), "--clear-groups", "env", "-i"]
        words += [f"HOME={self.home}", f"PATH={path}", f"XDG_RUNTIME_DIR={self.home}", "PYTHONPATH=source"]
        script = " && ".join([*steps, 'cd "$0"', 'exec "$@"'])
        argv = [
            "unshare",
            "--mount",
            "/bin/sh",
            "-c",
            script,
            str(self.home),
            *words,
            self.python,
            "-B",
            "-c",
        ]
        done = subprocess.run([*argv, code], check=False, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)


@pytest.fixture
def user() -> Iterator[User]:
    python = next(filter(can_reach, python_candidates()))
    # Beyond all users of this host; process ids are below 2**22. One for each test: podman keeps what it
    # has seen of a user's ids.
    uid = (1 << 26) + (os.getpid() << 2) + next(_numbers)
    with tempfile.TemporaryDirectory(prefix="strop-test-") as name:
        home = Path(name)
        source = Path(strop.__file__).parent
        shutil.copytree(source, home / "source" / "strop", ignore=shutil.ignore_patterns("__pycache__"))
        os.chown(home, uid, uid)
        made = User(uid=uid, home=home, python=python)
        try:
            yield made
        finally:
            # What holds podman's namespaces, and files of its other users.
            made.run(_END)


_END = """
import json, subprocess
subprocess.run(["podman", "unshare", "rm", "-rf", ".local"], check=False, capture_output=True)
subprocess.run(["podman", "system", "migrate"], check=False, capture_output=True)
subprocess.run(["rm", "-rf", ".local", ".config", ".cache"], check=False)
print(json.dumps(None))
"""
_WORK = """
import asyncio, dataclasses, json, os, signal, subprocess
from strop.errors import SandboxError
from strop.sandbox import IsolationLevel, Limits, SandboxSpec, make_backend
from strop.sandbox.family import parent_of
from strop.sandbox.janitor import clear_abandoned
found = {}
async def main():
    backend = make_backend("podman")
    spec = SandboxSpec(network="allow:127.0.0.1:9", limits=Limits(max_processes=20))
    async with await backend.create(spec) as sandbox:
        async def say(script):
            done = await sandbox.exec(["/bin/sh", "-c", script], wall_limit_s=60)
            return done.stdout.decode().strip()
        found["isolation"] = dataclasses.asdict(sandbox.isolation)
        found["write"] = await say("echo x > /tmp/a; mkdir /tmp/d; rm -r /tmp/d; mkdir /tmp/d; cat /tmp/a")
        found["others"] = await say("cat /etc/shadow 2>&1; ls HOME 2>&1; touch /usr/x /x; echo $?".replace(
            "HOME", os.environ["HOME"]))
        found["many"] = await say("for i in $(seq 50); do sleep 5 & done 2>&1")
        found["proxy"] = await say("echo $http_proxy")
    async with await backend.create(spec) as first, await backend.create(spec) as second:
        found["users"] = [first.isolation.host_uid, second.isolation.host_uid]
    for image in ("localhost/tell", os.path.abspath("tree")):
        async with await backend.create(SandboxSpec(image=image, has_workspace=True)) as sandbox:
            done = await sandbox.exec(["/bin/tell"], wall_limit_s=60)
            found[image.rpartition("/")[2]] = done.stdout.decode()
            await sandbox.write("/workspace/x", b"x")
    for wish in ({"user": 0}, {"min_level": IsolationLevel.CONTAINER}):
        try:
            await backend.create(SandboxSpec(**wish))
        except SandboxError as error:
            found[next(iter(wish))] = error.kind
    killed = await backend.create(spec)
    os.kill(killed.supervisor_pid, signal.SIGKILL)
    found["lost"] = await killed.wait_lost()
    # Its daemon too.
    killed = await backend.create(spec)
    pids = (parent_of(killed.supervisor_pid), killed.supervisor_pid)
    for number in (signal.SIGSTOP, signal.SIGKILL):
        for pid in pids:
            os.kill(pid, number)
    await killed.wait_lost()
    for _ in range(50):
        if cleared := clear_abandoned():
            break
        await asyncio.sleep(0.1)
    found["cleared"] = [line.partition(" ")[0] for line in cleared]
asyncio.run(main())
names = ["podman", "ps", "--all", "--format", "{{.Names}}"]
found["containers"] = subprocess.run(names, capture_output=True, text=True).stdout
print(json.dumps(found))
"""


@pytest.mark.slow
@needs_rootless_podman
def test_containers_of_an_ordinary_user(user: User) -> None:
    tree = user.home / "tree"
    (tree / "bin").mkdir(parents=True)
    source = 'int puts(const char *);\nint main(void) { puts("told"); return 0; }\n'
    words = ["cc", "-static", "-x", "c", "-", "-o", str(tree / "bin" / "tell")]
    subprocess.run(words, input=source, text=True, check=True)
    with tarfile.open(user.home / "tree.tar", "w") as file:
        file.add(tree, arcname=".")
    imported = ["podman", "import", "--quiet", "tree.tar", "localhost/tell"]
    user.run(
        f"import json, subprocess; subprocess.run({imported}, check=True, capture_output=True); print(0)"
    )
    answer = user.run(_WORK)
    reached = answer["isolation"]
    assert {name: reached[name] for name in ("level", "userns", "netns", "seccomp", "caps")} == {
        "level": 2,
        "userns": True,
        "netns": True,
        "seccomp": True,
        "caps": "0/0",
    }
    assert reached["host_root_maps_to"] == "unmapped"
    assert reached["network"] == "allow:127.0.0.1:9"
    # What it refuses it says before it is asked.
    assert reached["lacks"] == ["users"]
    assert (reached["disk"], reached["pids"]) == ("enforced", "enforced")
    # Not this user, and nobody's user twice.
    assert user.uid not in answer["users"]
    assert len(set(answer["users"])) == 2
    assert answer["write"] == "x"
    assert answer["others"].endswith("\n1")
    assert "root:" not in answer["others"]
    assert "fork" in answer["many"]
    assert answer["proxy"] == "http://127.0.0.1:3128"
    assert (answer["tell"], answer["tree"]) == ("told\n", "told\n")
    assert (answer["user"], answer["min_level"]) == ("user", "level")
    assert answer["lost"] == "infra"
    assert {"container", "directory"} <= set(answer["cleared"])
    assert answer["containers"] == ""


_REFUSED = """
import asyncio, json
from strop.errors import SandboxRefused
from strop.sandbox import SandboxSpec, make_backend
try:
    asyncio.run(make_backend("podman").create(SandboxSpec()))
    print(0)
except SandboxRefused as refusal:
    print(json.dumps([refusal.kind, str(refusal)]))
"""


@pytest.mark.slow
@needs_rootless_podman
def test_a_user_without_ids_is_told_what_is_missing(user: User) -> None:
    kind, message = user.run(_REFUSED, num_ids=0)
    assert kind == "subuid"
    assert "/etc/subuid gives user strop-test no ids" in message
    assert "usermod --add-subuids" in message
    shelf = user.home / "shelf"
    shelf.mkdir()
    for name in ("podman", "cat", "sh", "env", "runc"):
        (shelf / name).symlink_to(str(shutil.which(name, path="/usr/bin:/bin:/usr/sbin:/sbin")))
    kind, message = user.run(_REFUSED, num_ids=0, path=str(shelf))
    assert kind == "newuidmap"
    assert "newuidmap is not installed" in message
    assert "uidmap" in message


def test_a_podman_that_fails_otherwise_is_told_in_its_own_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "podman"
    program.write_text("#!/bin/sh\necho 'cannot clone: no user namespaces here' >&2\nexit 125\n")
    program.chmod(0o755)
    for name in ("newuidmap", "newgidmap"):
        (tmp_path / name).symlink_to("/bin/true")
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setattr(rootless, "read_or_empty", lambda path: f"{os.geteuid()}:100000:65536\n")
    with pytest.raises(SandboxRefused, match="cannot clone: no user namespaces here") as caught:
        require_ranges(str(program), os.environ)
    assert caught.value.kind == "podman"
    # One id, from before there were more.
    program.write_text("#!/bin/sh\necho '0 1000 1'\n")
    with pytest.raises(SandboxRefused, match=r"has one id, though there are more.*podman system migrate"):
        require_ranges(str(program), os.environ)
    program.write_text("#!/bin/sh\necho '0 1000 1'; echo '1 100000 65536'\n")
    require_ranges(str(program), os.environ)


def test_no_two_sandboxes_have_the_same_id(monkeypatch: pytest.MonkeyPatch) -> None:
    first = 0x10000000 + os.getpid() * 4
    monkeypatch.setattr(rootless, "read_file", lambda _: f"0 1000 1\n1 {first} 2\n")
    claims = [claim_id(number) for number in (5, 5)]
    assert {(inside, outside) for inside, outside, _ in claims} == {(1, first), (2, first + 1)}
    with pytest.raises(OSError, match="all 2 ids of this user are taken"):
        claim_id(0)
    for _, _, claim in claims:
        claim.close()
