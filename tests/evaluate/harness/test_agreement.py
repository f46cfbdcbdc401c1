"""P1: strop's verdicts on stored replies are those of lm-eval 0.4.13, which judged them in its environment.

Where strop has the harness's rules (gsm8k's modes, math_verify, mbpp and ifeval) no verdict may differ. Its
own rules differ where they mean to: each difference is counted under its reason, and one without a reason
fails, as does a reason without one. Rows and replies are of these tests' own making.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor

import pytest

from strop.rollout import Example, Outcome
from strop.tasks import build_task
from strop.tasks.mathematics.equivalence import harness_math_verify
from tests.evaluate.harness.harness_replies import FORMULA_FORMS, HUMANEVAL_FORMS, MBPP_FORMS, NUMBER_FORMS
from tests.evaluate.harness.harness_world import RecordedRun, Recording

pytestmark = pytest.mark.slow
Reasons = Mapping[str, Callable[[str, bool], bool]]
"""By name: whether it explains that strop's verdict on a reply is this one, and the harness's the other."""

_NUM_JUDGES = 3
_PHRASE = re.compile(r"Final Answer: The final answer is .*\. I hope it is correct\.")
THOUGHTS: Reasons = {
    "a thought without an end holds no answer": lambda reply, ours: (
        not ours and "<think>" in reply and "</think>" not in reply
    ),
    "thoughts are left out": lambda reply, ours: ours and "</think>" in reply,
}
BETWEEN_DOLLARS: Reasons = {
    # The harness takes what is between the first and the last '$', or all where there are not two.
    "no text needs dollars": lambda reply, ours: ours and reply.count("$") < 2 and "boxed" not in reply,
    "the last formula is the answer": lambda reply, ours: (
        ours and reply.count("$") > 2 and "boxed" not in reply
    ),
}


def disagreements(
    run: RecordedRun, theirs: Mapping[str, bool], judge: Callable[[Example, str], bool], reasons: Reasons
) -> Counter[str]:
    """Count differing verdicts by the first reason that holds."""
    assert len(theirs) == len(run.job.examples)
    assert 0 < sum(map(bool, theirs.values())) < len(theirs)
    replies = run.replies
    # At once: a program that is stopped at its limit makes nobody wait.
    with ThreadPoolExecutor(_NUM_JUDGES if run.job.protocol.runs_code else 1) as pool:
        verdicts = list(
            pool.map(lambda example: judge(example, replies[example.example_id]), run.job.examples)
        )
    found: Counter[str] = Counter()
    for example, ours in zip(run.job.examples, verdicts, strict=True):
        reply = replies[example.example_id]
        if ours != bool(theirs[example.example_id]):
            name = next((name for name, holds in reasons.items() if holds(reply, ours)), None)
            found[name or f"none: {ours} on {reply!r} for {example.answer!r}"] += 1
    return found


def outcomes(run: RecordedRun, **settings: str) -> Callable[[Example, str], Outcome]:
    """Return the judgements of our task with other settings, on the same data."""
    spec = run.job.task._spec.model_copy(update=settings)  # type: ignore[attr-defined]
    return build_task(spec).verify


def task_judge(run: RecordedRun, **settings: str) -> Callable[[Example, str], bool]:
    verify = outcomes(run, **settings)
    return lambda example, reply: verify(example, reply).is_correct is True


def test_every_form_of_a_reply_is_judged(recording: Recording) -> None:
    for name, forms, least in (
        ("gsm8k_cot", NUMBER_FORMS, 200),
        ("minerva_math", FORMULA_FORMS, 200),
        ("mbpp", MBPP_FORMS, 36),
        ("humaneval", HUMANEVAL_FORMS, 33),
    ):
        assert len(recording.verdicts[name].replies) >= max(least, len(set(forms)))


@pytest.mark.parametrize(
    ("name", "filter_name", "mode"),
    [
        ("gsm8k_cot", "strict-match", "strict"),
        ("gsm8k_cot", "flexible-extract", "flex"),
        ("gsm8k", "strict-match", "hash"),
        ("gsm8k", "flexible-extract", "flex"),
    ],
)
def test_p1_gsm8k(name: str, filter_name: str, mode: str, recording: Recording) -> None:
    run = recording.verdicts[name]
    theirs = run.verdicts("exact_match", filter_name)
    assert len(theirs) == 210
    assert disagreements(run, theirs, task_judge(run, mode=mode), {}) == {}


def test_p1_minerva_math_by_math_verify(recording: Recording) -> None:
    pytest.importorskip("math_verify", reason="the extra 'tasks' is not installed")
    run = recording.verdicts["minerva_math"]
    theirs = run.verdicts("math_verify")
    assert len(theirs) == 210

    def judge(example: Example, reply: str) -> bool:
        return harness_math_verify(example.fields["solution"], reply)

    assert disagreements(run, theirs, judge, {}) == {}


def test_p1_our_own_verdict_beside_math_verify(recording: Recording) -> None:
    pytest.importorskip("math_verify", reason="the extra 'tasks' is not installed")
    run = recording.verdicts["minerva_math"]
    reasons: Reasons = {
        **THOUGHTS,
        # math-verify looks for LaTeX between delimiters, and for plain numbers.
        "a bare formula is an answer": lambda reply, ours: ours and "$" not in reply and "boxed" not in reply,
        "two blank lines end a reply": lambda reply, ours: ours and "\n\n\n" in reply,
        # math-verify reads a word or a percent sign alone, and not behind 'x ='.
        "a name before the answer is dropped": lambda reply, ours: ours and "x = " in reply,
        "degrees are dropped": lambda reply, ours: ours and r"^\circ" in reply,
        "an unfinished box is no answer": lambda reply, ours: (
            not ours and reply.count("{") > reply.count("}")
        ),
        "a box without braces holds one sign": lambda reply, ours: not ours and r"\boxed " in reply,
        "a number in prose is no answer": lambda reply, ours: (
            not ours and reply.startswith("It costs $5, so")
        ),
    }
    assert disagreements(run, run.verdicts("math_verify"), task_judge(run), reasons) == {
        "a thought without an end holds no answer": 4,
        "a bare formula is an answer": 17,
        "two blank lines end a reply": 4,
        "a name before the answer is dropped": 2,
        "degrees are dropped": 1,
        "an unfinished box is no answer": 1,
        "a box without braces holds one sign": 1,
        "a number in prose is no answer": 2,
    }


def test_p1_our_own_verdict_beside_exact_match_of_minerva_math(recording: Recording) -> None:
    pytest.importorskip("math_verify", reason="the extra 'tasks' is not installed")
    run = recording.verdicts["minerva_math"]
    reasons: Reasons = {
        "the harness reads one phrase only": lambda reply, ours: ours and not _PHRASE.search(reply)
    }
    found = disagreements(run, run.verdicts("exact_match"), task_judge(run), reasons)
    assert found == {"the harness reads one phrase only": 121}


def test_p1_our_own_verdict_beside_hendrycks_math(recording: Recording) -> None:
    pytest.importorskip("math_verify", reason="the extra 'tasks' is not installed")
    run = recording.verdicts["hendrycks_math"]
    theirs = run.verdicts("exact_match")
    assert len(theirs) == 210
    reasons: Reasons = {
        **THOUGHTS,
        **BETWEEN_DOLLARS,
        # The harness takes the answer out of the box of its solution, and not out of the reply's.
        "a box is opened": lambda reply, ours: ours and "boxed" in reply,
    }
    assert disagreements(run, theirs, task_judge(run), reasons) == {
        "a thought without an end holds no answer": 4,
        "thoughts are left out": 4,
        "no text needs dollars": 32,
        "the last formula is the answer": 26,
        "a box is opened": 26,
    }


@pytest.mark.parametrize("name", ["aime24", "aime25"])
def test_p1_our_own_verdict_beside_aime(name: str, recording: Recording) -> None:
    run = recording.verdicts[name]
    theirs = run.verdicts("exact_match")
    assert len(theirs) == 210
    assert disagreements(run, theirs, task_judge(run), {**THOUGHTS, **BETWEEN_DOLLARS}) == {
        "a thought without an end holds no answer": 4,
        "thoughts are left out": 4,
        "no text needs dollars": 36,
        "the last formula is the answer": 22,
    }


def test_p1_mbpp(recording: Recording) -> None:
    run = recording.verdicts["mbpp"]
    theirs = run.verdicts("pass_at_1")
    assert disagreements(run, theirs, task_judge(run, rules="lm-eval"), {}) == {}


def test_p1_our_own_verdict_beside_mbpp(recording: Recording) -> None:
    run = recording.verdicts["mbpp"]
    # The harness runs the reply as it stands, but for its stop string.
    reasons: Reasons = {
        **THOUGHTS,
        "code is taken out of a fence": lambda reply, ours: ours and "```" in reply,
        "prose before code is left out": lambda reply, ours: ours and reply.startswith("Here it is:"),
        "a name must be bound in sight": lambda reply, ours: not ours and reply.startswith("exec("),
    }
    found = disagreements(run, run.verdicts("pass_at_1"), task_judge(run), reasons)
    assert found == {
        "thoughts are left out": 1,
        "code is taken out of a fence": 3,
        "prose before code is left out": 1,
        "a name must be bound in sight": 1,
    }


def test_p1_our_own_verdict_beside_humaneval(recording: Recording) -> None:
    run = recording.verdicts["humaneval"]
    # The harness runs the prompt with the reply behind it, but for its stop strings.
    reasons: Reasons = {
        **THOUGHTS,
        "code is taken out of a fence": lambda reply, ours: ours and "```" in reply,
        "[DONE] ends code": lambda reply, ours: ours and "[DONE]" in reply,
        "a body is indented like the function": lambda reply, ours: (
            ours and reply.strip().startswith("return")
        ),
    }
    found = disagreements(run, run.verdicts("pass@1", "create_test"), task_judge(run), reasons)
    assert found == {
        "thoughts are left out": 1,
        "code is taken out of a fence": 2,
        "[DONE] ends code": 1,
        "a body is indented like the function": 2,
    }


@pytest.mark.parametrize("strictness", ["strict", "loose"])
def test_p1_ifeval(strictness: str, recording: Recording) -> None:
    pytest.importorskip("langdetect", reason="the extra 'tasks' is not installed")
    run = recording.verdicts["ifeval"]
    judged = {item["id"] for example in run.job.examples for item in example.fields["constraints"]}
    assert len(judged) == 25
    theirs = run.verdicts(f"prompt_level_{strictness}_acc")
    assert len(theirs) >= 380
    judge = task_judge(run, rules="lm-eval", strictness=strictness)
    assert disagreements(run, theirs, judge, {}) == {}
    # And how many of a prompt's instructions are followed.
    verify = outcomes(run, rules="lm-eval", strictness=strictness)
    key = "instructions_satisfied" if strictness == "strict" else "instructions_satisfied_loose"
    replies = run.replies
    assert {
        example.example_id: verify(example, replies[example.example_id]).metrics[key]
        for example in run.job.examples
    } == {name: sum(found) for name, found in run.verdicts(f"inst_level_{strictness}_acc").items()}


def test_a_group_has_the_mean_over_all_its_examples(recording: Recording) -> None:
    run = recording.verdicts["minerva_math"]
    result = run.output.result
    assert len(result.parts) == 7
    verdicts = run.verdicts("math_verify")
    assert result.metrics["math_verify,none"].value == pytest.approx(sum(verdicts.values()) / len(verdicts))
    assert (result.num_examples, result.task_version) == (210, "3.1")
