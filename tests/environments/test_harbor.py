"""Harbor's task directories: how they are read, what is refused, and what decides."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from strop.audit import AuditSettings, ProbeStatus, run_audit, self_test
from strop.environments.harbor import (
    Harbor,
    HarborSpec,
    Image,
    digest_tree,
    list_directories,
    parse_rewards,
)
from strop.errors import ConfigError, DataError
from strop.rollout import FailureOwner, Split, make_example
from strop.tasks import Task, build_task
from tests.environments.test_worlds import call
from tests.environments.test_worlds import play_here as play
from tests.fixtures.harbor_tasks import FILES, write_task
from tests.fixtures.judging import failed
from tests.fixtures.sandboxes import needs_podman
from tests.fixtures.small_root import copy_programs, imported, remove_images

SUBMIT = call("submit")
RIGHT = call("bash", command="echo 5 > answer.txt")
CONFIG = FILES["task.toml"]
BASE = "localhost/nothing:1"
BUILT: set[str] = set()


def read(folder: Path, **changed: str | None) -> Any:
    return list_directories(write_task(folder / "add", BASE, **changed), ())["add"]


def test_a_directory_is_read(tmp_path: Path) -> None:
    task = read(tmp_path)
    assert task.instruction == FILES["instruction.md"]
    asked, config = task.config.environment, task.config
    assert (asked.memory_mb, asked.storage_mb, asked.cpus) == (256.0, 64.0, 1.0)
    limits = (config.agent.timeout_sec, config.verifier.timeout_sec, asked.build_timeout_sec)
    assert limits == (60.0, 5.0, 60.0)
    assert asked.network_mode == "no-network"
    (tmp_path / "add/tests/test.sh").chmod((tmp_path / "add/tests/test.sh").stat().st_mode ^ 0o111)
    assert list_directories(tmp_path, ())["add"].digest != task.digest


def test_an_older_schema_is_read(tmp_path: Path) -> None:
    config = 'version = "1.0"\n[environment]\nmemory = "2G"\nstorage = "512M"\nallow_internet = false\n'
    task = read(tmp_path, config=config)
    asked = task.config.environment
    assert (asked.memory_mb, asked.storage_mb, asked.network_mode) == (2048.0, 512.0, "no-network")
    assert (task.config.agent.timeout_sec, task.config.verifier.timeout_sec) == (math.inf, 600.0)
    usual = read(tmp_path, config="")
    assert usual.config.environment.network_mode == "public"


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"config": "[environment"}, "table declaration"),
        ({"config": CONFIG + "healthcheck = { command = 'true' }\n"}, "environment.healthcheck"),
        ({"config": CONFIG.replace("gpus = 0", "gpus = 1")}, "environment.gpus"),
        ({"config": CONFIG + "[[steps]]\nname = 'one'\n"}, "steps"),
        ({"config": CONFIG.replace("[agent]", "[agent]\nuser = 'agent'")}, "agent.user"),
        ({"config": CONFIG.replace('"5"', '"${HOME}"')}, "verifier.env"),
        ({"config": CONFIG.replace('"5"', '"$$${HOME}"')}, "verifier.env"),
        ({"config": CONFIG.replace("5.0", '5.0\nenvironment_mode = "separate"')}, "environment_mode"),
        ({"config": CONFIG.replace("memory_mb = 256", 'memory = "much"')}, "could not convert"),
        ({"config": CONFIG.replace("timeout_sec = 5.0", "timeout_sec = 0")}, "verifier.timeout_sec"),
        ({"config": CONFIG.replace("5.0", '5.0\nnetwork_mode = "public"')}, "verifier.network_mode"),
        ({"config": CONFIG + 'os = "windows"\n'}, "environment.os"),
        ({"config": CONFIG.replace("no-network", "allowlist")}, "environment.network_mode"),
        ({"tests__test": None}, "no tests/test.sh"),
        ({"dockerfile": None}, "neither environment.docker_image nor"),
        ({"instruction": None}, "instruction.md"),
    ],
)
def test_what_is_not_taken_is_refused(tmp_path: Path, changed: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        read(tmp_path, **changed)


@pytest.mark.parametrize("name", ["trajectory.json", "environment/docker-compose.yaml", "tests/link"])
def test_links_and_what_needs_more_than_a_container_are_refused(tmp_path: Path, name: str) -> None:
    path = write_task(tmp_path / "add", BASE) / name
    path.symlink_to("/etc/passwd") if name.endswith("link") else path.write_text("{}")
    with pytest.raises(DataError):
        list_directories(tmp_path, ())


def test_a_root_without_tasks_and_a_wrong_name_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no task directory"):
        list_directories(tmp_path, ())
    write_task(tmp_path / "add", BASE)
    with pytest.raises(ConfigError, match="no task directory sub"):
        list_directories(tmp_path, ("sub",))
    with pytest.raises(ValidationError):
        HarborSpec(name="harbor", root=str(tmp_path), sandbox="bubblewrap")  # type: ignore[arg-type]


def test_the_last_by_name_are_held_out(tmp_path: Path) -> None:
    for number in range(12):
        write_task(tmp_path / f"add-{number:02}", BASE)

    def names(split: Split, **settings: Any) -> list[str]:
        task = build_task(HarborSpec(name="harbor", root=str(tmp_path), **settings))
        return [example.fields["task"] for example in task.examples(split)]

    assert names(Split.HELD_OUT) == ["add-10", "add-11"]
    assert names(Split.TRAIN) == [f"add-{number:02}" for number in range(10)]
    assert len(names(Split.HELD_OUT, num_held_out=12)) == 12
    assert names(Split.TRAIN, tasks=("add-03",), num_held_out=0) == ["add-03"]


def test_the_open_network_is_given_where_the_run_says_so(tmp_path: Path) -> None:
    config = CONFIG.replace('"no-network"', '"public"')
    write_task(tmp_path / "add", BASE, config=config)
    for is_open, network in ((False, "none"), (True, "host")):
        own = Harbor(HarborSpec(name="harbor", root=str(tmp_path), open_network=is_open))
        own._task, own._image = list_directories(tmp_path, ())["add"], Image("x", {})
        example = make_example("harbor", {"task": "add"}, None)
        assert own.sandbox_for(example).network == network


@pytest.mark.parametrize(
    ("data", "rewards"),
    [
        *((data, {"reward": float(data)}) for data in (b"1\n", b".5\n", b"-1.", b"+2 ", b"1e-3")),
        (b'{"reward": true, "lint": 1, "x": 0.5}', {"reward": 1.0, "lint": 1.0, "x": 0.5}),
        *((data, None) for data in (b"", b"yes", b"NaN", b'{"reward": "1"}', b"{}", b"[1]", b"1e999")),
        *((data, None) for data in (b"[" * 100_000, b'{"reward": {"a": 1}}', b'{"a": 1' + b"0" * 400 + b"}")),
    ],
)
def test_rewards_are_finite_numbers(data: bytes, rewards: dict[str, float] | None) -> None:
    assert parse_rewards(data) == rewards


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """An image with a shell; what is built on it is removed."""
    tree = tmp_path_factory.mktemp("harbor") / "tree"
    tree.mkdir()
    names = ("sh", "cat", "mkdir", "rm", "chmod", "ls", "base64", "dirname", "sleep", "kill")
    copy_programs(tree, names)
    (tree / "etc").mkdir()
    with imported(tree) as image:
        yield image
        remove_images(*BUILT)


def make(folder: Path, base: str, **changed: str | None) -> Task:
    made = write_task(folder / "tasks/add", base, **changed)
    BUILT.add(f"localhost/strop-harbor:{digest_tree(made / 'environment')[:24]}")
    settings: dict[str, Any] = {"sandbox": "podman", "num_held_out": 0}
    return build_task(HarborSpec(name="harbor", root=str(folder / "tasks"), **settings))


@pytest.mark.slow
@needs_podman
def test_tests_decide_in_the_container_that_was_built(tmp_path: Path, base: str) -> None:
    task = make(tmp_path, base)
    look = call("bash", command="pwd; echo $GREETING; cat notes.txt; ls / /logs; (sleep 100 &)")
    rollout = play(tmp_path, task, look, RIGHT, SUBMIT)
    assert rollout.outcome.reward == 1.0, rollout.outcome
    assert rollout.outcome.metrics["unsealed"] == 1.0
    told = rollout.turns[2].text
    assert told.startswith(told[: told.index("/app")] + "/app\nhello\n2 3\n")
    assert "tests" not in told
    assert "solution" not in told
    assert play(tmp_path, task, SUBMIT).outcome.reward == 0.0


@pytest.mark.slow
@needs_podman
def test_the_solution_is_right_and_nonsense_is_not(tmp_path: Path, base: str) -> None:
    task = make(tmp_path, base)
    assert asyncio.run(self_test(task, task.examples(Split.TRAIN))) == []
    wrong = make(tmp_path, base, solution__solve="#!/bin/sh\necho 6 > answer.txt\n")
    (gold,) = asyncio.run(run_audit(wrong, AuditSettings(probes=("gold",)))).probes
    assert gold.status is ProbeStatus.FAIL


@pytest.mark.slow
@needs_podman
@pytest.mark.parametrize("command", ["rm /usr/bin/cat /usr/bin/chmod", "rm /bin/sh"])
def test_who_breaks_the_tests_earns_nothing(tmp_path: Path, base: str, command: str) -> None:
    task = make(tmp_path, base)
    outcome = play(tmp_path, task, call("bash", command=command), SUBMIT).outcome
    assert (outcome.reward, outcome.failure) == (0.0, None)
    assert outcome.metrics["no_reward"] == 1.0


@pytest.mark.slow
@needs_podman
@pytest.mark.parametrize(
    ("script", "kind"),
    [
        ("exit 0\n", "no_reward"),
        ("sleep 60\n", "no_reward"),
        ("""echo '{"speed": 1, "size": 2}' > /logs/verifier/reward.json\n""", "no_reward"),
        ("echo 2 > /logs/verifier/reward.txt\n", "ceiling"),
    ],
)
def test_no_reward_is_the_tasks_failure(tmp_path: Path, base: str, script: str, kind: str) -> None:
    config = CONFIG.replace("timeout_sec = 5.0", "timeout_sec = 0.5")
    outcome = play(tmp_path, make(tmp_path, base, tests__test=script, config=config), SUBMIT).outcome
    assert failed(outcome) == (FailureOwner.TASK, kind)


@pytest.mark.slow
@needs_podman
def test_time_and_images_end(tmp_path: Path, base: str) -> None:
    task = make(tmp_path, base, config=CONFIG.replace("timeout_sec = 60.0", "timeout_sec = 1.0"))
    rollout = play(tmp_path, task, RIGHT, call("bash", command="sleep 60"), SUBMIT)
    assert rollout.outcome.reward == 1.0, rollout.outcome
    assert "ended after 1 s" in rollout.turns[4].text
    broken = make(tmp_path / "other", base, dockerfile=f"FROM {base}\nCOPY nothing /app/\n")
    outcome = play(tmp_path, broken, SUBMIT).outcome
    assert failed(outcome) == (FailureOwner.INFRA, "no_image")
