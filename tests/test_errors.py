"""The promises of the exception tree, checked for every class in it."""

from __future__ import annotations

import ast
import pickle
from collections.abc import Iterator
from pathlib import Path

import pytest

from strop import errors
from strop.errors import StropError, format_error, split_error


def all_classes(top: type[StropError] = StropError) -> Iterator[type[StropError]]:
    yield top
    for child in top.__subclasses__():
        yield from all_classes(child)


@pytest.mark.parametrize("error_class", list(all_classes()), ids=lambda c: c.__name__)
def test_an_error_survives_pickling_with_text_and_attributes(error_class: type[StropError]) -> None:
    error = error_class("three parts")
    error.add_note("seen on n7")
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is error_class
    assert str(copy) == "three parts"
    assert copy.args == error.args
    assert copy.__dict__ == error.__dict__
    assert copy.exit_code == error.exit_code


@pytest.mark.parametrize("error_class", list(all_classes()), ids=lambda c: c.__name__)
def test_an_error_is_documented(error_class: type[StropError]) -> None:
    assert error_class.__doc__


@pytest.mark.parametrize("error_class", list(all_classes())[1:], ids=lambda c: c.__name__)
def test_an_error_is_also_the_standard_class_it_stands_for(error_class: type[StropError]) -> None:
    assert issubclass(error_class, ValueError | RuntimeError)
    # str(KeyError("a\nb")) is "'a\\nb'": a message of several lines would be unreadable.
    assert not issubclass(error_class, KeyError)


def test_no_other_file_defines_an_error() -> None:
    # Signals inside a room (a ValueError for pydantic) are not in the tree: nobody outside catches them.
    names = {error_class.__name__ for error_class in all_classes()}
    elsewhere = [
        f"{path.name}: {node.name}"
        for path in Path(errors.__file__).parent.rglob("*.py")
        if path.name != "errors.py"
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.ClassDef)
        and any(isinstance(base, ast.Name) and base.id in names for base in node.bases)
    ]
    assert elsewhere == []


def test_exit_codes_by_hand() -> None:
    codes = {error_class.__name__: error_class.exit_code for error_class in all_classes()}
    special = {name: code for name, code in codes.items() if code != 1}
    assert special == {
        "ConfigError": 2,
        "DataError": 2,
        **dict.fromkeys(("CheckRefused", "MirrorFenced", "NodeRefused"), 76),
        "Interrupted": 75,
    }


def test_a_message_has_its_three_parts_in_order_and_one_full_stop_each() -> None:
    message = format_error("steps=0.", allowed="1 or more", next_step="set train.steps.")
    assert message == "steps=0. Allowed: 1 or more. Next: set train.steps."


def test_the_parts_of_a_message_are_found_again() -> None:
    message = format_error("a is 3.", allowed="1 or 2", next_step="correct a")
    assert split_error(message) == ("a is 3", "1 or 2", "correct a.")
    # What is made of the parts is the same message, not one with two full stops.
    given, allowed, next_step = split_error(message)
    assert format_error(given, allowed=allowed, next_step=next_step) == message
    assert split_error("no such form") == ("no such form", "", "")
