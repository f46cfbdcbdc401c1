"""Incidents of values and secrets that are handed to jobs; those of signals are tests of `wrap`."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from strop.launch.backends import open_backend
from strop.launch.build_request import make_plan
from strop.launch.environment import read_environment
from strop.launch.job_dir import write_job_dir
from tests.fixtures.jobs import make_request, project, saver

__all__ = ["project"]
CANARY = 'canary-91d2, "it\'s" $HOME\nsecond line'


def test_lau_4_values_with_commas_quotes_and_newlines_arrive_whole(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A comma cut values that were handed over in one list; they travel in a private file instead."""
    monkeypatch.setenv("HOSTILE", CANARY)
    request = make_request(project, [saver(1)], variables=("HOSTILE",))
    plan = make_plan(request, open_backend(request.site))
    write_job_dir(plan, request, os.environ)
    assert read_environment(Path(plan.home) / "job", "train")["HOSTILE"] == CANARY
    assert not [word for word in plan.argv if "HOSTILE" in word or "canary" in word]


def test_sec_4_a_secret_is_in_one_private_file_and_nowhere_else(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tokens stood in arguments, saved settings and compose files."""
    monkeypatch.setenv("JUDGE_TOKEN", CANARY)
    (project / "strop-sites.toml").write_text('[sites.local]\nsecrets = ["JUDGE_TOKEN"]\n')
    request = make_request(project, [saver(1)])
    plan = make_plan(request, open_backend(request.site))
    write_job_dir(plan, request, os.environ)
    holders = {
        path.name
        for path in Path(plan.home).rglob("*")
        if path.is_file() and b"canary-91d2" in path.read_bytes()
    }
    assert holders == {"secrets.json"}
    assert (Path(plan.home) / "job" / "secrets.json").stat().st_mode & 0o777 == 0o600
    assert "canary" not in json.dumps(plan.argv)
