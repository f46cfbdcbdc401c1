"""lm-eval's mmlu and our mmlu-choice on one real model, item by item: prompts, likelihoods and verdicts."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping, Sequence
from contextlib import redirect_stderr
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from strop.cli import main
from strop.errors import CorruptRecord, DataError
from strop.evaluate import EvalResult, read_result
from strop.evaluate.harness import LM_EVAL, PROTOCOLS, HarnessJob, refuse_small_model
from strop.evaluate.harness.result import read_output
from strop.evaluate.harness.run import harness_command, stage_rows, write_task_files
from strop.record.rollouts import read_rollouts
from strop.rollout import FinishReason, Rollout, Split
from strop.tasks import build_task
from strop.tasks.mmlu import MmluChoiceSpec
from tests.conftest import require_system_part
from tests.fixtures.tiny_tokenizer import tiny_tokenizer

Row = Mapping[str, Any]
LETTERS = "ABCD"
FACTS: Mapping[str, Sequence[tuple[str, str, tuple[str, str, str]]]] = {
    "astronomy": (
        ("Which body does the Moon travel around?", "The Earth", ("Mars", "The Sun alone", "Venus")),
        ("What is at the center of the solar system?", "The Sun", ("The Moon", "Jupiter", "A comet")),
        ("Which planet has large, bright rings?", "Saturn", ("Mercury", "Mars", "Venus")),
        ("What does a telescope gather?", "Light", ("Sound", "Water", "Dust")),
        ("What is a light year?", "A distance", ("A span of time", "A speed", "A weight")),
        ("Which planet is nearest to the Sun?", "Mercury", ("Neptune", "Saturn", "Mars")),
        ("What color does Mars look to the eye?", "Red", ("Green", "Blue", "White")),
        ("What are comets mostly made of?", "Ice and dust", ("Gold", "Wood", "Liquid iron")),
        ("Why do we see the Moon?\n", "It reflects sunlight", ("It burns", "It is hot", "It is wet")),
    ),
    "high_school_geography": (
        ("Which line runs around the middle of the Earth?", "The equator", ("A river", "A coast", "A road")),
        ("What does a river end in, as a rule?", "A sea or a lake", ("A mountain", "A cloud", "A road")),
        ("Which is a continent?", "Africa", ("Paris", "The Nile", "The Alps")),
        ("What is a desert short of?", "Water", ("Sand", "Wind", "Sunlight")),
        ("Which of these is a large city?", "Tokyo", ("Asia", "The Amazon", "The Sahara")),
        ("Where is it cold all year?", "At the poles", ("At the equator", "In Cairo", "In Mumbai")),
        ("What is an island surrounded by?", "Water", ("Forest", "Sand", "Houses")),
        ("Which country has Rome as its capital?", "Italy", ("Spain", "Norway", "Japan")),
        ("What does a map's scale tell?", "Distances", ("Temperatures", "Prices", "Ages")),
    ),
}
NUM_SHOWN = 5
NUM_ASKED = 12
# Nats. Both compute in float32, in another order of sums: lm-eval feeds each choice with its prompt, eight
# rows at once; strop feeds the prompt once.
TOLERANCE_NATS = 5e-4


def row(subject: str, number: int) -> Row:
    question, right, wrong = FACTS[subject][number]
    answer = (7 * number + len(subject)) % len(LETTERS)
    choices = [*wrong[:answer], right, *wrong[answer:]]
    return {"question": question, "subject": subject, "choices": choices, "answer": answer}


def write_data(folder: Path) -> Path:
    folder.mkdir(parents=True)
    numbers = [(subject, number) for subject, facts in FACTS.items() for number in range(len(facts))]
    rows = {
        "dev": [row(subject, number) for subject, number in numbers if number < NUM_SHOWN],
        "test": [row(subject, number) for subject, number in numbers if number >= NUM_SHOWN],
    }
    # Of 18 facts, ten are shown and eight asked, four of them again with their choices the other way round.
    rows["test"] += [
        {**item, "choices": item["choices"][::-1], "answer": 3 - item["answer"]} for item in rows["test"][:4]
    ]
    assert len(rows["test"]) == NUM_ASKED
    for split, members in rows.items():
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(item) + "\n" for item in members))
    return folder


def make_job(folder: Path, model_path: Path) -> HarnessJob:
    return HarnessJob(
        protocol=PROTOCOLS["mmlu"],
        task=build_task(MmluChoiceSpec(name="mmlu-choice", source=str(folder))),
        model_path=model_path,
        model_digest="m",
        step=0,
        dtype="float32",
        max_positions=8192,
        num_examples=None,
    )


def test_the_harness_is_told_our_rows_and_what_to_show(tmp_path: Path) -> None:
    job = make_job(write_data(tmp_path / "data"), tmp_path)
    digest = stage_rows(job, tmp_path)
    package = tmp_path / "env" / "lib" / "python3.11" / "site-packages" / "lm_eval"
    package.mkdir(parents=True)
    names = write_task_files(job.protocol, tmp_path, tmp_path / "env")
    assert names == ["strop_mmlu_astronomy", "strop_mmlu_high_school_geography"]
    place = tmp_path / "rows" / "mmlu_astronomy"
    shown = [json.loads(line) for line in (place / "dev.jsonl").read_text().splitlines()]
    assert [(item["question"], item["answer"]) for item in shown[:2]] == [
        (FACTS["astronomy"][0][0], 9 % 4),
        (FACTS["astronomy"][1][0], 16 % 4),
    ]
    written = json.loads((tmp_path / "tasks" / "mmlu_astronomy.yaml").read_text())
    assert written["include"] == str(package / "tasks" / "mmlu" / "default" / "mmlu_astronomy.yaml")
    assert (written["training_split"], written["fewshot_split"]) == (None, "dev")
    words = harness_command(job, tmp_path)
    assert words[words.index("--num_fewshot") + 1] == "5"
    assert "--gen_kwargs" not in words
    assert stage_rows(job, tmp_path) == digest
    refuse_small_model(replace(job, max_positions=512))


def test_too_few_to_show_and_unknown_subjects_are_refused(tmp_path: Path) -> None:
    folder = write_data(tmp_path / "data")
    lines = (folder / "dev.jsonl").read_text().splitlines(keepends=True)
    (folder / "dev.jsonl").write_text("".join(lines[:4]))
    with pytest.raises(
        DataError, match=r"mmlu_astronomy shows 5 solved examples, and the dev split has 4\. "
    ):
        stage_rows(make_job(folder, tmp_path), tmp_path)
    odd = {**row("astronomy", 0), "subject": "gardening"}
    (folder / "test.jsonl").write_text(json.dumps(odd) + "\n")
    with pytest.raises(DataError, match=r"of the subject 'gardening'\. Allowed: abstract_algebra, .* Next: "):
        stage_rows(make_job(folder, tmp_path), tmp_path)


def test_generated_replies_are_not_believed_where_likelihoods_are_asked_for(tmp_path: Path) -> None:
    job = make_job(write_data(tmp_path / "data"), tiny_tokenizer(tmp_path / "model"))
    names = ["strop_mmlu_astronomy"]
    (name,) = names
    found: dict[str, Any] = {
        "results": {name: {"acc,none": 0.5, "acc_stderr,none": 0.1}},
        "configs": {name: {"generation_kwargs": {"max_gen_toks": 32, "until": ["\n"]}}},
        "versions": {name: 1.0},
        "n-shot": {name: 5},
        "n-samples": {name: {"effective": NUM_ASKED}},
        "config": {"fewshot_seed": 42},
    }
    place = tmp_path / "out" / "__model"
    place.mkdir(parents=True)
    lines = [
        {
            "doc": {"example_id": example.example_id},
            "arguments": {"gen_args_0": {"arg_0": job.protocol.prompt(example), "arg_1": " A"}},
            "resps": [[["-1.0", "True"]]],
        }
        for example in job.examples
    ]
    (place / f"samples_{name}_x.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))

    def write(configs: Mapping[str, Any]) -> None:
        (place / "results_x.json").write_text(json.dumps({**found, "configs": configs}))

    write({name: {}})
    result = read_output(job, tmp_path / "out", names, "d").result
    assert (result.metrics["acc,none"].value, result.truncated_frac, result.stops) == (0.5, 0.0, ())
    write(found["configs"])
    with pytest.raises(
        CorruptRecord, match=r"shots, budget and seed .* are \(5, 32, 42\), pinned are \(5, None"
    ):
        read_output(job, tmp_path / "out", names, "d")


@dataclass(frozen=True, kw_only=True)
class Agreement:
    """What both said of the same questions."""

    theirs: Mapping[str, Mapping[str, Any]]
    """lm-eval's logged samples by example id."""
    their_result: Mapping[str, Any]
    ours: Mapping[str, Rollout]
    our_result: EvalResult


@pytest.fixture(scope="module")
def agreement(tmp_path_factory: pytest.TempPathFactory, smollm2_dir: Path) -> Agreement:
    # Two gigabytes in the user's cache: `make harness-deps` makes them, no test does.
    require_system_part("the environment of lm-eval (make harness-deps)", LM_EVAL.is_ready())
    folder = tmp_path_factory.mktemp("choices")
    words = ["eval", str(smollm2_dir), "--split", "held_out", "--out", str(folder), "model.dtype=float32"]
    words += ["model.prompt_format=base", f"source={write_data(folder / 'data')}"]
    with pytest.MonkeyPatch.context() as patch, redirect_stderr(io.StringIO()):
        patch.setenv("STROP_OFFLINE", "1")
        assert main([*words, "--task", "mmlu-choice", "num_few_shot=5"]) == 0
        # By transformers: vLLM computes a prompt anew for each of its choices.
        assert main([*words, "--task", "mmlu", "--harness", "lm-eval", "harness.engine=hf"]) == 0
    stem = folder / "lm-eval-mmlu-step-000000"
    samples = [json.loads(line) for line in stem.with_suffix(".samples.jsonl").read_text().splitlines()]
    (kept,) = (folder / "mmlu-choice-step-000000").glob("*.parquet")
    return Agreement(
        theirs={sample["doc"]["example_id"]: sample for sample in samples},
        their_result=json.loads(stem.with_suffix(".json").read_text()),
        ours={rollout.example.example_id: rollout for rollout in read_rollouts(kept)},
        our_result=read_result(folder / "mmlu-choice-step-000000.json"),
    )


@pytest.mark.slow
def test_the_prompts_with_five_shown_examples_are_the_harnesses_byte_for_byte(agreement: Agreement) -> None:
    assert len(agreement.theirs) == NUM_ASKED
    for example_id, sample in agreement.theirs.items():
        prompt, reply = agreement.ours[example_id].turns
        asked = [argument for _, argument in sorted(sample["arguments"].items())]
        assert {argument["arg_0"] for argument in asked} == {prompt.text}
        assert [argument["arg_1"] for argument in asked] == [" A", " B", " C", " D"]
        assert (reply.finish_reason, len(reply.token_ids)) == (FinishReason.CHOSEN, 1)


@pytest.mark.slow
def test_the_likelihood_of_every_choice_is_the_harnesses(agreement: Agreement) -> None:
    for example_id, sample in agreement.theirs.items():
        theirs = [float(response[0][0]) for response in sample["resps"]]
        metrics = agreement.ours[example_id].outcome.metrics
        assert [metrics[f"choice_{index}_nats"] for index in range(4)] == pytest.approx(
            theirs, abs=TOLERANCE_NATS
        )


@pytest.mark.slow
def test_every_verdict_is_the_harnesses(agreement: Agreement) -> None:
    verdicts = {example_id: sample["acc"] == 1.0 for example_id, sample in agreement.theirs.items()}
    assert 0 < sum(verdicts.values()) < NUM_ASKED
    # No disagreement is explained away: a tie within the tolerance would show here.
    assert {
        example_id: rollout.outcome.is_correct for example_id, rollout in agreement.ours.items()
    } == verdicts
    accuracy = agreement.our_result.greedy.accuracy
    assert accuracy == pytest.approx(sum(verdicts.values()) / NUM_ASKED)
    assert agreement.their_result["metrics"]["acc,none"]["value"] == pytest.approx(accuracy)
    assert (agreement.their_result["num_examples"], agreement.their_result["num_fewshot"]) == (NUM_ASKED, 5)
    assert set(agreement.their_result["parts"]) == {"mmlu_astronomy", "mmlu_high_school_geography"}


@pytest.mark.slow
def test_the_examples_have_the_answers_of_the_rows(agreement: Agreement) -> None:
    for example_id, sample in agreement.theirs.items():
        example = agreement.ours[example_id].example
        assert LETTERS[sample["doc"]["answer"]] == example.answer
        assert Split.HELD_OUT is agreement.our_result.split
