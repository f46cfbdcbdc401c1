"""The suite: every attack on every backend, in the suite's own network."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING

from strop.errors import CheckRefused, ConfigError, SandboxError, SandboxRefused, given_of
from strop.io.endpoints import Endpoint
from strop.sandbox.attack import reaching, rights, seeing, serving, taking, trees
from strop.sandbox.attack.bait import Bait, laid_bait
from strop.sandbox.attack.contract import Attack, Code, Observation, confirmed_level, is_other_user
from strop.sandbox.attack.doors import own_network
from strop.sandbox.attack.leaks import find_leftovers
from strop.sandbox.attack.stage import Control, Stage, control_beside, parent_of
from strop.sandbox.choose import BACKENDS, REMOTE
from strop.sandbox.contract import Isolation, IsolationLevel, SandboxSpec
from strop.sandbox.daemon_handle import close_daemons
from strop.sandbox.doctor import keep_confirmed
from strop.sandbox.local import LocalBackend
from strop.sandbox.remote import RemoteBackend

if TYPE_CHECKING:
    from strop.sandbox.choose import Backend

ATTACKS: tuple[Attack, ...] = tuple(
    sorted(
        (attack for part in (taking, seeing, reaching, rights, trees, serving) for attack in part.ATTACKS),
        key=lambda attack: attack.row,
    )
)
"""All attacks in the order of their rows."""
_LIMIT_S = 90.0
"""Limit of one attack, including the start and end of its sandbox."""
_AT_ONCE = 3
_refusals_log = logging.getLogger("strop.sandbox.client")


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """The result of one attack on one backend."""

    attack: str
    row: int
    code: Code
    expected: Code
    """The worst code that the sandbox's record allows."""
    why: str
    """The deciding field of the record, where the code is worse than contained."""
    what: str
    seconds: float

    @property
    def is_worse(self) -> bool:
        """Whether the code is worse than the record allows."""
        return self.code > self.expected


@dataclass(frozen=True, kw_only=True, slots=True)
class BackendVerdict:
    """The results of all attacks on one backend."""

    name: str
    isolation: Isolation | None
    """None if it makes no sandbox."""
    refusal: str = ""
    verdicts: tuple[Verdict, ...] = ()
    confirmed: IsolationLevel | None = None
    """The highest level whose attacks ended as it promises; None if some attacks were not run."""


Serve = Callable[..., AbstractAsyncContextManager[Endpoint]]
"""Run a service on this machine for a block, in the network of the calling thread; takes its options."""
_SERVED_BY = "bubblewrap"
"""The fastest backend that isolates."""


async def attack_sandboxes(
    backends: Collection[str] = (), only: Collection[str] = (), *, serve: Serve | None = None
) -> tuple[BackendVerdict, ...]:
    """Attack sandboxes of this host, by default all backends with all attacks.

    With `serve`, backend `remote` is attacked too: sandboxes of a service that is started for this purpose.
    Other services are never attacked.

    Ends all sandboxes of this process at its start and at its end, because attacked sandboxes are made in a
    separate network, where this process may create one. Confirmed levels are stored for `doctor`.

    Raises: ConfigError for an unknown backend or attack.
    """
    known = BACKENDS if serve is None else (*BACKENDS, REMOTE)
    names = [name for name in known if name in backends or not backends]
    _require_known("sandbox backend", backends, known)
    possible = [attack.name for attack in ATTACKS if REMOTE in names or not attack.is_on_service]
    _require_known("attack", only, possible)
    chosen = [attack for attack in ATTACKS if attack.name in only or not only]
    close_daemons()
    # Attacks provoke refused calls, so they are not logged.
    _refusals_log.disabled = True
    try:
        with own_network() as has_own_network:
            async with laid_bait(has_own_network=has_own_network) as bait:
                free = asyncio.Semaphore(_AT_ONCE)
                works = [_attack_backend(name, serve, chosen, bait, free) for name in names]
                results = tuple(await asyncio.gather(*works))
    finally:
        _refusals_log.disabled = False
        close_daemons()
    # Only this host's backends: sandboxes of a service report the level of their node.
    if confirmed := {
        result.name: result.confirmed
        for result in results
        if result.confirmed is not None and result.name in BACKENDS
    }:
        keep_confirmed(confirmed)
    return results


def choose_attacks(names: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split names into backends and attacks. Raises: ConfigError for an unknown name."""
    attacks = [attack.name for attack in ATTACKS]
    backends = (*BACKENDS, REMOTE)
    for name in names:
        if name not in (*backends, *attacks):
            raise ConfigError(
                f"{name!r} is no sandbox backend and no attack",
                allowed=f"{', '.join(backends)}; {', '.join(attacks)}",
                next_step="name some of them, or none for all",
            )
    return [name for name in names if name in backends], [name for name in names if name in attacks]


def _require_known(what: str, names: Collection[str], known: Sequence[str]) -> None:
    for name in names:
        if name not in known:
            raise ConfigError(
                f"{what} {name!r}", allowed=", ".join(known), next_step="name one of them, or leave it out"
            )


async def _attack_backend(
    name: str, serve: Serve | None, attacks: Sequence[Attack], bait: Bait, free: asyncio.Semaphore
) -> BackendVerdict:
    spec = SandboxSpec(min_level=IsolationLevel.NONE)
    async with AsyncExitStack() as stack:
        try:
            backend: Backend = LocalBackend(name)
            if serve is not None and name == REMOTE:
                served = serve("--backend", _SERVED_BY, "--network", bait.network)
                backend = RemoteBackend(await stack.enter_async_context(served))
            sandbox = await stack.enter_async_context(await backend.create(spec))
        except SandboxRefused as refusal:
            return BackendVerdict(name=name, isolation=None, refusal=str(refusal))
        except (SandboxError, CheckRefused) as error:
            return BackendVerdict(name=name, isolation=None, refusal=given_of(error))
        control = await stack.enter_async_context(control_beside(sandbox))

        possible = [attack for attack in attacks if name == REMOTE or not attack.is_on_service]

        async def run(attack: Attack) -> Verdict:
            async with free:
                return await _attack(backend, attack, control, bait)

        verdicts = tuple(await asyncio.gather(*map(run, possible)))
        isolation = sandbox.isolation
    is_whole = len(attacks) == len(ATTACKS)
    codes = [(verdict.row, verdict.code) for verdict in verdicts]
    confirmed = confirmed_level(isolation.level, codes) if is_whole else None
    return BackendVerdict(name=name, isolation=isolation, verdicts=verdicts, confirmed=confirmed)


async def _attack(backend: Backend, attack: Attack, control: Control, bait: Bait) -> Verdict:
    """Run one attack in a fresh sandbox, then look for disturbances and leftovers."""
    begun, begun_at = time.perf_counter(), time.time()
    network = bait.network if attack.has_list else "none"
    spec = SandboxSpec(limits=attack.limits, network=network, min_level=IsolationLevel.NONE)
    expected = attack.expects.worst(control.sandbox.isolation)
    try:
        async with asyncio.timeout(_LIMIT_S):
            sandbox = await backend.create(spec)
            async with sandbox:
                expected = attack.expects.worst(sandbox.isolation)
                # The process that waits for the first command must not count as one of the attack.
                await sandbox.exec(["/bin/true"], wall_limit_s=_LIMIT_S)
                stage = Stage(backend, sandbox, control, bait)
                maker_pid = parent_of(sandbox.supervisor_pid)
                if attack.spares_user or sandbox.isolation.pidns or is_other_user(sandbox.isolation):
                    observed = await attack.work(stage)
                else:
                    # By the record, programs see the host's processes and have the same user.
                    observed = Observation(
                        Code.EXPOSED, "not made: it would reach all of this user's processes"
                    )
                    expected = Code.EXPOSED
        uid = sandbox.isolation.host_uid if is_other_user(sandbox.isolation) else None
        wrong = await find_leftovers(sandbox.supervisor_pid, maker_pid, uid, stage.token, begun_at)
        wrong += [f"the host's file {name} was changed" for name in bait.changed_files()]
        wrong += [change] if (change := await control.disturbance()) else []
    except TimeoutError:
        observed, wrong = Observation(Code.EXPOSED, ""), [f"no end within {_LIMIT_S:.0f} s"]
    except SandboxError as error:
        observed, wrong = Observation(Code.EXPOSED, ""), [f"the sandbox failed: {error}"]
    if wrong:
        observed = Observation(Code.EXPOSED, "; ".join([*wrong, observed.what]).rstrip("; "))
    why, field = "", attack.expects.field
    if field and observed.code > Code.CONTAINED:
        why = f"{field}: {str(getattr(control.sandbox.isolation, field)).lower()}"
    return Verdict(
        attack=attack.name,
        row=attack.row,
        code=observed.code,
        expected=expected,
        why=why,
        what=observed.what,
        seconds=round(time.perf_counter() - begun, 3),
    )
