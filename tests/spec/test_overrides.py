from __future__ import annotations

from typing import Any

import pytest

from strop.errors import ConfigError
from strop.spec.overrides import parse_override


@pytest.mark.parametrize(
    ("text", "path", "value"),
    [
        ("train.steps=10", ("train", "steps"), 10),
        (" train . steps = 10 ", ("train", "steps"), 10),
        ("optimizer.lr=1e-5", ("optimizer", "lr"), 1e-5),
        ("optimizer.lr=1.", ("optimizer", "lr"), "1."),  # not TOML, so a text; the model refuses it
        ("name=demo", ("name",), "demo"),
        ('name="demo"', ("name",), "demo"),
        ("model.uri=a=b", ("model", "uri"), "a=b"),
        ("model.uri=", ("model", "uri"), ""),
        ("task.config.x=[1, 2]", ("task", "config", "x"), [1, 2]),
        ("task={name='gsm8k'}", ("task",), {"name": "gsm8k"}),
        ('task.config."a.b"=true', ("task", "config", "a.b"), True),
        ("name=2026-11-21", ("name",), "2026-11-21"),
        ("name=1\nseed=2", ("name",), "1\nseed=2"),
        ("name=x # y", ("name",), "x # y"),
    ],
)
def test_overrides_by_hand(text: str, path: tuple[str, ...], value: Any) -> None:
    assert parse_override(text) == (path, value)


@pytest.mark.parametrize(
    "text", ["", "train.steps", "=3", "a b=3", "a..b=3", "a\nb=3", "[a]=3", "a#=3", "x=\udc80"]
)
def test_what_is_no_override_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(ConfigError, match=r"is not understood\. Allowed: key=value .*train\.steps=10"):
        parse_override(text)


def test_a_pasted_credential_is_not_repeated() -> None:
    with pytest.raises(ConfigError, match="<redacted>") as caught:
        parse_override("hf_" + "a" * 30)
    assert "aaa" not in str(caught.value)
