"""The page of a comparison says what `strop compare` says, and nothing can act in it."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from strop.errors import StoreError
from strop.evaluate import write_result
from strop.record import RunDir
from strop.view.comparison import write_comparison
from tests.view.synthetic_run import make_result, make_run
from tests.view.test_report import text_of


def make_arm(root: Path, rate: str, num_solved: int, **more: str) -> RunDir:
    """Write a run whose last evaluation solves so many of 200 examples."""
    run = make_run(root, eval_steps=(0,))
    settings = "".join(f"{key} = {value}\n" for key, value in more.items())
    (run.path / "spec.toml").write_text(
        f'name = "arithmetic"\n[task]\nname = "arithmetic"\n{settings}[optimizer]\nlr = {rate}\n'
    )
    result = make_result(40, num_solved=num_solved)
    write_result(result, run.path / "eval" / "arithmetic-step-000040.json")
    return run


def test_runs_stand_beside_each_other(tmp_path: Path) -> None:
    base, better, same = (
        make_arm(tmp_path, rate, num_solved)
        for rate, num_solved in (("1e-5", 100), ("1e-4", 140), ("1e-6", 100))
    )
    path = write_comparison([base.path, better.path, same.path], tmp_path)
    assert path == tmp_path / "comparison.html"
    page = path.read_text(encoding="utf-8")
    text = text_of(page)
    assert f"compared with {base.path.name} on the same held-out examples" in text
    # 140 of 200 where it were 100 of the same: 70.0 %, 20 points more.
    assert f"{better.path.name} greedy accuracy 50.0% 70.0% +20.0%" in text
    assert f"{same.path.name} greedy accuracy 50.0% 50.0% +0.0%" in text
    assert "p (Holm) holds for both comparisons together" in text
    assert "optimizer.lr 1e-05 0.0001 1e-06" in text
    for title in ("Held-out accuracy", "Training accuracy", "Reward", "Step time (seconds)"):
        assert f"{title} {base.path.name} {better.path.name} {same.path.name}" in text
    assert [found.name for found in tmp_path.iterdir() if "partial" in found.name] == []


def test_the_page_is_well_formed_and_nothing_can_act_in_it(tmp_path: Path) -> None:
    base = make_arm(tmp_path, "1e-5", 100)
    hostile = make_arm(tmp_path, "1e-5", 100, stop='["<script>alert(1)</script>", "\\u202e"]')
    page = write_comparison([base.path, hostile.path], tmp_path).read_text(encoding="utf-8")
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in page
    assert "<script" not in page
    assert "\u202e" not in page
    assert not re.findall(r"(?:src|href)=|url\(|@import|https?://", page)
    ET.fromstring(re.sub(r"<meta\b([^>]*)>", r"<meta\1/>", page.replace("<!DOCTYPE html>", "")))
    ids = re.findall(r'\bid="([^"]+)"', page)
    assert len(ids) == len(set(ids))


def test_stored_results_have_no_curves(tmp_path: Path) -> None:
    for name, num_solved in (("a", 100), ("b", 120)):
        write_result(make_result(40, num_solved=num_solved), tmp_path / f"{name}.json")
    page = write_comparison([tmp_path / "a.json", tmp_path / "b.json"], tmp_path).read_text(encoding="utf-8")
    assert "b.json greedy accuracy 50.0% 60.0% +10.0%" in text_of(page)
    assert "How it went" not in text_of(page)


def test_what_cannot_be_compared_has_no_page(tmp_path: Path) -> None:
    base, other = make_arm(tmp_path, "1e-5", 100), make_run(tmp_path, eval_steps=())
    with pytest.raises(StoreError, match="has no evaluation"):
        write_comparison([base.path, other.path], tmp_path)
    assert not (tmp_path / "comparison.html").exists()
