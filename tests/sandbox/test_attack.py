"""The suite of attacks: what it says is what was seen."""

from __future__ import annotations

import json

from strop.sandbox.attack.contract import Code, confirmed_level
from strop.sandbox.contract import IsolationLevel
from tests.fixtures.commands import Run, run

__all__ = ["run"]


def test_one_attack_on_one_backend(run: Run) -> None:
    ended = run("sandbox", "attack", "--backend", "process", "--only", "sparse-file", "--json")
    assert ended.code == 0
    (found,) = json.loads(ended.out)
    (verdict,) = found["verdicts"]
    assert found["name"] == "process"
    assert (verdict["attack"], verdict["row"], verdict["code"], verdict["expected"]) == (
        "sparse-file",
        5,
        "B",
        "B",
    )
    # One attack says nothing of a level.
    assert found["confirmed"] is None


def test_unknown_names_are_refused(run: Run) -> None:
    for words, said in (
        (("--only", "charm"), "fork-bomb"),
        (("--backend", "vm"), "bubblewrap, podman, process"),
    ):
        ended = run("sandbox", "attack", *words)
        assert ended.code != 0
        assert words[1] in ended.err
        assert said in ended.err


def test_a_level_is_confirmed_by_the_codes_of_its_rows() -> None:
    codes = dict.fromkeys(range(1, 25), Code.BLOCKED)

    def confirm(reached: IsolationLevel, **changed: Code) -> IsolationLevel:
        rows = codes | {int(row[1:]): code for row, code in changed.items()}
        return confirmed_level(reached, rows.items())

    assert confirm(IsolationLevel.CONTAINER) is IsolationLevel.CONTAINER
    # No more than what the record says.
    assert confirm(IsolationLevel.NAMESPACE) is IsolationLevel.NAMESPACE
    # A namespace may only detect what takes processor time; a container contains it.
    assert confirm(IsolationLevel.CONTAINER, r10=Code.DETECTED) is IsolationLevel.NAMESPACE
    assert confirm(IsolationLevel.CONTAINER, r13=Code.DETECTED) is IsolationLevel.CONTAINER
    assert confirm(IsolationLevel.NAMESPACE, r16=Code.EXPOSED) is IsolationLevel.RLIMIT
    assert confirm(IsolationLevel.RLIMIT, r6=Code.DETECTED) is IsolationLevel.NONE
    # The worst of several variants counts, and a row without any is not kept.
    assert confirmed_level(IsolationLevel.RLIMIT, [*codes.items(), (7, Code.EXPOSED)]) is IsolationLevel.NONE
    assert confirmed_level(IsolationLevel.RLIMIT, [(6, Code.BLOCKED)]) is IsolationLevel.NONE
