"""The list of submitted jobs and its twin."""

from __future__ import annotations

import multiprocessing
from pathlib import Path

import pytest

from strop.errors import StoreError
from strop.launch.sagemaker.job_log import JobLog, JobRow, submitted_text


def row(job_name: str = "job-1", **changes: object) -> JobRow:
    values = {
        "job_name": job_name,
        "config": "runs/qwen3-1.7B.toml",
        "description": "first try",
        "submitted": "2026-11-21 12:00",
        "run": "qwen3-1.7B",
        "facts": {"run_key": "r1", "job_arn": "arn:1"},
    }
    return JobRow(**{**values, **changes})  # type: ignore[arg-type]


def test_a_row_in_the_table_and_more_in_the_twin(tmp_path: Path) -> None:
    log = JobLog(tmp_path / "docs/job_log.md")
    log.append(row())
    lines = log.path.read_text().splitlines()
    assert lines[-3:] == [
        "| Job Name | Config | Description | Submitted | State |",
        "| --- | --- | --- | --- | --- |",
        "| job-1 | runs/qwen3-1.7B.toml | first try | 2026-11-21 12:00 |  |",
    ]
    assert '"job_arn": "arn:1"' in log.twin_path.read_text()
    assert log.read() == [row()]
    assert submitted_text(1_795_262_400.0) == "2026-11-21 12:00"


def test_a_description_cannot_break_the_table(tmp_path: Path) -> None:
    log = JobLog(tmp_path / "log.md")
    log.append(row(description="a|b\n| c \\| <b>\x1b[31m"))
    assert log.path.read_text().splitlines()[-1] == (
        "| job-1 | runs/qwen3-1.7B.toml | a\\|b<br>\\| c \\\\\\| &lt;b> [31m | 2026-11-21 12:00 |  |"
    )


def test_a_table_that_was_kept_by_hand_is_taken_over(tmp_path: Path) -> None:
    log = JobLog(tmp_path / "log.md")
    log.path.write_text(
        "# Old\n| Job Name | Config | Description | Submitted |\n|---|---|---|---|\n"
        "| old-1 | a.yaml | x \\| y | 2025-01-01 00:00 |\n"
    )
    log.append(row())
    assert [found.job_name for found in log.read()] == ["old-1", "job-1"]
    assert "| old-1 | a.yaml | x \\| y | 2025-01-01 00:00 |  |" in log.path.read_text()


def test_the_table_is_made_anew_from_the_twin(tmp_path: Path) -> None:
    log = JobLog(tmp_path / "log.md")
    log.append(row("job-1"))
    log.path.unlink()
    log.append(row("job-2"))
    assert "| job-1 |" in log.path.read_text()


def test_a_torn_line_takes_nothing_with_it(tmp_path: Path) -> None:
    log = JobLog(tmp_path / "log.md")
    log.append(row("job-1"))
    with log.twin_path.open("a") as file:
        file.write('{"job_name": "jo')
    log.append(row("job-2"))
    assert [found.job_name for found in log.read()] == ["job-1", "job-2"]


def test_states_are_written_once_they_change(tmp_path: Path) -> None:
    log = JobLog(tmp_path / "log.md")
    log.append(row())
    log.note_states({"job-1": "running", "unknown-job": "failed"})
    log.note_states({"job-1": "running"})
    log.note_states({"job-1": "succeeded"})
    assert log.read()[0].state == "succeeded"
    assert len(log.twin_path.read_text().splitlines()) == 3
    assert "| succeeded |" in log.path.read_text()


def _append_many(path: str, first: int) -> None:
    for index in range(first, first + 10):
        JobLog(Path(path)).append(row(f"job-{index:03d}"))


def test_several_processes_lose_no_row(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    workers = [
        context.Process(target=_append_many, args=(str(tmp_path / "log.md"), first)) for first in (0, 10, 20)
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    log = JobLog(tmp_path / "log.md")
    assert sorted(found.job_name for found in log.read()) == [f"job-{index:03d}" for index in range(30)]
    assert log.path.read_text().count("| job-") == 30


def test_a_twin_that_cannot_be_read_is_said(tmp_path: Path) -> None:
    log = JobLog(tmp_path / "log.md")
    log.twin_path.mkdir()
    with pytest.raises(StoreError, match="cannot be read"):
        log.read()
