from __future__ import annotations

import os
from dataclasses import asdict
from json import dumps, loads
from pathlib import Path

import pytest

from strop.errors import CheckRefused, StoreError
from strop.launch.container.engine import Engine, engine_from_json, locate_engine, prove_engine


def install(folder: Path, name: str, text: str) -> None:
    """Put a program on PATH that stands in for an engine."""
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(f"#!/bin/sh\n{text}\n")
    (folder / name).chmod(0o755)


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that is all of PATH but the shell's own words."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))
    return folder


def test_no_engine_is_refused_with_every_reason(programs: Path) -> None:
    install(programs, "docker", 'echo "Cannot connect to the Docker daemon at unix:///x." >&2; exit 1')
    with pytest.raises(CheckRefused) as caught:
        locate_engine()
    message = str(caught.value)
    assert "podman: not on PATH" in message
    assert "docker: Cannot connect to the Docker daemon at unix:///x." in message
    assert "Allowed: podman, or docker with a running daemon" in message


def test_the_first_engine_that_answers_is_taken_and_a_named_one_alone(programs: Path) -> None:
    install(programs, "podman", "echo 4.3.1")
    install(programs, "docker", "echo 28.2.2")
    assert (locate_engine().kind, locate_engine().version) == ("podman", "4.3.1")
    assert locate_engine("docker").version == "28.2.2"
    (programs / "podman").unlink()
    assert locate_engine().kind == "docker"
    with pytest.raises(CheckRefused, match="no container engine answers: podman: not on PATH"):
        locate_engine("podman")


def engine_at(programs: Path, kind: str = "podman") -> Engine:
    return Engine(kind=kind, program=str(programs / kind), version="4.3.1")


def test_flags_are_found_by_trying_and_only_as_many_as_it_takes(programs: Path) -> None:
    # Starts only with both limits, as runc where hard limits cannot be raised.
    install(
        programs,
        "podman",
        'case "$*" in *nofile=*nproc=*) exit 0;; *) echo "error setting rlimit type 7" >&2; exit 126;; esac',
    )
    proven = prove_engine(engine_at(programs))
    assert proven.global_flags == ()
    assert [word for word in proven.run_flags if word == "--ulimit"] == ["--ulimit"] * 2
    assert proven.argv("run", "x")[1:3] == ["run", "--ulimit"]
    assert proven.argv("ps") == [proven.program, "ps"]


def test_runc_is_chosen_where_another_runtime_fails(programs: Path) -> None:
    install(programs, "runc", "exit 0")
    install(
        programs,
        "podman",
        'case "$*" in *"--cgroup-manager cgroupfs --runtime /"*" run "*) exit 0;; esac\n'
        'echo "crun: cgroups in hybrid mode not supported" >&2; exit 126',
    )
    proven = prove_engine(engine_at(programs))
    assert proven.global_flags == ("--cgroup-manager", "cgroupfs", "--runtime", str(programs / "runc"))


def test_an_engine_that_works_as_it_is_gets_no_flags(programs: Path) -> None:
    install(programs, "podman", "exit 0")
    assert prove_engine(engine_at(programs)) == engine_at(programs)


def test_a_host_that_starts_nothing_is_refused_with_the_first_words_first(programs: Path) -> None:
    install(
        programs,
        "podman",
        'case "$*" in *--runtime*) echo "last words" >&2;; *cgroupfs*) echo "second words" >&2;;'
        ' *) echo "first words" >&2;; esac; exit 126',
    )
    with pytest.raises(
        CheckRefused, match=r"podman 4\.3\.1 starts no container: first words; then: second words"
    ):
        prove_engine(engine_at(programs))


def test_docker_is_not_asked_for_a_start_without_an_image(programs: Path) -> None:
    install(programs, "docker", "exit 1")
    assert prove_engine(engine_at(programs, "docker")) == engine_at(programs, "docker")
    with pytest.raises(CheckRefused, match="exit code 1 without a word"):
        prove_engine(engine_at(programs, "docker"), "image")


def test_an_engine_that_hangs_gives_no_answer(programs: Path) -> None:
    os.symlink("/bin/sleep", programs / "sleep")
    install(programs, "podman", "exec sleep 60")
    with pytest.raises(StoreError, match=r"podman 60 gave no answer in 0\.2 s"):
        engine_at(programs).ask("60", limit_s=0.2)


def test_an_engine_that_went_away_cannot_be_run(programs: Path) -> None:
    with pytest.raises(StoreError, match="podman cannot be run: No such file or directory"):
        engine_at(programs).ask("ps")


def test_words_that_are_no_json_are_no_answer(programs: Path) -> None:
    install(programs, "podman", 'echo "database is locked" >&2; exit 125')
    with pytest.raises(StoreError, match="podman container did not answer: database is locked"):
        engine_at(programs).read_json("container", "inspect", "x")
    for words in ("no such container x", "inspecting object: x: image not known", "No such image: x"):
        install(programs, "podman", f'echo "[]"; echo "Error: {words}" >&2; exit 125')
        assert engine_at(programs).read_json("container", "inspect", "x") == []


def test_a_daemon_that_is_not_reached_has_not_said_that_anything_is_gone(programs: Path) -> None:
    # Word by word what docker 28.2.2 does without a daemon: an empty list, and exit code 1.
    words = (
        "Cannot connect to the Docker daemon at unix:///var/run/docker.sock. Is the docker daemon running?"
    )
    install(programs, "docker", f'echo "[]"; echo "{words}" >&2; exit 1')
    with pytest.raises(StoreError, match="docker container did not answer: Cannot connect to the Docker"):
        engine_at(programs, "docker").read_json("container", "inspect", "x")


def test_an_engine_survives_a_record() -> None:
    engine = Engine(
        kind="podman", program="/usr/bin/podman", version="4", global_flags=("--a", "b"), run_flags=("--c",)
    )
    assert engine_from_json(loads(dumps(asdict(engine)))) == engine
