"""A training run whose sandboxes Ray places: attempts, grading and evaluation are those of one machine."""

from __future__ import annotations

from pathlib import Path

import pytest

from strop.record.rollouts import read_rollouts
from tests.environments.test_workspace import OWN
from tests.fixtures.attempts import Bench
from tests.fixtures.ray_traces import files_of_nodes, needs_ray
from tests.fixtures.sandboxes import needs_bubblewrap
from tests.fixtures.tiny_model import tiny_model

pytestmark = [pytest.mark.slow, needs_ray, needs_bubblewrap]

RUN = """
name = "boxes"
[model]
uri = "{model}"
dtype = "float32"
[environment]
name = "{code}:Own"
sandbox = "ray"
max_reply_tokens = 8
[train]
steps = 2
prompts_per_step = 1
group_size = 4
checkpoint_every = 2
accept = "weights: a random model for a test; audit: it earns something"
[eval]
every = 2
num_examples = 1
num_samples = 1
[placement]
rollout_workers = 1
threads = 1
"""


def test_a_run_attempts_and_grades_in_sandboxes_of_its_nodes(tmp_path: Path) -> None:
    """More attempts than this machine has processors: each is graded in its own place."""
    before = files_of_nodes()
    code = tmp_path / "own.py"
    code.write_text(OWN)
    model = tiny_model(tmp_path / "model", max_position_embeddings=2048)
    bench = Bench(tmp_path / "bench", RUN.format(model=model, code=code))
    assert bench.end() == 0, bench.log_path.read_text()
    run = bench.only_run()
    outcomes = [one.outcome for step in (1, 2) for one in read_rollouts(run.rollouts_path(step))]
    assert [(one.reward, one.isolation) for one in outcomes] == [(0.0, "namespace")] * 8
    assert files_of_nodes() <= before
