"""strop and lm-eval 0.4.13 on the same prompts and the same replies, in lm-eval's own environment.

P2: what the harness asks is, byte for byte, what strop says it asks. P1: strop's verdicts on the stored
replies are the harness's; each disagreement is listed with its reason, and a reason without one fails.
P3: `strop eval --harness lm-eval` from end to end. Rows and replies are of these tests' own making.
"""

from __future__ import annotations

import asyncio
import io
import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stderr
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from strop.cli import main
from strop.engine import Completion, GenerationRequest
from strop.evaluate.harness import GENERATING, LM_EVAL, PROTOCOLS
from strop.launch.inference import open_model, read_asking, serve_model
from strop.rollout import Example, FinishReason, Sampling, Split
from strop.tasks import build_task
from strop.tasks.mathematics.equivalence import harness_math_verify
from tests.conftest import require_system_part
from tests.evaluate.harness.harness_world import RecordedRun, make_spec, run_recorded, write_data
from tests.fixtures.tiny_model import tiny_model

pytestmark = pytest.mark.slow
Reasons = Mapping[str, Callable[[str], bool]]


@pytest.fixture(scope="module")
def harness_python() -> Path:
    # Two gigabytes in the user's cache: `make harness-deps` makes them, no test does.
    require_system_part("the environment of lm-eval (make harness-deps)", LM_EVAL.is_ready())
    return LM_EVAL.python


@pytest.fixture(scope="module")
def small_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model with room for the harness's prompts and budgets, and a name with published scores."""
    path = tmp_path_factory.mktemp("model") / "Qwen" / "Qwen3-1.7B-Base"
    path.parent.mkdir()
    return tiny_model(path, max_position_embeddings=8192)


@pytest.fixture(scope="module")
def runs(
    tmp_path_factory: pytest.TempPathFactory, small_model: Path, harness_python: Path
) -> Mapping[tuple[str, int], RecordedRun]:
    return run_recorded(tmp_path_factory.mktemp("recorded"), small_model, harness_python)


def pinned(runs: Mapping[tuple[str, int], RecordedRun], name: str) -> RecordedRun:
    return runs[name, PROTOCOLS[name].num_fewshot]


def disagreements(
    run: RecordedRun, theirs: Mapping[str, bool], judge: Callable[[Example, str], bool], reasons: Reasons
) -> Counter[str]:
    """Count differing verdicts by the first reason that holds for the reply."""
    found: Counter[str] = Counter()
    for example in run.job.examples:
        reply = run.replies[example.example_id]
        if judge(example, reply) != bool(theirs[example.example_id]):
            found[next((name for name, holds in reasons.items() if holds(reply)), f"none: {reply!r}")] += 1
    return found


def task_judge(run: RecordedRun, **settings: str) -> Callable[[Example, str], bool]:
    """Return the verdicts of our task with other settings, on the same data."""
    spec = run.job.task._spec.model_copy(update=settings)  # type: ignore[attr-defined]
    task = build_task(spec)
    return lambda example, reply: task.verify(example, reply).is_correct is True


@pytest.mark.parametrize("name", GENERATING)
def test_p2_prompts_without_shown_examples_are_ours_byte_for_byte(
    name: str, runs: Mapping[tuple[str, int], RecordedRun]
) -> None:
    run = runs[name, 0]
    assert run.prompts == {
        example.example_id: PROTOCOLS[name].prompt(example) for example in run.job.examples
    }


@pytest.mark.parametrize("name", [name for name, protocol in GENERATING.items() if protocol.num_fewshot])
def test_p2_shown_examples_stand_before_our_prompt(
    name: str, runs: Mapping[tuple[str, int], RecordedRun]
) -> None:
    run = pinned(runs, name)
    head = PROTOCOLS[name].prompt(run.job.examples[0]).split()[0]
    for example in run.job.examples:
        prompt, ours = run.prompts[example.example_id], PROTOCOLS[name].prompt(example)
        assert prompt.endswith(f"\n\n{ours}")
        assert prompt.count(f"{head} ") + prompt.count(f"{head}\n") >= PROTOCOLS[name].num_fewshot + 1
    # Shown are the same examples, or drawn ones.
    shown = {
        run.prompts[example.example_id].removesuffix(PROTOCOLS[name].prompt(example))
        for example in run.job.examples
    }
    assert (len(shown) == 1) is not PROTOCOLS[name].draws_shown


@pytest.mark.parametrize(
    ("name", "filter_name", "mode"),
    [
        ("gsm8k_cot", "strict-match", "strict"),
        ("gsm8k_cot", "flexible-extract", "flex"),
        ("gsm8k", "strict-match", "hash"),
        ("gsm8k", "flexible-extract", "flex"),
    ],
)
def test_p1_gsm8k(
    name: str, filter_name: str, mode: str, runs: Mapping[tuple[str, int], RecordedRun]
) -> None:
    run = pinned(runs, name)
    theirs = run.verdicts("exact_match", filter_name)
    assert 0 < sum(theirs.values()) < len(theirs) == 24
    assert disagreements(run, theirs, task_judge(run, mode=mode), {}) == {}


def test_p1_minerva_math(runs: Mapping[tuple[str, int], RecordedRun]) -> None:
    pytest.importorskip("math_verify", reason="the extra 'tasks' is not installed")
    run = pinned(runs, "minerva_math")
    theirs = run.verdicts("math_verify")
    assert 0 < sum(theirs.values()) < len(theirs) == 19

    def judge(example: Example, reply: str) -> bool:
        return harness_math_verify(example.fields["solution"], reply)

    assert disagreements(run, theirs, judge, {}) == {}
    # strop's own verdict finds answers where math-verify looks for LaTeX only.
    reasons: Reasons = {"a bare formula is an answer": lambda reply: reply.startswith("I think")}
    found = disagreements(run, theirs, task_judge(run), reasons)
    assert found == {"a bare formula is an answer": 1}


@pytest.mark.parametrize("name", ["aime24", "aime25"])
def test_p1_aime(name: str, runs: Mapping[tuple[str, int], RecordedRun]) -> None:
    run = pinned(runs, name)
    reasons: Reasons = {
        # The harness compares the whole reply where it sees no formula.
        "a number in a sentence is an answer": lambda reply: reply.startswith("I think"),
    }
    found = disagreements(run, run.verdicts("exact_match"), task_judge(run), reasons)
    assert found == {"a number in a sentence is an answer": 1}


@pytest.mark.parametrize(
    ("name", "metric", "filter_name", "differing"),
    [
        ("mbpp", "pass_at_1", "none", {"strop takes code out of a fence": 1}),
        (
            *("humaneval", "pass@1", "create_test"),
            {"strop takes code out of a fence": 1, "[DONE] ends code in strop": 1},
        ),
    ],
)
def test_p1_code(
    name: str,
    metric: str,
    filter_name: str,
    differing: Mapping[str, int],
    runs: Mapping[tuple[str, int], RecordedRun],
) -> None:
    run = pinned(runs, name)
    theirs = run.verdicts(metric, filter_name)
    assert 0 < sum(theirs.values()) < len(theirs)
    # The harness runs the reply as it stands, but for its stop strings: neither mark is Python.
    reasons: Reasons = {
        "strop takes code out of a fence": lambda reply: "```" in reply,
        "[DONE] ends code in strop": lambda reply: "[DONE]" in reply,
    }
    assert disagreements(run, theirs, task_judge(run), reasons) == differing


@pytest.mark.parametrize("strictness", ["strict", "loose"])
def test_p1_ifeval(strictness: str, runs: Mapping[tuple[str, int], RecordedRun]) -> None:
    pytest.importorskip("langdetect", reason="the extra 'tasks' is not installed")
    run = pinned(runs, "ifeval")
    theirs = run.verdicts(f"prompt_level_{strictness}_acc")
    assert 0 < sum(theirs.values()) < len(theirs) == 36
    judge = task_judge(run, rules="lm-eval", strictness=strictness)
    assert disagreements(run, theirs, judge, {}) == {}


def test_a_group_has_the_mean_over_all_its_examples(
    runs: Mapping[tuple[str, int], RecordedRun],
) -> None:
    run = pinned(runs, "minerva_math")
    result = run.output.result
    assert len(result.parts) == 7
    verdicts = run.verdicts("math_verify")
    assert result.metrics["math_verify,none"].value == pytest.approx(sum(verdicts.values()) / len(verdicts))
    assert (result.num_examples, result.task_version) == (19, "3.1")


@dataclass(frozen=True, kw_only=True)
class Generated:
    """What `strop eval --harness lm-eval` left behind, with the model's own replies."""

    data: Mapping[str, Path]
    result: Mapping[str, Any]
    samples: Sequence[Mapping[str, Any]]
    said: str
    """On standard error."""


@pytest.fixture(scope="module")
def generated(tmp_path_factory: pytest.TempPathFactory, small_model: Path, harness_python: Path) -> Generated:
    folder = tmp_path_factory.mktemp("generated")
    data = write_data(folder / "data")
    words = ["eval", str(small_model), "--harness", "lm-eval", "--task", "gsm8k_cot", "--split", "held_out"]
    words += ["--limit", "4", "--out", str(folder), f"source={data['gsm8k']}", "model.dtype=float32"]
    with pytest.MonkeyPatch.context() as patch, redirect_stderr(io.StringIO()) as said:
        patch.setenv("STROP_OFFLINE", "1")
        assert main(words) == 0
    stem = folder / "lm-eval-gsm8k_cot-step-000000"
    lines = stem.with_suffix(".samples.jsonl").read_text().splitlines()
    return Generated(
        data=data,
        result=json.loads(stem.with_suffix(".json").read_text()),
        samples=[json.loads(line) for line in lines],
        said=said.getvalue(),
    )


def test_p3_from_end_to_end_and_judged_again(generated: Generated) -> None:
    result = generated.result
    assert (result["num_examples"], result["num_fewshot"], result["max_reply_tokens"]) == (4, 4, 1024)
    assert result["stops"] == ["Q:", "</s>", "<|im_end|>"]
    assert len(generated.samples) == 2 * 4
    modes = {"strict-match": "strict", "flexible-extract": "flex"}
    for sample in generated.samples:
        task = build_task(make_spec("gsm8k_cot", generated.data, mode=modes[sample["filter"]]))
        (example,) = (
            example
            for example in task.examples(Split.HELD_OUT)
            if example.example_id == sample["doc"]["example_id"]
        )
        outcome = task.verify(example, sample["resps"][0][0])
        assert outcome.is_correct is (sample["exact_match"] == 1.0)


def test_p3_four_examples_are_not_compared_with_the_published_score(generated: Generated) -> None:
    wanted = "gsm8k_cot strict-match: not compared with the published 54.13 % ± 1.37: num_examples is 4 here"
    assert wanted in " ".join(generated.said.split())


def test_p3_our_engine_gives_the_same_replies(generated: Generated, small_model: Path) -> None:
    """Same weights, prompts, stops and budget, greedy, in float32."""
    asking = read_asking(
        "gsm8k", [f"source={generated.data['gsm8k']}", "model.dtype=float32"], Split.HELD_OUT
    )
    said = {row["arguments"]["gen_args_0"]["arg_0"]: row["resps"][0][0] for row in generated.samples}

    async def ask(prompts: Sequence[str]) -> list[Completion]:
        async with serve_model(asking.spec, open_model(str(small_model))) as (engine, tokenizer):
            requests = [
                GenerationRequest(
                    prompt_ids=tokenizer.encode(prompt),
                    seed=0,
                    sampling=Sampling(temperature=0.0),
                    max_tokens=generated.result["max_reply_tokens"],
                    stop_token_ids=tokenizer.stop_token_ids,
                    stop_strings=tuple(generated.result["stops"]),
                )
                for prompt in prompts
            ]
            return list(await asyncio.gather(*map(engine.generate, requests)))

    replies = asyncio.run(ask(list(said)))
    assert {prompt: reply.text for prompt, reply in zip(said, replies, strict=True)} == said
    num_cut = sum(reply.finish_reason is FinishReason.LENGTH for reply in replies)
    assert num_cut / len(replies) == generated.result["truncated_frac"]
