"""Attacks, their results, and the results that each level of isolation promises."""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from strop.sandbox.contract import MIB, Guard, Isolation, IsolationLevel, Limits

if TYPE_CHECKING:
    from strop.sandbox.attack.stage import Stage


class Code(StrEnum):
    """The result of an attack; a later letter is worse."""

    BLOCKED = "B"
    """The attempt failed inside."""
    CONTAINED = "C"
    """It happened inside, within limits; nothing outside changed."""
    DETECTED = "D"
    """It happened, and the result or the record says so."""
    EXPOSED = "E"
    """It succeeded."""


@dataclass(frozen=True, slots=True)
class Observation:
    """The result of an attack as observed from outside."""

    code: Code
    what: str
    """A short description."""


Work = Callable[["Stage"], Awaitable[Observation]]
"""Attack a fresh sandbox and return the observation."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Expect:
    """The worst acceptable code of an attack, as a function of its sandbox's isolation."""

    code: Code
    """With full isolation."""
    field: str = ""
    """The field of `Isolation` that decides: a namespace or a limit; empty: `code` holds everywhere."""
    unguarded: Code = Code.EXPOSED
    """Without the limit."""
    is_user_enough: bool = False
    """Whether another user of the host protects as well as the namespace."""

    def worst(self, isolation: Isolation) -> Code:
        """Return the worst acceptable code."""
        value = getattr(isolation, self.field) if self.field else True
        if isinstance(value, Guard):
            codes = {Guard.ENFORCED: self.code, Guard.WATCHED: Code.DETECTED, Guard.NONE: self.unguarded}
            return codes[value]
        return self.code if value or (self.is_user_enough and is_other_user(isolation)) else Code.EXPOSED


SMALL = Limits(memory_bytes=96 * MIB, max_processes=16, scratch_bytes=4 * MIB, max_scratch_files=200)
"""Limits of most attacks: enough for one Python, and quickly exhausted."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Attack:
    """One way to abuse a sandbox."""

    row: int
    """The row in the list of abuses; attacks of one row are variants."""
    name: str
    tries: str
    """The attempt, for a table."""
    judged: str
    """The criterion, and where it is observed."""
    expects: Expect
    work: Work
    limits: Limits = SMALL
    spares_user: bool = True
    """False: it would kill all of this user's processes where programs have the same user and see them, so it
    is not run there and counts as exposed."""
    has_list: bool = False
    """Whether its sandbox may reach `Bait.network`; a backend that refuses such a list counts as exposed."""

    @property
    def is_on_service(self) -> bool:
        """Whether it attacks the sandbox service, which only `remote` has."""
        return self.row == 25


def attack(
    into: list[Attack],
    row: int,
    *,
    tries: str,
    judged: str,
    expects: Expect,
    limits: Limits = SMALL,
    spares_user: bool = True,
    has_list: bool = False,
) -> Callable[[Work], Work]:
    """Add an attack, named like its function with hyphens for underscores."""

    def add(work: Work) -> Work:
        name = work.__name__.strip("_").replace("_", "-")
        into.append(
            Attack(
                row=row,
                name=name,
                tries=tries,
                judged=judged,
                expects=expects,
                work=work,
                limits=limits,
                spares_user=spares_user,
                has_list=has_list,
            )
        )
        return work

    return add


def always(code: Code) -> Expect:
    """Expect the same code everywhere."""
    return Expect(code=code)


def by_limit(field: str, unguarded: Code = Code.EXPOSED) -> Expect:
    """Expect contained where the limit is enforced, and detected where it is watched."""
    return Expect(code=Code.CONTAINED, field=field, unguarded=unguarded)


def by_namespace(field: str, code: Code = Code.BLOCKED) -> Expect:
    """Expect a code where the sandbox has this namespace, and exposed elsewhere."""
    return Expect(code=code, field=field)


def by_user(field: str) -> Expect:
    """Expect blocked where programs have this namespace or another user, and exposed elsewhere."""
    return Expect(code=Code.BLOCKED, field=field, is_user_enough=True)


def is_other_user(isolation: Isolation) -> bool:
    """Whether programs run as another user than this process."""
    return isolation.host_uid != os.geteuid()


_NAMESPACE_ROWS = frozenset({11, 12, 14, 15, 16, 18, 19, 20, 21, 23, 24})
_DETECTED = frozenset({1, 2})
_LEVELS: tuple[tuple[IsolationLevel, frozenset[int], frozenset[int]], ...] = (
    (IsolationLevel.RLIMIT, frozenset({6, 7, 8, 9}), _DETECTED),
    (IsolationLevel.NAMESPACE, frozenset({6, 7, 8, 9}) | _NAMESPACE_ROWS, _DETECTED | {3, 4, 5, 10, 13}),
    (IsolationLevel.CONTAINER, frozenset(range(1, 25)) - {13, 22}, frozenset({13})),
)
"""Levels with the rows that must be blocked or contained, and those that must at least be detected. The tests
of the judges cover row 22, attacks on judges."""


def confirmed_level(reached: IsolationLevel, codes: Iterable[tuple[int, Code]]) -> IsolationLevel:
    """Return the highest level up to `reached` whose attacks ended as the level promises.

    `codes`: row and code of each attack that was run. A level with a row without an attack is not confirmed.
    """
    pairs = list(codes)
    worst = {row: max(code for other, code in pairs if other == row) for row, _ in pairs}
    confirmed = IsolationLevel.NONE
    for level, contained, detected in _LEVELS:
        kept = all(worst.get(row, Code.EXPOSED) <= Code.CONTAINED for row in contained)
        kept = kept and all(worst.get(row, Code.EXPOSED) <= Code.DETECTED for row in detected)
        if level > reached or not kept:
            break
        confirmed = level
    return confirmed
