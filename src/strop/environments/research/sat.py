"""Choose a SAT solver's branching literals so that it needs few decisions: `sat3`.

The judge runs the solver and asks the artefact for each literal to branch on. The score counts decisions and
measures no time, so it is the same on every machine.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Generator, Sequence

import numpy as np

from strop.environments.research.contract import (
    ArtefactRefused,
    Instance,
    Marks,
    Phase,
    Play,
    cheating_sources,
    load_function,
    seed_stream,
)

Clauses = list[list[int]]
"""Each a list of literals: the variable's number, from 1, or its negative."""
NUM_VARIABLES = 30
CLAUSE_RATIO = 4.26
MAX_DECISIONS = 3000
"""Limit for one formula; the solver then stops."""
_NUM_FORMULAS = {Phase.DEV: 12, Phase.SEALED: 24}
_ARTEFACT = "branching.py"


def draw_formula(rng: np.random.Generator, num_variables: int, num_clauses: int) -> Clauses:
    """Draw clauses of three variables, each negated half of the time."""
    clauses = []
    for _ in range(num_clauses):
        variables = 1 + rng.choice(num_variables, size=3, replace=False)
        clauses.append((variables * rng.choice([-1, 1], size=3)).tolist())
    return clauses


def _assign(clauses: Clauses, literal: int) -> Clauses | None:
    """Return the remaining clauses after a literal and unit propagation, in order; None: a conflict."""
    waiting = [literal]
    while waiting:
        true = waiting.pop()
        left = []
        for clause in clauses:
            if true in clause:
                continue
            if -true in clause:
                clause = [other for other in clause if other != -true]
                if not clause:
                    return None
            left.append(clause)
        clauses = left
        waiting = waiting or next(([clause[0]] for clause in clauses if len(clause) == 1), [])
    return clauses


def solve(clauses: Clauses) -> Generator[Clauses, int, bool]:
    """Yield the clauses at each branching, take the literal to try first; return the satisfiability."""
    stack = [clauses]
    while stack:
        left = stack.pop()
        if not left:
            return True
        literal = yield left
        for tried in (-literal, literal):
            following = _assign(left, tried)
            if following is not None:
                stack.append(following)
    return False


def count_decisions(formula: Clauses, pick: Callable[[Clauses], int]) -> tuple[int, bool]:
    """Return the number of decisions under a rule, and whether the formula can be satisfied."""
    solving = solve(formula)
    num_decisions = 0
    try:
        left = next(solving)
        while True:
            num_decisions += 1
            left = solving.send(pick(left))
    except StopIteration as end:
        return num_decisions, bool(end.value)


def pick_first(clauses: Clauses) -> int:
    """Return the first variable."""
    return min(abs(literal) for clause in clauses for literal in clause)


def pick_frequent(clauses: Clauses) -> int:
    """Return the most frequent literal, the smallest of several."""
    counts = Counter(literal for clause in clauses for literal in clause)
    return min(counts, key=lambda literal: (-counts[literal], literal))


_STARTER = '''"""Where to branch: the literal that occurs most often."""
from collections import Counter


def pick(clauses):
    """Return a literal of the clauses, which is tried as true first, then as false."""
    counts = Counter(literal for clause in clauses for literal in clause)
    return min(counts, key=lambda literal: (-counts[literal], literal))
'''
_ORACLE = '''"""Looks ahead: what each of the heaviest variables forces, on both sides."""


def follow(clauses, literal):
    waiting, num_forced = [literal], 0
    while waiting:
        true = waiting.pop()
        num_forced += 1
        left = []
        for clause in clauses:
            if true in clause:
                continue
            if -true in clause:
                clause = [one for one in clause if one != -true]
                if not clause:
                    return None, num_forced
            left.append(clause)
        clauses = left
        waiting = next(([clause[0]] for clause in clauses if len(clause) == 1), [])
    return clauses, num_forced


def pick(clauses):
    weights = {}
    for clause in clauses:
        for literal in clause:
            weights[literal] = weights.get(literal, 0) + 5.0 ** -len(clause)
    variables = sorted(
        {abs(literal) for literal in weights},
        key=lambda v: -(weights.get(v, 0) + 1e-3) * (weights.get(-v, 0) + 1e-3),
    )
    best, best_value = variables[0], -1.0
    for variable in variables[:10]:
        sides = {}
        for literal in (variable, -variable):
            left, num_forced = follow(clauses, literal)
            if left is None:
                return -literal
            if not left:
                return literal
            sides[literal] = num_forced + sum(5.0 ** (2 - len(clause)) for clause in left)
        value = sides[variable] * sides[-variable] + sides[variable] + sides[-variable]
        if value > best_value:
            lighter = min(sides, key=sides.get)
            best, best_value = lighter, value
    return best
'''


def make_sat(seed: int) -> Instance:
    """Make an instance of `sat3`: the logarithm of all decisions of fresh formulas, lower is better."""
    num_clauses = round(CLAUSE_RATIO * NUM_VARIABLES)
    streams = {phase: seed_stream("sat3", seed, phase) for phase in Phase}
    formulas = {
        phase: [draw_formula(streams[phase], NUM_VARIABLES, num_clauses) for _ in range(_NUM_FORMULAS[phase])]
        for phase in Phase
    }
    sealed = formulas[Phase.SEALED]

    def total(pick: Callable[[Clauses], int]) -> float:
        return math.log(sum(count_decisions(formula, pick)[0] for formula in sealed))

    return Instance(
        task="sat3",
        statement=f"A solver decides random formulas of {NUM_VARIABLES} variables and {num_clauses}"
        " clauses with three literals each. It follows unit clauses, and branches where there is none:"
        f" there it calls pick(clauses) of {_ARTEFACT}, with the clauses that are left, each a list of"
        " literals (a variable's number, or its negative). It tries the literal that is returned as true"
        " first. Improve pick. The score is the natural logarithm of all branchings over"
        f" {_NUM_FORMULAS[Phase.SEALED]} formulas, lower is better.",
        files={_ARTEFACT: _STARTER.encode()},
        artefact=_ARTEFACT,
        marks=Marks(
            floor=total(pick_first),
            baseline=total(pick_frequent),
            ceiling=total(load_function(_ORACLE.encode(), "pick")),
            ceiling_kind="best_known",
            limit=math.log(len(sealed)) - 1e-9,
            is_higher_better=False,
        ),
        oracle=_ORACLE.encode(),
        cheats={
            **cheating_sources("pick", _STARTER),
            "a variable of its own": f"def pick(clauses):\n    return {NUM_VARIABLES + 1}\n".encode(),
            "empties its copy": b"def pick(clauses):\n    clauses.clear()\n    return 0\n",
        },
        function="pick",
        play=lambda phase: _decide(formulas[phase]),
    )


def _decide(formulas: Sequence[Clauses]) -> Play:
    """Solve formulas side by side; the score is the logarithm of all decisions. Raises: ArtefactRefused."""
    solving = {index: solve(formula) for index, formula in enumerate(formulas)}
    waiting = {index: next(solver) for index, solver in solving.items()}
    counts = dict.fromkeys(solving, 0)
    while waiting:
        replies = yield [[left] for left in waiting.values()]
        for (index, left), literal in zip(list(waiting.items()), replies, strict=True):
            if not _is_literal_of(literal, left):
                raise ArtefactRefused(
                    f"pick returned {str(literal)[:40]}, which is no literal of the clauses"
                )
            counts[index] += 1
            try:
                waiting[index] = solving[index].send(literal)
            except StopIteration:
                del waiting[index]
                continue
            if counts[index] >= MAX_DECISIONS:
                del waiting[index]
    return math.log(sum(counts.values()))


def _is_literal_of(value: object, clauses: Clauses) -> bool:
    """Whether a value is a variable of the clauses, or its negative."""
    if isinstance(value, bool) or not isinstance(value, int):
        return False
    return any(value in clause or -value in clause for clause in clauses)
