"""The page tells what the run's files say, in every state a run can be in, and nothing can act in it."""

from __future__ import annotations

import html
import json
import re
import shutil
import xml.etree.ElementTree as ET
from dataclasses import replace
from pathlib import Path

import pytest

from strop.errors import CorruptRecord, StoreError
from strop.evaluate import Validity, result_name, write_result
from strop.record import Event, EventKind
from strop.record.events import ACCEPTED
from strop.record.files import StoreRecord
from strop.record.prediction import write_prediction
from strop.record.rollouts import write_rollouts
from strop.store.local_objects import LocalObjects
from strop.view.alarms import EXPLANATIONS, count_alarms
from strop.view.report import describe_amount, list_fates, render_report, write_report, write_report_of
from strop.view.run_record import choose_rows, compare_ends, read_run_record, sum_stages
from strop.view.terminal import describe_usd
from tests.record.test_prediction import PLANNED
from tests.view.synthetic_run import make_lost_rollout, make_result, make_rollouts, make_run, raise_alarm


def text_of(page: str) -> str:
    """Return the words of a page as a reader sees them, blanks collapsed."""
    body = re.sub(r"<(style|desc)\b.*?</\1>", " ", page, flags=re.DOTALL)
    return " ".join(html.unescape(re.sub(r"<[^>]+>", " ", body)).split())


def page_of(run_dir: Path) -> str:
    return render_report(read_run_record(run_dir))


def test_a_finished_run_shows_before_and_after(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    run.mark_finished()
    path = write_report(run.path)
    assert path == run.path / "report.html"
    text = text_of(path.read_text(encoding="utf-8"))
    # learned(0) = 0.29 + 0.51 / (1 + e^3.6) = 0.3036: 61 of 200 = 30.5 %. learned(40) = 0.7938: 159 of 200.
    assert "30.5% before (step 0)" in text
    assert "79.5% after (step 40)" in text
    assert "+49.0 points" in text
    assert "40 of 40 steps" in text
    assert "finished on" in text
    assert "No alarm was raised." in text
    assert "At the start (after 1 step)" in text
    assert "At the end (after 40 steps)" in text
    assert [p.name for p in run.path.iterdir() if "partial" in p.name] == []


@pytest.mark.parametrize(
    ("terms", "method"),
    [
        ("rl", "grpo"),
        ("sft", "sft"),
        ("rl+sft", "grpo and sft"),
        ("dpo", "cdpo"),
        ("distill", "distillation"),
    ],
)
def test_a_run_is_named_after_what_it_learned_by(tmp_path: Path, terms: str, method: str) -> None:
    run = make_run(tmp_path)
    sections = f'[train]\nterms = "{terms}"\n[dpo]\nloss = "cdpo"\n[algorithm]\nname = "grpo"\n'
    (run.path / "spec.toml").write_text(sections)
    assert f"by {method} " in text_of(write_report(run.path).read_text(encoding="utf-8"))


def test_pairs_have_their_charts(tmp_path: Path) -> None:
    run = make_run(tmp_path, num_steps=0, eval_steps=())
    for step in (1, 2):
        pairs = {"num_pairs": 4.0, "loss": 0.7, "pair_accuracy": 0.5, "pair_margin_nats": 0.1 * step}
        run.metrics.append(step, pairs)
    text = text_of(write_report(run.path).read_text(encoding="utf-8"))
    assert "Loss of the pairs" in text
    assert "Pairs whose better reply gained more" in text
    assert "Margin of the pairs (nats)" in text


def test_parts_have_their_charts_whatever_they_are_called(tmp_path: Path) -> None:
    run = make_run(tmp_path, num_steps=0, eval_steps=())
    assert "By part" not in page_of(run.path)
    for step in (1, 2):
        named = {"reward_mean_a<b": 0.1 * step, "reply_tokens_mean_a<b": 7.0, "reward_part_form": 0.5}
        run.metrics.append(step, {"reward_mean": 0.3, **named})
    page = page_of(run.path)
    assert all(title in page for title in ("By part", "Reward: a&lt;b", "Reply length (tokens): a&lt;b"))
    assert "Part of the reward: form" in page
    assert "a<b" not in page


def test_what_the_learner_knows_of_its_steps_has_charts(tmp_path: Path) -> None:
    titles = [
        "Change of the weights by a step, over the weights",
        "KL to the reference (nats per token)",
        "KL from where the batch began (nats per token)",
        "Tokens stopped at the lower bound",
        "Tokens stopped at the upper bound",
        "Entropy over the vocabulary (nats per token)",
        "Probability ratio of trained tokens",
    ]
    run = make_run(tmp_path, num_steps=2, eval_steps=())
    # A number that was never measured has no chart.
    assert not [title for title in titles if title in render_report(read_run_record(run.path))]
    told = {
        "update_ratio": 1e-4,
        "reference_kl_nats": 0.02,
        "approx_kl_nats": 0.001,
        "clip_low_frac": 0.01,
        "clip_high_frac": 0.02,
        "policy_entropy_nats": 1.5,
        "ratio_p01": 0.8,
        "ratio_p50": 1.0,
        "ratio_p99": 1.25,
    }
    run.metrics.append(3, {"seconds_step": 1.0, **told})
    page = render_report(read_run_record(run.path))
    assert [title for title in titles if title not in page] == []
    for words in ("99th percentile: 1.250", "median: 1.000", "1st percentile: 0.800"):
        assert words in page


def test_the_page_is_well_formed_and_needs_nothing_from_elsewhere(tmp_path: Path) -> None:
    page = page_of(make_run(tmp_path).path)
    # Void elements are closed here only because XML wants it; everything else must be balanced.
    ET.fromstring(
        re.sub(r"<(meta|br)\b([^>]*)>", r"<\1\2/>", page.replace("<!DOCTYPE html>", "")).replace("&rarr;", "")
    )
    assert "<script" not in page
    assert not re.findall(r"(?:src|href)=|url\(|@import|https?://", page)


def test_every_chart_has_words_and_every_id_is_unique(tmp_path: Path) -> None:
    page = page_of(make_run(tmp_path).path)
    ids = re.findall(r'\bid="([^"]+)"', page)
    assert len(ids) == len(set(ids))
    named = re.findall(r'aria-labelledby="([^"]+)"', page)
    assert {word for words in named for word in words.split()} <= set(ids)
    assert page.count('role="img"') == 10
    assert "Held-out, step 20: " in page


def test_text_of_the_model_cannot_act(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    replies = ["<script>alert(1)</script> 12", "\x1b[2J</pre><img src=x> 12", "abc\u202edef"]
    write_rollouts(run.rollouts_path(40), make_rollouts(40, replies, prompt="<b>What?</b>"))
    raise_alarm(run, 3, "<i>detail</i>")
    page = page_of(run.path)
    assert "<script" not in page
    assert "<img" not in page
    assert "<b>What?" not in page
    assert "<i>detail" not in page
    assert "\x1b" not in page
    assert "\u202e" not in page
    assert "&lt;script&gt;alert(1)&lt;/script&gt; 12" in page


def test_a_run_that_has_just_begun_has_a_report(tmp_path: Path) -> None:
    text = text_of(page_of(make_run(tmp_path, num_steps=0, eval_steps=()).path))
    assert "not finished, 0 of 40 steps so far" in text
    assert "No held-out accuracy was measured" in text
    assert "No step is recorded yet." in text


def test_one_evaluation_is_not_a_comparison(tmp_path: Path) -> None:
    text = text_of(page_of(make_run(tmp_path, num_steps=3, eval_steps=(0,)).path))
    assert "measured once, at step 0: 30.5%" in text


def test_nothing_is_concluded_from_an_invalid_result(tmp_path: Path) -> None:
    run = make_run(tmp_path, eval_steps=(0,))
    result = make_result(40, num_solved=150, validity=Validity.TRUNCATION)
    write_result(result, run.path / "eval" / result_name(result))
    text = text_of(page_of(run.path))
    assert "No conclusion" in text
    assert "the one after is invalid: truncation" in text


def test_results_of_another_protocol_are_not_mixed_in(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    other = make_result(60, num_solved=200).model_copy(update={"task_version": "a2"})
    write_result(other, run.path / "eval" / result_name(other))
    assert [result.step for result in read_run_record(run.path).evals] == [0, 20, 40]


def test_the_price_stands_in_the_report(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    write_prediction(run.path, PLANNED)
    assert "USD" not in text_of(page_of(run.path))
    write_prediction(run.path, replace(PLANNED, usd_per_hour=36.0, total_s=1000.0))
    text = text_of(page_of(run.path))
    seconds = sum(line["seconds_step"] for line in run.metrics.read())
    # A cent a second; ten dollars were planned for a thousand.
    assert "Price of the steps" in text
    assert f"{describe_usd(seconds / 100)} at 36.00 USD an hour; planned 10.00 USD" in text
    assert "price of a step" in text


def test_what_was_planned_stands_beside_what_was_measured(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    assert "As planned?" not in text_of(page_of(run.path))
    write_prediction(run.path, replace(PLANNED, hardware="<b>abacus</b>"))
    page = page_of(run.path)
    text = text_of(page)
    assert "As planned?" in text
    # 2 s were planned for generating, and make_metrics draws about 1.9 s; 3.1 GB of 4 GB.
    (ratio,) = re.findall(r"generate 2\.0 s [12]\.\d s (\d\.\d\d)", text)
    assert 0.8 < float(ratio) < 1.1
    assert "memory peak 4.00 GB 3.10 GB 0.78" in text
    assert "Planned before the first step for <b>abacus</b>" in text
    assert "<b>abacus" not in page


def test_amounts_are_said_in_their_unit() -> None:
    assert describe_amount(0.0123, "s") == "12 ms"
    assert describe_amount(75.0, "s") == "1 min 15 s"
    assert describe_amount(2.5e9, "bytes") == "2.50 GB"
    assert describe_amount(1234.5, "tokens/s") == "1,234 tokens/s"


def test_alarms_are_counted_by_cause(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    for step in (12, 13, 30):
        raise_alarm(run, step)
    run.events.append(Event(kind=EventKind.RESUME, step=20, cause="resumed", detail="from step 20"))
    record = read_run_record(run.path)
    (alarm,) = count_alarms(record.events)
    assert (alarm.cause, alarm.num_times, alarm.first_step, alarm.last_step) == ("zero_variance", 3, 12, 30)
    text = text_of(render_report(record))
    assert "zero_variance 3 times, steps 12 to 30 0.97 of all groups have equal rewards" in text
    assert "1 more entry in the run's log" in text


def test_the_example_with_the_widest_rewards_is_shown() -> None:
    # Example b: 1, 0.5, 0 and one without a reward. Best, the one at position 3 // 2 = 1, worst.
    rows = [("a", 0.5), ("b", 0.0), ("b", None), ("a", 0.25), ("b", 1.0), ("b", 0.5)]
    assert choose_rows(rows) == [4, 5, 1]
    assert choose_rows([]) == []
    assert choose_rows([("a", 1.0), ("a", 1.0)]) == [0, 1]
    assert choose_rows([("a", None), ("a", None)]) == [0, 1]


def test_an_unscored_rollout_has_no_reward_on_the_page(tmp_path: Path) -> None:
    run = make_run(tmp_path, num_steps=1, eval_steps=())
    write_rollouts(run.rollouts_path(1), [make_lost_rollout(1)])
    text = text_of(page_of(run.path))
    assert "unscored reward none 4 tokens, infra, timeout" in text


def test_stages_by_hand() -> None:
    metrics = [{"step": 1, "seconds_generate": 1.0, "seconds_learn": 3.0}, {"step": 2, "seconds_learn": 4.0}]
    assert sum_stages(metrics) == {"generate": 1.0, "learn": 7.0}


def test_ends_of_one_step_are_not_compared() -> None:
    one = make_result(20, num_solved=50)
    assert compare_ends([one, one]) is None
    ends = compare_ends([make_result(0, num_solved=50), make_result(20, num_solved=100)])
    assert ends is not None
    assert ends.change is not None
    # The same 200 examples: 50 more are solved, 50 / 200 = 0.25.
    assert ends.change.estimate == pytest.approx(0.25)


def test_what_is_not_a_run_is_refused_and_nothing_is_written(tmp_path: Path) -> None:
    with pytest.raises(StoreError):
        write_report(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_damaged_record_is_named_and_the_old_report_stays(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    path = write_report(run.path)
    before = path.read_bytes()
    (run.path / "eval" / "arithmetic-step-000020.json").write_text("{}")
    with pytest.raises(CorruptRecord, match=r"arithmetic-step-000020\.json is not a complete result"):
        write_report(run.path)
    assert path.read_bytes() == before


def test_eva_6_a_plot_that_does_not_show_the_whole_run_says_so(tmp_path: Path) -> None:
    """Incident: the plot ended before the training reward collapsed."""
    whole = make_run(tmp_path / "whole", num_steps=40)
    shown = render_report(read_run_record(whole.path))
    steps = re.search(r"The charts show the whole run, steps 1 to (\d+)\.", shown)
    assert steps is not None
    assert int(steps[1]) == 40
    lines = (whole.path / "metrics.jsonl").read_text().splitlines(keepends=True)
    (whole.path / "metrics.jsonl").write_text("".join(lines[:10]))
    assert "Cut short: the charts show steps 1 to 10 of the 40 of the run." in render_report(
        read_run_record(whole.path)
    )


def test_an_alarm_is_explained(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    raise_alarm(run, 12)
    run.events.append(Event(kind=EventKind.TRIPWIRE, step=13, cause="of a later version", detail="x"))
    run.events.append(Event(kind=EventKind.ROLLOUT_LOST, step=13, cause="TypeError", detail="y"))
    counted = {alarm.cause: alarm for alarm in count_alarms(read_run_record(run.path).events)}
    assert "they teach nothing" in counted["zero_variance"].explanation
    assert "could not be scored" in counted["TypeError"].explanation
    assert counted["of a later version"].explanation == ""
    text = text_of(page_of(run.path))
    assert "0.97 of all groups have equal rewards In almost all groups" in text


def test_every_alarm_of_the_page_about_them_is_explained() -> None:
    page = (Path(__file__).parents[2] / "docs" / "alarms.md").read_text(encoding="utf-8")
    rows = [line.split("|")[1] for line in page.splitlines() if line.startswith("| `")]
    named = {name for cell in rows for name in re.findall(r"`(\w+)`", cell)}
    # It has a page of its own, with the engines.
    assert named | {"weight_canary"} == set(EXPLANATIONS)
    assert all(text.endswith(".") for text in EXPLANATIONS.values())


def test_gate_and_audit_stand_before_the_first_step(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    assert "Before the first step" not in text_of(page_of(run.path))
    run.events.append(Event(kind=EventKind.GATE, step=0, cause="parity", detail="0.02 <b>nats</b>"))
    assert "1 check passed." in text_of(page_of(run.path))
    failed = Event(kind=EventKind.GATE, step=0, cause="weights", detail=f"{ACCEPTED}loss 6.6: <b>a test</b>")
    run.events.append(failed)
    # A second attempt passes its gate too, and is not counted with the first.
    run.events.append(Event(kind=EventKind.GATE, step=0, cause="parity", detail="0.02 <b>nats</b>"))
    text = text_of(page_of(run.path))
    assert "1 check passed. 1 failed and was accepted." in text
    assert "weights accepted although it failed: loss 6.6: <b>a test</b>" in text
    probes = [
        {"probe": "noop", "status": "pass", "detail": "no reply"},
        {"probe": "echo", "status": "fail", "detail": "<i>the prompt</i> is paid"},
        {"probe": "cost", "status": "n/a", "detail": ""},
    ]
    audit = {"verdict": "red", "probes": probes, "accepted": [{"probe": "echo", "reason": "known"}]}
    (run.path / "audit.json").write_text(json.dumps(audit))
    page = page_of(run.path)
    text = text_of(page)
    assert "The audit of the task is red : 1 probe found nothing, 1 found something." in text
    assert "echo fail, accepted: known <i>the prompt</i> is paid" in text
    assert "parity 0.02 <b>nats</b>" in text
    assert "<i>" not in page
    assert "<b>" not in page
    for damaged in ("[]", "{"):
        (run.path / "audit.json").write_text(damaged)
        with pytest.raises(CorruptRecord, match=r"audit\.json is damaged"):
            page_of(run.path)


def test_fates_are_summed_up(tmp_path: Path) -> None:
    run = make_run(tmp_path, num_steps=0, eval_steps=())
    assert "What became of the samples" not in text_of(page_of(run.path))
    fates = {"failed_frac": 0.1, "num_evicted_groups": 3.0, "staleness_mean": 0.5, "staleness_max": 2.0}
    run.metrics.append(1, fates)
    run.metrics.append(2, {"failed_frac": 0.2, "staleness_mean": 1.0, "staleness_max": 1.0})
    assert list_fates(run.metrics.read()) == [
        ("Rollouts that could not be scored", "15.0%"),
        ("Groups discarded: too old when their step came", "3"),
        ("Steps that rollouts were behind the weights", "0.75 in the mean, 2 at most"),
    ]
    assert "What became of the samples Rollouts that could not be scored 15.0%" in text_of(page_of(run.path))


def test_a_run_that_only_a_file_evaluated_shows_that(tmp_path: Path) -> None:
    run = make_run(tmp_path, eval_steps=())
    for step in (0, 40):
        result = make_result(step, num_solved=50 + step)
        write_result(result, run.path / "eval" / f"later.{result_name(result)}")
    assert "25.0% before (step 0)" in text_of(page_of(run.path))
    own = make_result(40, num_solved=100)
    write_result(own, run.path / "eval" / result_name(own))
    assert "measured once, at step 40: 50.0%" in text_of(page_of(run.path))


def test_a_mirror_has_the_report_of_its_run(tmp_path: Path) -> None:
    run = make_run(tmp_path / "runs")
    shutil.copytree(run.path, tmp_path / "store" / run.path.name / "traces", symlinks=True)
    place = str(tmp_path / "store" / run.path.name)
    mirror = StoreRecord(LocalObjects(), place, run=run.path.name)
    path = write_report_of(run.path.name, mirror, tmp_path)
    assert path == tmp_path / f"{run.path.name}-report.html"
    assert path.read_bytes() == write_report(run.path).read_bytes()
