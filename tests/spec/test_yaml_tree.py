from __future__ import annotations

import math

import pytest

from strop.spec.yaml_tree import YamlRefused, parse_yaml


def test_values_follow_the_core_schema_and_not_yaml_1_1() -> None:
    values, lines = parse_yaml(
        "lr: 1e-5\nno: no\non: on\nt: true\nn: null\nempty:\noctal: 010\nhex: 0x10\nnew: 0o10\n"
        "time: 12:30:00\ndate: 2026-11-21\ninf: -.inf\nhalf: .5\nquoted: '1'\nlist: [1, a]\n"
    )
    assert values == {
        "lr": 1e-5,
        "no": "no",
        "on": "on",
        "t": True,
        "n": None,
        "empty": None,
        "octal": 10,
        "hex": 16,
        "new": 8,
        "time": "12:30:00",
        "date": "2026-11-21",
        "inf": -math.inf,
        "half": 0.5,
        "quoted": "1",
        "list": [1, "a"],
    }
    assert lines[("lr",)] == 1
    assert lines[("list",)] == 15


@pytest.mark.parametrize("text", ["", "# only a comment\n", "---\n", "~\n"])
def test_an_empty_text_is_an_empty_tree(text: str) -> None:
    assert parse_yaml(text) == ({}, {})


@pytest.mark.parametrize(
    ("text", "line", "reason"),
    [
        ("a: 1\nb: 2\na: 3\n", 3, "written twice"),
        ("train:\n  steps: 1\n  steps: 1\n", 3, "written twice"),
        ("a: &x 1\nb: 2\n", 1, "anchor or an alias"),
        ("a: [*x]\n", 1, "anchor or an alias"),
        ("1: a\n", 1, "a key is not a text"),
        ("? [a]\n: b\n", 1, "a key is not a text"),
        ("a: !!python/object:os.system x\n", 1, "uses the tag"),
        ("a: !mine {b: 1}\n", 1, "uses the tag"),
        ("a: !!int x\n", 1, "is no int"),
        ("- a\n", 1, "not a table"),
        ("just words\n", 1, "not a table"),
        ("a: 1\n---\nb: 2\n", 2, "another document"),
        ("a: [1\nb: 2\n", 2, "expected"),
        ('a: "\\ud800"\n', 1, "surrogate"),
        ("a: \x01\n", None, "does not allow"),
    ],
)
def test_what_is_refused_and_on_which_line(text: str, line: int | None, reason: str) -> None:
    with pytest.raises(YamlRefused, match=reason) as caught:
        parse_yaml(text)
    assert caught.value.line == line
