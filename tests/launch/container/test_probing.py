from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from strop.hardware.findings import Finding, Severity
from strop.hardware.identity import find_user_name
from strop.launch.backends import open_backend
from strop.launch.build_request import make_plan
from strop.launch.container.backend import ContainerBackend, probe_plan, remove_leftovers
from strop.launch.container.engine import locate_engine
from strop.launch.container.options import ContainerSite
from tests.fixtures.containers import write_sites
from tests.fixtures.jobs import make_request, project, saver
from tests.launch.container.test_engine import install

__all__ = ["project"]


def probe(
    project: Path, *overrides: str, lines: tuple[str, ...] = (), image: str = "some/image:1"
) -> list[Finding]:
    write_sites(project, image, *lines)
    request = make_request(project, [saver(1)], *overrides, site="box")
    plan = make_plan(request, open_backend(request.site))
    assert isinstance(request.site.profile, ContainerSite)
    return probe_plan(plan, request.site.profile)


@pytest.fixture
def podman(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An engine in words: it has one image, starts everything, and has room."""
    folder = tmp_path / "bin"
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}/usr/bin:/bin")
    install(folder, "podman", answers())
    return folder


def answers(*, inspect: str = '[{"Id": "abc", "Size": 1}]', run: str = "exit 0", root: str = "/") -> str:
    return (
        f"case \"$1\" in version) echo 4.3.1;; image) echo '{inspect}';; run) {run};;"
        f" info) echo {root};; images) echo localhost/strop:1;; *) {run};; esac"
    )


def test_a_site_that_has_everything_finds_nothing(project: Path, podman: Path) -> None:
    assert probe(project) == []


def test_a_missing_image_is_named_with_those_that_there_are(project: Path, podman: Path) -> None:
    install(podman, "podman", answers(inspect="[]"))
    (finding,) = probe(project)
    assert (finding.code, finding.severity) == ("image", Severity.ERROR)
    assert finding.given == "podman has no image 'some/image:1'"
    assert "localhost/strop:1" in finding.allowed


def test_an_image_without_our_interpreter_is_found_before_the_start(project: Path, podman: Path) -> None:
    fails = 'case "$*" in *"-c import strop"*) echo "No module named strop" >&2; exit 1;; esac'
    install(podman, "podman", answers(run=fails))
    (finding,) = probe(project)
    assert finding.given == "python of image 'some/image:1' cannot be the supervisor: No module named strop"


def test_an_engine_that_starts_nothing_says_so_in_its_own_words(project: Path, podman: Path) -> None:
    install(podman, "podman", answers(run='echo "no cgroups today" >&2; exit 126'))
    (finding,) = probe(project)
    assert finding.severity is Severity.ERROR
    assert finding.given == "podman 4.3.1 starts no container: no cgroups today"
    assert str(finding).count("Allowed:") == 1


def test_an_engine_that_does_not_answer_is_no_success(project: Path, podman: Path) -> None:
    install(podman, "podman", answers(inspect="").replace("echo ''", 'echo "database is locked" >&2'))
    (finding,) = probe(project)
    assert (finding.code, finding.severity) == ("engine", Severity.UNKNOWN)
    assert finding.given == "podman image did not answer: database is locked"


def test_no_engine_at_all(project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    request_path = os.environ["PATH"]
    write_sites(project, "some/image:1")
    request = make_request(project, [saver(1)], site="box")
    plan = make_plan(request, open_backend(request.site))
    monkeypatch.setenv("PATH", str(tmp_path))
    profile = request.site.profile
    assert isinstance(profile, ContainerSite)
    (finding,) = probe_plan(plan, profile)
    assert finding.given == "no container engine answers: podman: not on PATH; docker: not on PATH"
    monkeypatch.setenv("PATH", request_path)


def test_room_for_containers_is_asked_for(project: Path, podman: Path) -> None:
    # A file system without any room, on every Linux.
    install(podman, "podman", answers(root="/proc"))
    (finding,) = probe(project)
    assert (finding.code, finding.given) == ("storage", "the storage of podman has 0.00 GB free")
    install(podman, "podman", answers(root="/no/such/folder/at/all"))
    assert {one.severity for one in probe(project)} <= {Severity.UNKNOWN}


def test_folders_that_are_missing_or_not_shown_are_named(project: Path, podman: Path, tmp_path: Path) -> None:
    lines = ('mounts = ["/no/such/folder:/data:ro"]', 'hf_home = "/no/cache"')
    findings = probe(project, f'model.uri="{tmp_path}"', lines=lines)
    found = {finding.given: finding.severity for finding in findings}
    assert found == {
        "/no/such/folder is not there, and was to be shown as /data": Severity.ERROR,
        "/no/cache is not there, and was to be shown as /no/cache": Severity.WARNING,
        f"the run file names {tmp_path}, which the container will not see": Severity.WARNING,
    }
    shown = probe(project, f'model.uri="{tmp_path}"', lines=(f'mounts = ["{tmp_path}:{tmp_path}"]',))
    assert shown == []


def test_more_than_this_machine_has_is_refused_before_the_engine_does(project: Path, podman: Path) -> None:
    findings = probe(project, "job.cpus=1000", 'job.memory="900T"')
    assert [finding.code for finding in findings] == ["cpus", "memory"]
    (finding,) = [one for one in probe(project, "job.gpus=8") if one.code == "gpus"]
    assert finding.given.startswith("8 GPUs are asked for, and this machine has ")


def test_the_projects_own_image_is_looked_for_by_its_content(project: Path, podman: Path) -> None:
    install(podman, "podman", answers(inspect="[]"))
    write_sites(project, "x")
    request = make_request(project, [saver(1)], site="box")
    profile = request.site.profile
    assert isinstance(profile, ContainerSite)
    for environment, variant in (("image", "full"), ("mounted", "base")):
        own = profile.model_copy(update={"image": None, "environment": environment})
        plan = make_plan(request, ContainerBackend(own))
        (finding,) = probe_plan(plan, own)
        assert finding.given.startswith("podman has no image 'localhost/strop:")
        assert finding.next_step == f"build it: python -m strop.launch.container --variant {variant}"
    named = replace(request, options={"image": "another:2"})
    (finding,) = probe_plan(make_plan(named, ContainerBackend(profile)), profile)
    assert finding.given == "podman has no image 'another:2'"


def test_a_user_without_a_name_has_jobs_too(podman: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Incident: where the user was a number alone, as in many containers, no container was ever started."""
    for name in ("LOGNAME", "USER", "LNAME", "USERNAME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os, "getuid", lambda: 4_200_000)
    assert find_user_name() == "4200000"
    assert list(ContainerBackend(ContainerSite(backend="container")).list_tagged()) == []
    assert remove_leftovers(locate_engine()) == []
