from __future__ import annotations

import tomllib
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from strop.spec.display import KeyPath, format_value
from strop.spec.tree import locate_keys


def test_lines_by_hand() -> None:
    text = (
        'name = "x" # a = 1\n'  # 1
        "\n"  # 2
        "[train]\n"  # 3
        "steps = 3\n"  # 4
        '  "odd key"   = 4\n'  # 5
        "a.b.c = 5\n"  # 6
        "[task . 'config']\n"  # 7
        "list = [ 1, # [x]\n"  # 8
        "  { inner = 1 }, 'a=b',\n"  # 9
        "]\n"  # 10
        "after = { one = 1, two.three = [ 2 ] }\n"  # 11
    )
    assert locate_keys(text) == {
        ("name",): 1,
        ("train",): 3,
        ("train", "steps"): 4,
        ("train", "odd key"): 5,
        ("train", "a"): 6,
        ("train", "a", "b"): 6,
        ("train", "a", "b", "c"): 6,
        ("task",): 7,
        ("task", "config"): 7,
        ("task", "config", "list"): 8,
        ("task", "config", "after"): 11,
        ("task", "config", "after", "one"): 11,
        ("task", "config", "after", "two"): 11,
        ("task", "config", "after", "two", "three"): 11,
    }


def test_strings_over_several_lines_hide_what_looks_like_keys() -> None:
    text = 'a = """\nb = 1\n\\"""\n""""\nc = \'\'\'\n[d]\'\'\'\'\ne = "\\" = 1"\n'
    assert tomllib.loads(text).keys() == {"a", "c", "e"}
    assert locate_keys(text) == {("a",): 1, ("c",): 5, ("e",): 7}


def test_escapes_in_quoted_keys_are_resolved() -> None:
    text = '"a\\tb\\u00e9\\"" = 1\n'
    assert set(locate_keys(text)) == {('a\tbé"',)}
    assert set(tomllib.loads(text)) == {'a\tbé"'}


def test_a_date_and_a_time_with_a_space_between_are_one_value() -> None:
    text = "a = 1979-05-27 07:32:00\nb = [1979-05-27 07:32:00, 2]\nc = 1\n"
    assert locate_keys(text) == {("a",): 1, ("b",): 2, ("c",): 3}


KEYS = st.text(st.characters(codec="utf-8", exclude_categories=["Cs"]), min_size=1, max_size=4)
SCALARS = (
    st.booleans()
    | st.integers(-(2**60), 2**60)
    | st.floats(allow_nan=False)
    | st.text(st.characters(codec="utf-8", exclude_categories=["Cs"]), max_size=12)
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3),
    max_leaves=8,
)


def paths(tree: dict[str, Any], prefix: KeyPath = ()) -> set[KeyPath]:
    found = set()
    for key, value in tree.items():
        found.add((*prefix, key))
        if isinstance(value, dict):
            found |= paths(value, (*prefix, key))
    return found


@given(st.dictionaries(KEYS, VALUES, max_size=4))
def test_every_key_outside_lists_is_found_and_nothing_else(tree: dict[str, Any]) -> None:
    # One key per line, so the line of a top key is its index plus one.
    text = "".join(f"{format_value({key: value})[2:-2]}\n" for key, value in tree.items())
    assert tomllib.loads(text) == tree
    lines = locate_keys(text)
    assert set(lines) == paths(tree)
    assert [lines[(key,)] for key in tree] == list(range(1, len(tree) + 1))
