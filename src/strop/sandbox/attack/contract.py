"""What an attack is, what may come of it, and what a level of isolation promises of it."""

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
    """What came of an attack; a later letter is worse."""

    BLOCKED = "B"
    """What it tried failed inside."""
    CONTAINED = "C"
    """It happened inside, within limits; nothing outside changed."""
    DETECTED = "D"
    """It happened, and the result or the record says so."""
    EXPOSED = "E"
    """It succeeded."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Seen:
    """What was seen of an attack from outside."""

    code: Code
    what: str
    """In some words."""


Work = Callable[["Stage"], Awaitable[Seen]]
"""Attack a fresh sandbox, and say what was seen."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Expect:
    """The worst code that an attack may have, by what isolation its sandbox says it reached."""

    code: Code
    """Where isolation is whole."""
    field: str = ""
    """Of `Isolation`: a namespace without which it succeeds, or a limit; empty: it never may."""
    unguarded: Code = Code.EXPOSED
    """Where the limit is not kept."""
    is_user_enough: bool = False
    """Whether a user of the host that is not this one is as good as the namespace."""

    def worst(self, isolation: Isolation) -> Code:
        """Return the code."""
        value = getattr(isolation, self.field) if self.field else True
        if isinstance(value, Guard):
            codes = {Guard.ENFORCED: self.code, Guard.WATCHED: Code.DETECTED, Guard.NONE: self.unguarded}
            return codes[value]
        return self.code if value or (self.is_user_enough and is_other_user(isolation)) else Code.EXPOSED


SMALL = Limits(memory_bytes=96 * MIB, max_processes=16, scratch_bytes=4 * MIB, max_scratch_files=200)
"""What most attacks meet: enough for one Python, and quickly used up."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Attack:
    """One way to abuse a sandbox."""

    row: int
    """Of the list of abuses; attacks of one row are variants."""
    name: str
    tries: str
    """What it tries, for a table."""
    judged: str
    """What decides, and from where it is seen."""
    expects: Expect
    work: Work
    limits: Limits = SMALL
    spares_user: bool = True
    """False: where programs are this process's own user and see its processes, it would end them all, so it
    is not tried there and counts as exposed."""
    has_list: bool = False
    """Whether its sandbox may reach `Bait.network`; a backend that refuses such a list counts as exposed."""

    @property
    def is_on_service(self) -> bool:
        """Whether it is on what makes sandboxes for others, which only `remote` has."""
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
    """Add an attack that is called as its function is, underscores as hyphens."""

    def add(work: Work) -> Work:
        name = work.__name__.strip("_").replace("_", "-")
        made = Attack(
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
        into.append(made)
        return work

    return add


def always(code: Code) -> Expect:
    """Expect one code everywhere."""
    return Expect(code=code)


def by_limit(field: str, unguarded: Code = Code.EXPOSED) -> Expect:
    """Expect what a limit is: enforced is contained, watched is detected."""
    return Expect(code=Code.CONTAINED, field=field, unguarded=unguarded)


def by_namespace(field: str, code: Code = Code.BLOCKED) -> Expect:
    """Expect a code where a sandbox has this namespace for itself, and exposure elsewhere."""
    return Expect(code=code, field=field)


def by_user(field: str) -> Expect:
    """Expect it blocked where programs have this namespace, or are another user; and exposure elsewhere."""
    return Expect(code=Code.BLOCKED, field=field, is_user_enough=True)


def is_other_user(isolation: Isolation) -> bool:
    """Whether programs are not the user of this process."""
    return isolation.host_uid != os.geteuid()


_NAMESPACE_ROWS = frozenset({11, 12, 14, 15, 16, 18, 19, 20, 21, 23, 24})
_DETECTED = frozenset({1, 2})
_LEVELS: tuple[tuple[IsolationLevel, frozenset[int], frozenset[int]], ...] = (
    (IsolationLevel.RLIMIT, frozenset({6, 7, 8, 9}), _DETECTED),
    (IsolationLevel.NAMESPACE, frozenset({6, 7, 8, 9}) | _NAMESPACE_ROWS, _DETECTED | {3, 4, 5, 10, 13}),
    (IsolationLevel.CONTAINER, frozenset(range(1, 25)) - {13, 22}, frozenset({13})),
)
"""Levels with the rows that must be blocked or contained, and those that must at least be detected. Row 22,
attacks on who judges, stands in tests of the judges."""


def confirmed_level(reached: IsolationLevel, codes: Iterable[tuple[int, Code]]) -> IsolationLevel:
    """Return the highest level up to `reached` whose attacks ended as it promises.

    `codes`: row and code of each attack that was made. A level whose rows were not attacked is not confirmed.
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
