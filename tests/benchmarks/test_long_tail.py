"""Attempts of very different lengths on simulated time: sampling ahead keeps engine and learner at work."""

from __future__ import annotations

from pathlib import Path

from benchmarks.long_tail import run_once
from strop.tokenizer import Tokenizer
from tests.fixtures.tiny_tokenizer import tiny_tokenizer


def test_long_attempts_hold_up_neither_engine_nor_learner(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(tiny_tokenizer(tmp_path / "chat"))
    waiting, ahead = (run_once(tokenizer, number, 5, "continue", num_prompts=1) for number in (0, 4))
    assert waiting.longest_turns > 40 * waiting.shortest_turns
    # No attempt was cut, left out or too old, however long: the batches are those of the synchronous run.
    assert (ahead.num_evicted, waiting.staleness_max) == (0, 0)
    assert 0 < ahead.staleness_max <= 4
    assert (ahead.longest_turns, ahead.shortest_turns) == (waiting.longest_turns, waiting.shortest_turns)
    assert ahead.step_s < 0.5 * waiting.step_s
    assert ahead.learner_frac > 2 * waiting.learner_frac
    assert ahead.rows_frac > 2 * waiting.rows_frac
