"""`strop submit EVAL.toml` on a real cluster: shared by two nodes, preempted, gone on with, and fetched."""

from __future__ import annotations

from pathlib import Path

import pytest

from strop.cli import main
from strop.evaluate import EvalResult
from strop.launch.contract import JobState
from strop.launch.job_dir import job_path_of, read_ref
from tests.fixtures.drill import preempt
from tests.fixtures.evaluation_jobs import (
    WHOLE_TABLE,
    alone,
    find_shards,
    hold,
    results,
    table,
    write_evaluation,
)
from tests.launch.slurm.plans import ALL_ENDS, LoginNode, slurm_log, verdict

__all__ = ["alone"]
pytestmark = pytest.mark.slow


def test_a_preempted_evaluation_on_two_nodes_ends_as_one_that_was_left_alone(
    login: LoginNode,
    tiny_model_dir: Path,
    alone: dict[str, EvalResult],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(login.root / "state"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.chdir(login.root)
    site = f'[sites.cluster]\nbackend = "slurm"\npython = "{login.python}"\ncpus_per_gpu = 1\n'
    (login.root / "strop-sites.toml").write_text(site)
    write_evaluation(login.root, tiny_model_dir)
    words = ["submit", "EVAL.toml", "--on", "cluster", "--no-snapshot", "--gpus", "0", "--nodes", "2"]
    assert main([*words, "--time", "15m"]) == 0, capsys.readouterr().err
    (home,) = (path for path in (login.root / "runs").iterdir() if path.is_dir())
    ref = read_ref(job_path_of(home))
    hold("--part 0/2", str(home))
    login.wait_until(lambda: find_shards(home))
    preempt(login.backend, ref)
    status = login.wait_for(ref, *ALL_ENDS, attempt=1)
    assert status.state is JobState.SUCCEEDED, slurm_log(ref)
    ends = [verdict(login, ref, number) for number in (0, 1)]
    assert [(end["exit_code"], end["nodes"]) for end in ends] == [(75, ["n1", "n2"]), (0, ["n1", "n2"])]
    capsys.readouterr()
    assert main(["logs", str(home), "--role", "eval"]) == 0
    said = capsys.readouterr().out
    for number in (0, 1):
        assert f"shares {number} to {number} of 2 are asked here" in said
    assert "are kept from before" in said
    assert main(["fetch", str(home), "--to", str(tmp_path / "fetched")]) == 0
    assert results(tmp_path / "fetched") == alone
    assert table(tmp_path / "fetched") == WHOLE_TABLE
