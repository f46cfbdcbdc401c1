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

import psutil
import pytest

import strop
from strop.sandbox.ground import python_candidates
from tests.fixtures.sandboxes import IS_ROOT, can_reach

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
        shutil.copytree(Path(psutil.__file__).parent, home / "source" / "psutil")
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
    async with await backend.create(SandboxSpec(user=0)) as sandbox:
        found["root"] = sandbox.isolation.host_uid
    try:
        await backend.create(SandboxSpec(min_level=IsolationLevel.CONTAINER))
    except SandboxError as error:
        found["min_level"] = error.kind
    killed = await backend.create(spec)
    os.kill(killed.supervisor_pid, signal.SIGKILL)
    found["lost"] = await killed.wait_lost()
    await killed.stop()
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
    for path in (tree, *tree.rglob("*")):
        os.chown(path, user.uid, user.uid)
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
    assert reached["disk"] == "enforced"
    # The root of an image is this user, and other programs are not.
    assert answer["root"] == user.uid
    assert user.uid not in answer["users"]
    assert answer["write"] == "x"
    assert answer["others"].endswith("\n1")
    assert "root:" not in answer["others"]
    assert answer["proxy"] == "http://127.0.0.1:3128"
    assert (answer["tell"], answer["tree"]) == ("told\n", "told\n")
    assert answer["min_level"] == "level"
    assert answer["lost"] == "infra"
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
    assert "usermod --add-subuids" in message
    shelf = user.home / "shelf"
    shelf.mkdir()
    for name in ("podman", "cat", "sh", "env", "runc"):
        (shelf / name).symlink_to(str(shutil.which(name, path="/usr/bin:/bin:/usr/sbin:/sbin")))
    kind, message = user.run(_REFUSED, num_ids=0, path=str(shelf))
    assert kind == "newuidmap"
    assert "newuidmap is not installed" in message
    assert "uidmap" in message
