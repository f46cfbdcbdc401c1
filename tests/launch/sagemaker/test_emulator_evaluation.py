"""An evaluation on an instance, which goes on with its replies after a stop."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from strop.evaluate import EvalResult
from strop.launch.evaluating import evaluating_role
from strop.launch.sagemaker.local_mode import Emulator
from strop.spec import load_spec
from strop.spec.eval_file import read_eval_file
from tests.fixtures.evaluation_jobs import (
    NUM_SHARDS,
    WHOLE_TABLE,
    alone,
    results,
    table,
    write_evaluation,
)
from tests.launch.sagemaker.rehearsal import Rehearsal
from tests.launch.sagemaker.test_emulator import HOST, LIMIT_S, wait_until

__all__ = ["alone"]
pytestmark = pytest.mark.slow


def run_path(emulator: Emulator, host: str) -> Path:
    """Return the run's directory on a host's own disk, once it is there."""
    folder = emulator.root / host / "scratch/runs"
    wait_until(lambda: any(folder.glob("*")), "it did not start")
    return next(folder.iterdir())


def test_an_evaluation_goes_on_after_a_stop(
    rehearsal: Rehearsal, tiny_model_dir: Path, alone: dict[str, EvalResult]
) -> None:
    path = write_evaluation(rehearsal.root, tiny_model_dir)
    spec = load_spec(None, ["name=two", "task.name=arithmetic"]).spec
    request = rehearsal.submit(
        command="eval",
        roles=(evaluating_role(spec, read_eval_file(path, is_job=True), sys.executable, may_run_code=False),),
        evaluation=read_eval_file(path, is_job=True),
        variables={"HF_HUB_OFFLINE": "1"},
        local=True,
    )
    first = rehearsal.start(request)
    kept = rehearsal.folder.path_of(request["CheckpointConfig"]["S3Uri"].rstrip("/")) / "eval"
    met = run_path(first, HOST)
    wait_until(
        lambda: any(met.glob("eval/two.*/examples-*.parquet")) or first.poll() is not None, "none came"
    )
    assert first.stop() == 75, first.log_of(HOST)
    assert 0 < len(list(kept.rglob("*.parquet"))) < NUM_SHARDS
    second = rehearsal.start(request)
    assert second.wait(LIMIT_S) == 0, second.log_of(HOST)
    assert second.check_end() == []
    assert "are kept from before" in second.log_of(HOST)
    # As it comes home: what the platform has copied.
    assert results(kept.parent / "record") == results(kept.parent / "eval") == alone
    assert table(kept.parent / "record") == WHOLE_TABLE
