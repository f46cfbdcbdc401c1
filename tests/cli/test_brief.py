from __future__ import annotations

import gc
import inspect

import pytest

from strop.cli.arguments import brief, lasting


def test_a_brief_command_runs_without_the_collector_and_gives_it_back() -> None:
    seen: list[bool] = []

    @brief
    def command(words: str) -> None:
        """Say it."""
        seen.append(gc.isenabled())
        if words == "fail":
            raise ValueError(words)

    command("go")
    with pytest.raises(ValueError, match="fail"):
        command("fail")
    assert (seen, gc.isenabled()) == ([False, False], True)
    # A caller that had switched it off finds it so.
    gc.disable()
    try:
        command("go")
        assert not gc.isenabled()
    finally:
        gc.enable()
    # The command line is made of the signature and the docstring.
    assert list(inspect.signature(command).parameters) == ["words"]
    assert command.__doc__ == "Say it."


def test_a_brief_command_that_waits_collects_meanwhile() -> None:
    seen: list[bool] = []

    @brief
    def command() -> None:
        with lasting():
            seen.append(gc.isenabled())
        seen.append(gc.isenabled())

    command()
    assert (seen, gc.isenabled()) == ([True, False], True)
