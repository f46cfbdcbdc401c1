"""What the probes make of an example and of the code that it shows."""

from __future__ import annotations

import json

import pytest

from strop.audit.answer_probes import permute_parts
from strop.audit.code_probes import trivial_edits
from strop.rollout import make_example
from strop.tasks.code.extraction import compiles, extract_python
from strop.tasks.traits import ProgramForm


def test_tests_and_constraints_are_reversed_and_nothing_else() -> None:
    tests = {"inputs": ["1\n", "2\n"], "outputs": ["3\n", "4\n"], "fn_name": None}
    fields = {
        "tests": ["assert f(1) == 2", "assert f(2) == 3"],
        "hidden_tests": ["assert f(9) == 10"],
        "constraints": [{"id": "a"}, {"id": "b"}],
        "input_output": json.dumps(tests),
        "names": ["f", "g"],
        "choices": ["p", "q"],
        "text": "{not JSON",
    }
    example = make_example("parts", fields, "answer")
    changed = permute_parts(example)
    assert changed is not None
    assert (changed.example_id, changed.answer) == (example.example_id, "answer")
    different = {key for key in fields if changed.fields[key] != fields[key]}
    assert different == {"tests", "constraints", "input_output"}
    assert changed.fields["tests"] == ["assert f(2) == 3", "assert f(1) == 2"]
    assert json.loads(changed.fields["input_output"]) == {
        "inputs": ["2\n", "1\n"],
        "outputs": ["4\n", "3\n"],
        "fn_name": None,
    }


@pytest.mark.parametrize("text", ["{}", "[1, 2]", '{"inputs": [1, 2]}', '{"inputs": [1], "outputs": [2]}'])
def test_an_example_with_nothing_to_reverse_is_left_alone(text: str) -> None:
    assert permute_parts(make_example("parts", {"input_output": text, "tests": ["one"]}, None)) is None


def test_trivial_edits_hold_the_code_that_was_shown_and_no_more() -> None:
    signature = 'def plus(x):\n    """ Add two. """'
    edits = trivial_edits(ProgramForm(entry_point="plus"), signature, "def plus(")
    codes = {kind: extract_python(reply, entry_point="plus") or "" for kind, reply in edits.items()}
    assert codes["the code shown, unchanged"] == signature
    assert codes["the code shown, and a comment"].startswith(f"{signature}\n# ")
    assert codes["the code shown, under a comment"].endswith(f"\n{signature}")
    assert all(compiles(code) for kind, code in codes.items() if "(2)" not in kind)
    # 3 without code, and 4 for each piece.
    assert len(edits) == 11
    # A whole program has no function to empty.
    assert len(trivial_edits(ProgramForm(entry_point=None), "print(1)")) == 5
