"""Every attack of the list on every backend: what its record promises is what holds."""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from strop.sandbox import IsolationLevel, SandboxSpec, agent
from strop.sandbox.allowlist import AllowList
from strop.sandbox.ground import leave_ground
from tests.fixtures.attack_ground import (
    SMALL,
    Ground,
    Stage,
    attack_ground,
    find_leftovers,
    is_other_user,
)
from tests.fixtures.attacks import ATTACKS, LIMITS, MARK, OPEN, PAGE, Finding, Outcome, render
from tests.fixtures.sandboxes import DOCKER, IS_ROOT, PODMAN, needs_bubblewrap, where_users_differ


@pytest.fixture(
    scope="module",
    params=[
        "process",
        pytest.param("bubblewrap", marks=needs_bubblewrap),
        PODMAN,
        DOCKER,
    ],
)
def ground(request: pytest.FixtureRequest) -> Iterator[Ground]:
    if request.param == "docker":
        # It must not live in the network of the attacks.
        request.getfixturevalue("docker_daemon")
    with attack_ground(request.param) as made:
        yield made


async def run(ground: Ground, name: str) -> tuple[Finding, Outcome]:
    """Attack a fresh sandbox, then look for disturbances and leftovers; return also what may be."""
    attack, since = ATTACKS[name], time.time()
    has_list = "list" in attack.given
    network = ground.bait.network if has_list else "none"
    spec = SandboxSpec(limits=LIMITS.get(name, SMALL), network=network, min_level=IsolationLevel.NONE)
    expected = attack.expected(ground.control.sandbox.isolation)
    if has_list and expected is OPEN:
        pytest.skip("its programs have the host's network, and it refuses a list")
    async with asyncio.timeout(120):
        async with await ground.backend.create(spec) as sandbox:
            reached = sandbox.isolation
            if not (attack.given.get("spares", True) or reached.pidns or is_other_user(reached)):
                pytest.skip("it would reach all of this user's processes")
            # What waits for the first command is not of the attack.
            await sandbox.exec(["/bin/true"], wall_limit_s=60)
            stage = Stage(ground, sandbox)
            finding = await attack.make(stage)
        assert await find_leftovers(stage, since) == []
        assert ground.bait.changes() == []
        assert await ground.control.disturbances() == []
    return finding, expected


@pytest.mark.parametrize("name", ATTACKS)
def test_an_attack_takes_no_more_than_the_record_says(ground: Ground, name: str) -> None:
    (outcome, what), expected = ground.runner.run(run(ground, name))
    assert outcome <= expected, what
    # What nothing stops shows that the attack works.
    assert (outcome is OPEN) == (expected is OPEN), what


WEAK = """
_Place.lower = lambda self, joins_groups=True: self.user is None or _become_user(*self.user)
"""


@where_users_differ
def test_an_attack_sees_what_is_open(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sandboxes without their last defences; what remains of them is not relied upon here."""
    leave_ground()
    source = Path(agent.__file__).read_text().replace("def main() -> None:", WEAK + "\n\ndef main() -> None:")
    names = ["kernel-calls", "keyrings"]
    if backend == "process" and IS_ROOT:
        names += ["set-uid-program", "capable-program"]
    if backend == "bubblewrap":
        names += ["list-other-port", "list-rebound-name"]
        monkeypatch.setattr(AllowList, "has", lambda *_: True)
        monkeypatch.setattr(AllowList, "may_connect", lambda *_: True)
    with tempfile.NamedTemporaryFile("w", suffix=".py") as file:
        file.write(source)
        file.flush()
        monkeypatch.setattr(agent, "__file__", file.name)
        try:
            with attack_ground(backend) as ground:
                for name in names:
                    (outcome, what), _ = ground.runner.run(run(ground, name))
                    assert outcome is OPEN, (name, what)
        finally:
            leave_ground()


def test_the_page_lists_every_attack() -> None:
    assert PAGE.read_text("utf-8").partition(MARK)[2].strip() == render().strip()
