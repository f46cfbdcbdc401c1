"""Whatever a user types or a file holds: a spec or a ConfigError, never another exception."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from strop.errors import ConfigError
from strop.spec import ResolvedSpec, all_keys, explain, load_spec, write_spec
from strop.spec.display import dotted, format_value
from strop.spec.schema import section_names

FUZZ = settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow], deadline=None
)
SMALL = 'name = "x"\ntask.name = "reasoning-gym"\ntask.dataset = "d"\n'

# Words that get past the first checks more often than random letters do.
WORDS = st.sampled_from(
    [
        *(part for key in all_keys() for part in key.split(".")),
        *section_names(),
        *("extends", "none", "null", "arithmetic", "gsm8k", "reasoning-gym", "~", "nan", "inf", "1e400"),
        *("run.toml", ".", "..", "true", "0x10", "-0", "1979-05-27", "[", "{", "&a", "*a", "!!int", '"', "'"),
        *(
            '"""',
            "'''",
            "=",
            ": ",
            "\n",
            "\n\n[",
            "]\n",
            "[[",
            "#",
            "- ",
            "\\u0000",
            "\\ud800",
            "\\U00110000",
        ),
    ]
)
TEXTS = st.text(max_size=8) | WORDS
SNIPPETS = st.lists(TEXTS | st.sampled_from(["\n", " ", "=", ".", ",", "1"]), max_size=30).map("".join)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=10,
)
KEYS = st.sampled_from([*all_keys(), "task.config.a", 'task.config."b c"', "task.config.d.e"]) | TEXTS


def read(path: Path, overrides: list[str]) -> ResolvedSpec | None:
    """Return the spec, or None after checking that the refusal has the form of this house."""
    try:
        resolved = load_spec(path, overrides)
    except ConfigError as error:
        for line in str(error).split("\n"):
            assert line.count(". Allowed: ") >= 1, line
            assert line.count(". Next: ") >= 1, line
        return None
    back = path.parent / "back.toml"
    back.write_text(write_spec(resolved))
    assert repr(load_spec(back).spec) == repr(resolved.spec)
    return resolved


@FUZZ
@given(data=st.binary(max_size=200))
def test_random_bytes(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "run.toml"
    path.write_bytes(data)
    assert read(path, []) is None


@FUZZ
@given(text=SNIPPETS, has_head=st.booleans())
@example(text='a = "\\U00110000"', has_head=False)
@example(text="a = " + "[" * 3000, has_head=False)
@example(text="a = " + "9" * 5000, has_head=False)
@example(text="seed = 0x" + "f" * 5000, has_head=True)
@example(text="a." * 3000 + "b = 1", has_head=True)
def test_random_texts(tmp_path: Path, text: str, has_head: bool) -> None:
    path = tmp_path / "run.toml"
    path.write_bytes(((SMALL if has_head else "") + text).encode("utf-8", "surrogatepass"))
    read(path, [])


@FUZZ
@given(
    tree=st.dictionaries(st.sampled_from([*section_names(), "name", "seed", "extends"]), JSON, max_size=4),
    task=st.dictionaries(st.sampled_from([k[5:] for k in all_keys() if k.startswith("task.")]), JSON),
)
def test_random_trees_in_toml(tmp_path: Path, tree: dict[str, Any], task: dict[str, Any]) -> None:
    path = tmp_path / "run.toml"
    whole = {"name": "x", "task": {"name": "reasoning-gym", "dataset": "d"} | task} | tree
    text = "\n".join(f"{dotted((key,))} = {format_value(value)}" for key, value in whole.items())
    path.write_bytes(text.encode("utf-8", "surrogatepass"))
    read(path, [])


@FUZZ
@given(values=st.dictionaries(st.sampled_from(all_keys()), JSON, max_size=5))
def test_random_values_in_toml(tmp_path: Path, values: dict[str, Any]) -> None:
    lines = [f"{key} = {format_value(value)}" for key, value in values.items()]
    path = tmp_path / "run.toml"
    path.write_bytes("\n".join(lines).encode("utf-8", "surrogatepass"))
    read(path, ["name=x", "task.name=reasoning-gym", "task.dataset=d"])


@FUZZ
@given(
    overrides=st.lists(
        TEXTS
        | st.tuples(KEYS, JSON).map(lambda pair: f"{pair[0]}={json.dumps(pair[1])}")
        | st.tuples(KEYS, SNIPPETS).map("=".join),
        max_size=4,
    )
)
@example(overrides=["task.config.a=[1979-05-27]", "task.config.a=[1979-05-27]"])
@example(overrides=["task.config.a=" + "[" * 400 + "]" * 400])
@example(overrides=["seed=0x" + "f" * 5000, "seed=0x" + "e" * 5000])
@example(overrides=[".".join("a" * 2000) + "=1"])
@example(overrides=["model.uri=./a\0b"])
@example(overrides=["name=\udcff"])
def test_random_overrides(tmp_path: Path, overrides: list[str]) -> None:
    path = tmp_path / "run.toml"
    path.write_text(SMALL)
    read(path, overrides)


@FUZZ
@given(key=SNIPPETS | KEYS)
def test_random_keys_to_explain(key: str) -> None:
    with suppress(ConfigError):
        assert explain(key).description


@FUZZ
@given(name=st.text(max_size=20) | SNIPPETS, suffix=st.sampled_from([".toml", ".yaml", ""]))
def test_random_file_names(tmp_path: Path, name: str, suffix: str) -> None:
    with pytest.raises(ConfigError):
        load_spec(f"{tmp_path}/none/{name}{suffix}")
