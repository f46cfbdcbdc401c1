"""How many options there are, and how a backend of one's own gets some."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from strop.cli.program import app
from strop.launch.backends import BACKENDS
from tests.fixtures.commands import Run
from tests.fixtures.scripted_backend import FakeSite
from tests.fixtures.scripted_jobs import World, make_world

MOST_PARAMETERS = 200


def commands(command: Any, words: str) -> Iterator[tuple[str, int]]:
    """Yield each command and the number of its parameters, without --help."""
    params = command.get_params(typer.Context(command))
    yield words, sum(param.name != "help" for param in params)
    for name, inner in getattr(command, "commands", {}).items():
        yield from commands(inner, f"{words} {name}")


def test_the_command_line_does_not_grow() -> None:
    counts = dict(commands(typer.main.get_command(app), "strop"))
    assert counts["strop submit"] > 30
    assert sum(counts.values()) <= MOST_PARAMETERS


def test_every_option_of_a_backend_has_one_meaning_where_backends_share_it() -> None:
    first: dict[str, str] = {}
    for section in BACKENDS.values():
        for mark in section.flags().values():
            for name in mark.names:
                assert first.setdefault(name, mark.names[0]) == mark.names[0]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    """A project with a site of a backend that only the table of backends knows."""
    world = make_world(tmp_path)
    for name, value in world.environ.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(world.project)
    monkeypatch.setitem(BACKENDS, "fake", FakeSite)
    world.sites(f'[sites.lanes]\nbackend = "fake"\nfolder = "{tmp_path / "scheduler"}"\nlane = "slow"\n')
    return world


def test_a_backend_of_the_table_has_its_options_everywhere(here: World, run: Run) -> None:
    helped = run("submit", "--help").out
    assert "Options where the backend is fake" in helped
    assert "--lane" in helped
    assert "Lane to wait in." in helped
    explained = run("explain", "sites.fake.lane").out
    assert "Lane to wait in. Override for one job: `strop submit --lane`." in explained
    assert "Set per job, not in a profile: `strop submit --bid`." in run("explain", "sites.fake.bid").out
    words = ("submit", "run.toml", "--on", "lanes", "--dry-run", "--json")
    assert "--lane=slow" in json.loads(run(*words).out)["argv"]
    assert "--lane=fast" in json.loads(run(*words, "--lane", "fast").out)["argv"]
    assert run("submit", "run.toml", "--on", "lanes", "--bid", "3").code == 0
    ended = run("status", "run", "--json")
    assert json.loads(ended.out)[0]["state"] == "queued"


def test_wrong_options_of_a_backend_are_refused_in_three_parts(here: World, run: Run) -> None:
    for words, pieces in {
        ("--bid", "0"): ("--bid=0 is not allowed", "Allowed: Bid for a place", "Next: correct --bid"),
        ("--partition", "x"): (
            "--partition given for a site of backend fake",
            "Allowed: --bid, --lane, site.KEY=VALUE.",
            "leave --partition out",
        ),
    }.items():
        ended = run("submit", "run.toml", "--on", "lanes", *words)
        assert (ended.code, ended.out) == (2, "")
        for piece in pieces:
            assert piece in ended.err


def test_an_option_of_one_job_is_no_key_of_a_profile(here: World, run: Run) -> None:
    with (here.project / "strop-sites.toml").open("a") as file:
        file.write("bid = 3\n")
    ended = run("submit", "run.toml", "--on", "lanes")
    assert ended.code == 2
    assert "sites.lanes.bid" in ended.err
    assert "is set per job, not in a profile" in ended.err
    assert "give --bid to `strop submit`" in ended.err
