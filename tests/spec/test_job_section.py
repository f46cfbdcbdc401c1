"""What a job may ask for, and how its GPUs are shared out."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strop.errors import ConfigError
from strop.io.variables import level_variables, log_level_of
from strop.spec import load_spec
from strop.spec.job import JobSpec, format_duration, parse_duration_s

SMALL = 'name = "x"\ntask.name = "arithmetic"\n'


@pytest.fixture
def run_file(tmp_path: Path) -> str:
    path = tmp_path / "run.toml"
    path.write_text(SMALL)
    return str(path)


@pytest.mark.parametrize(
    ("given", "roles"),
    [
        ({}, {}),
        ({"gpus": 0}, {}),
        ({"gpus": 8}, {"train": 8}),
        ({"train_gpus": 2}, {"infer": 1, "train": 2}),
        ({"infer_gpus": 7}, {"infer": 7, "train": 1}),
        ({"train_gpus": 4, "infer_gpus": 4}, {"infer": 4, "train": 4}),
        ({"single_gpu": True}, {"train": 1}),
        ({"single_gpu": True, "train_gpus": 1, "infer_gpus": 1}, {"train": 1}),
    ],
)
def test_the_gpus_of_a_node_are_shared_out(given: dict[str, int], roles: dict[str, int]) -> None:
    job = JobSpec.model_validate(given)
    assert job.gpu_roles == roles
    assert job.gpus_per_node == sum(roles.values())


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["job.gpus=2", "job.train_gpus=1"], "the GPUs are shared out in two ways"),
        (["job.gpus=1", "job.single_gpu=true"], "the GPUs are shared out in two ways"),
        (["job.single_gpu=true", "job.infer_gpus=2"], "one GPU cannot be several"),
        (["job.gpus=65"], "job.gpus=65 (override) is not allowed"),
        (["job.train_gpus=65"], "job.train_gpus=65 (override)"),
        (["job.infer_gpus=0"], "job.infer_gpus=0 (override)"),
        (["job.gpus=2", "job.env_gpus=-1"], "job.env_gpus=-1 (override)"),
        (["job.gpus=2", "job.judge_gpus=1"], "the run starts 0 judges"),
        (["job.gpus=2", "job.nodes=2", "job.infer_nodes=2"], "no node is left to learn"),
        (["job.cpus_per_gpu=33"], "job.cpus_per_gpu=33 (override)"),
        (["job.cpu_nodes=1"], "nodes and what runs on them belong together"),
        (["job.cpu_command='true'"], "nodes and what runs on them belong together"),
        (["job.cpu_nodes=1", "job.cpu_command=serve 'unclosed"], "No closing quotation"),
        (["job.memory='64 GB'"], "job.memory='64 GB' (override)"),
        (["job.memory=64"], "write job.memory as a text"),
        (["job.time_limit='10'"], "job.time_limit='10' (override): it is no length of time"),
        (["job.time_limit='2h; rm'"], "90s, 30m, 2h, 5d, HH:MM:SS or D-HH:MM:SS"),
        (["job.time_limit='0s'"], "a limit above 0"),
        (["job.grace_s=0"], "job.grace_s=0 (override)"),
        (["job.max_requeue=-1"], "job.max_requeue=-1 (override)"),
        (["job.max_silence_s=0"], "job.max_silence_s=0 (override)"),
        (["job.preflight='all'"], "'none', 'quick', 'compute'"),
        (["job.gpu=1"], "did you mean job.gpus"),
    ],
)
def test_what_no_job_can_ask_for_is_refused_with_its_origin(
    run_file: str, overrides: list[str], words: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        load_spec(run_file, overrides)
    assert words in str(caught.value)


def test_the_job_is_no_part_of_what_was_asked_for(run_file: str) -> None:
    from strop.spec import spec_digest

    small = load_spec(run_file)
    large = load_spec(run_file, ["job.nodes=4", "job.gpus=8"])
    assert spec_digest(small.spec) == spec_digest(large.spec)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("90s", 90.0),
        ("1.5h", 5400.0),
        ("30m", 1800.0),
        ("5d", 432000.0),
        # 2 * 3600 + 30 * 60.
        ("2:30:00", 9000.0),
        # 86400 + 12 * 3600.
        ("1-12:00:00", 129600.0),
        ("100:00:01", 360001.0),
    ],
)
def test_what_people_write_by_hand(text: str, seconds: float) -> None:
    assert parse_duration_s(text) == seconds


@pytest.mark.parametrize(
    "text", ["", "90", "10:00", "2 h", "-1h", "1:60:00", "1h30m", "nan", "1e3s", "h", "1H"]
)
def test_what_has_two_meanings_or_none_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="allowed: 90s, 30m, 2h, 5d"):
        parse_duration_s(text)


@given(st.floats(min_value=0.0, max_value=3.2e7, allow_nan=False))
def test_a_formatted_duration_reads_back_rounded_up(seconds: float) -> None:
    assert parse_duration_s(format_duration(seconds)) == math.ceil(seconds)


def test_the_form_of_schedulers_by_hand() -> None:
    assert [format_duration(one) for one in (0.0, 59.2, 3600.0, 90061.0)] == [
        "00:00:00",
        "00:01:00",
        "01:00:00",
        # One day, one hour, one minute, one second.
        "1-01:01:01",
    ]


# How much the roles log.


@pytest.mark.parametrize(
    ("text", "levels"),
    [
        ("none", (None, None, None)),
        ("debug", ("debug", "debug", "debug")),
        ("engine=debug", (None, "debug", None)),
        ("warning,engine=debug,judge=error", ("warning", "debug", "error")),
    ],
)
def test_a_log_level_is_of_all_roles_or_of_one(
    run_file: str, text: str, levels: tuple[str | None, ...]
) -> None:
    output = load_spec(run_file, [f"output.log_level={text}"]).spec.output
    assert tuple(log_level_of(output.log_level, role) for role in ("train", "engine", "judge")) == levels


@pytest.mark.parametrize("text", ["loud", "engine=loud", "cook=debug", "debug,warning", "engine"])
def test_other_log_levels_are_refused(run_file: str, text: str) -> None:
    with pytest.raises(ConfigError, match=r"output\.log_level="):
        load_spec(run_file, [f"output.log_level={text}"])


@pytest.mark.parametrize(("level", "is_told"), [("debug", True), ("error", False), (None, False)])
def test_a_process_logs_from_the_level_that_it_or_its_parent_says(level: str | None, is_told: bool) -> None:
    code = "import logging, sys; from strop.io.variables import log_from; log_from(sys.argv[1] or None);"
    code += " logging.getLogger('library').info('told')"
    for own, variable in ((level or "", None), ("", level)):
        environment = {**os.environ, **level_variables(variable)}
        words = [sys.executable, "-c", code, own]
        done = subprocess.run(words, capture_output=True, text=True, check=True, env=environment)
        assert ("INFO library: told" in done.stderr) == is_told
