"""Programs without work, as replies to tasks that ask for programs: a constant, or the shown answers."""

from __future__ import annotations

import ast

from strop.tasks.code.extraction import fence
from strop.tasks.task import ProgramForm

_MAIN = "main"


def as_program(form: ProgramForm, body: str) -> str:
    """Return a reply whose function, or whose program, has one statement."""
    lines = [f"def {form.entry_point or _MAIN}(*args, **keywords):", f"    {body}"]
    return fence("\n".join([*lines, *([f"print({_MAIN}())"] if form.entry_point is None else [])]))


def as_constant(form: ProgramForm, literal: str) -> str:
    """Return a reply whose function returns a constant, or whose program prints it."""
    return as_program(form, f"return {literal}")


def as_lookup(form: ProgramForm, prompt: str) -> str | None:
    """Return a reply that looks its answers up in the tests that a prompt shows; None if it shows none."""
    pairs = []
    for line in prompt.splitlines() if form.entry_point else ():
        call, answer = _shown_test(line.strip())
        if isinstance(call, ast.Call) and ast.unparse(call.func) == form.entry_point and not call.keywords:
            arguments = "".join(f"{ast.unparse(argument)}, " for argument in call.args)
            pairs.append(f"(({arguments}), {ast.unparse(answer)})")
    if not pairs:
        return None
    body = f"return next(answer for given, answer in [{', '.join(pairs)}] if given == args)"
    return as_program(form, body)


def _shown_test(line: str) -> tuple[ast.expr, ast.expr]:
    """Return both sides of `assert left == right`, or two constants None for any other line."""
    nothing = ast.Constant(None)
    try:
        (statement,) = ast.parse(line).body if line.startswith("assert ") else [ast.Pass()]
    except (SyntaxError, ValueError):
        return nothing, nothing
    test = statement.test if isinstance(statement, ast.Assert) else nothing
    if isinstance(test, ast.Compare) and len(test.ops) == 1 and isinstance(test.ops[0], ast.Eq):
        return test.left, test.comparators[0]
    return nothing, nothing
