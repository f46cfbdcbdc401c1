"""Incidents of jobs in containers, as far as they show without one; the others are tests of containers."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from strop.errors import CheckRefused
from strop.launch.backends import open_backend
from strop.launch.build_request import make_plan
from strop.launch.container.command import complete_plan
from strop.launch.container.options import ContainerSite
from strop.launch.environment import read_environment
from strop.launch.job_dir import write_job_dir
from strop.launch.launcher import Launcher
from tests.fixtures.containers import write_sites
from tests.fixtures.jobs import make_request, project, saver

__all__ = ["project"]
CANARY = 'canary-91d2, "it\'s" $HOME\nsecond line'


def test_lau_2_process_one_of_a_container_is_the_supervisor_and_no_shell(project: Path) -> None:
    """A shell or driver as first process does not pass SIGTERM on: runs were killed without a checkpoint."""
    write_sites(project, "some/image:1")
    request = make_request(project, [saver(1)], site="box")
    plan = make_plan(request, open_backend(request.site))
    assert plan.argv[plan.argv.index("--entrypoint") + 1] == "python"
    assert plan.argv[plan.argv.index("{image}") + 1 :][:2] == ("-m", "strop.launch.local.supervisor")
    assert isinstance(request.site.profile, ContainerSite)
    assert complete_plan(plan, request, request.site.profile).argv == plan.argv


def test_lau_4_values_with_commas_quotes_and_newlines_arrive_whole(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A comma cut values that were handed over in one list; they travel in a private file instead."""
    monkeypatch.setenv("HOSTILE", CANARY)
    write_sites(project, "some/image:1")
    request = make_request(project, [saver(1)], site="box", variables=("HOSTILE",))
    plan = make_plan(request, open_backend(request.site))
    write_job_dir(plan, request, os.environ)
    assert read_environment(Path(plan.home) / "job", "train")["HOSTILE"] == CANARY
    assert not [word for word in plan.argv if "HOSTILE" in word or "canary" in word]


def test_sec_1_without_an_engine_nothing_runs_outside_a_container(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where Docker was missing, code ran as an ordinary process of the host, with network and credentials."""
    write_sites(project, "some/image:1")
    request = make_request(project, [saver(1)], site="box")
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    launcher = Launcher(open_backend(request.site))
    with pytest.raises(CheckRefused, match="no container engine answers"):
        launcher.submit(request)
    with pytest.raises(CheckRefused, match="no container engine answers"):
        launcher.backend.submit(launcher.plan(request))
    assert not Path(request.home).exists()


def test_sec_4_a_secret_is_in_one_private_file_and_nowhere_else(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tokens stood in arguments, saved settings and compose files."""
    monkeypatch.setenv("JUDGE_TOKEN", CANARY)
    write_sites(project, "some/image:1", 'secrets = ["JUDGE_TOKEN"]')
    request = make_request(project, [saver(1)], site="box")
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
