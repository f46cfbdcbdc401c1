"""One real model, asked by lm-eval 0.4.13 and by strop on the same rows: prompts, replies, verdicts.

Equal weights, prompts, stops and budget; greedy, in float32 on CPU. lm-eval's data are in a folder, and
nothing is fetched.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from strop.cli import main
from strop.evaluate.harness import HarnessResult
from strop.record.rollouts import read_rollouts
from strop.rollout import FinishReason, Rollout
from tests.evaluate.harness.asking import ask, samples_of

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("harness_python")]
PAIRS = ((3, 4), (5, 2), (10, 6), (7, 7))
"""Of apples. The model adds all but the last rightly."""
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
TOLERANCE_NATS = 5e-4
"""Both compute in float32, in another order of sums."""
GSM8K = ("openai/gsm8k", ("main",), ("train", "test"))
MMLU = ("cais/mmlu", tuple(FACTS), ("dev", "test"))


def write_repository(folder: Path, of: tuple[str, Sequence[str], Sequence[str]], rows: Any) -> None:
    """Write a data set as the hub has it; `rows`: by configuration and split."""
    name, configurations, splits = of
    text = "configs:\n"
    for one in configurations:
        text += f"- config_name: {one}\n  data_files:\n"
        for split in splits:
            text += f"  - split: {split}\n    path: {one}/{split}.jsonl\n"
            path = folder / name / one / f"{split}.jsonl"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("".join(json.dumps(row) + "\n" for row in rows[one][split]))
    (folder / name / "README.md").write_text(f"---\n{text}---\n")


def write_own(folder: Path, rows: Mapping[str, Sequence[Any]]) -> Path:
    """Write the same rows for strop's task."""
    folder.mkdir()
    for split, of_split in rows.items():
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in of_split))
    return folder


def ask_own(model: Path, out: Path, *words: str) -> list[Rollout]:
    """Return the rollouts of strop's task."""
    asked = ["eval", str(model), "--split", "held_out", "--out", str(out), *words]
    # A random cut makes it invalid, and the replies are there.
    main([*asked, "model.dtype=float32", "model.prompt_format=base"])
    (kept,) = out.glob("*/*.parquet")
    return read_rollouts(kept)


def ask_harness(model: Path, folder: Path, task: str, *words: str) -> HarnessResult:
    include = (f"harness.include={folder}", "harness.engine=hf", "model.dtype=float32")
    return ask(model, folder / "out", task, *include, *words)


def test_sums_in_words(tmp_path: Path, smollm2_dir: Path) -> None:
    asked = "Tom has {} apples and buys {} more. How many apples does he have now?"
    rows = {
        "test": [
            {"question": asked.format(a, b), "answer": f"{a} + {b} = {a + b}\n#### {a + b}"} for a, b in PAIRS
        ],
        "train": [{"question": "And?", "answer": "#### 1"}],
    }
    write_repository(tmp_path, GSM8K, {"main": rows})
    source = f"source={write_own(tmp_path / 'own', rows)}"
    # Without shown examples, which lm-eval's task file has.
    limits = ("harness.num_few_shot=0", "harness.max_reply_tokens=64")
    result = ask_harness(smollm2_dir, tmp_path, "gsm8k_cot", *limits)
    own = ("--task", "gsm8k", source, "mode=strict", "max_reply_tokens=64")
    ours = {str(one.example.fields["question"]): one for one in ask_own(smollm2_dir, tmp_path / "out", *own)}
    samples = [one for one in samples_of(tmp_path / "out", "gsm8k_cot") if one["filter"] == "strict-match"]
    assert len(samples) == len(PAIRS)
    num_cut = 0
    for sample in samples:
        rollout = ours[sample["doc"]["question"]]
        prompt, reply = rollout.turns
        asked_with = sample["arguments"]["gen_args_0"]
        assert asked_with["arg_0"] == prompt.text
        text = reply.text
        for stop in asked_with["arg_1"]["until"]:
            text = text.partition(stop)[0]
        assert sample["resps"] == [[text]]
        assert rollout.outcome.is_correct is (sample["exact_match"] == 1.0)
        num_cut += reply.finish_reason is FinishReason.LENGTH
    assert result.truncated_frac == num_cut / len(PAIRS)


def test_choices_by_their_likelihood(tmp_path: Path, smollm2_dir: Path) -> None:
    def row(subject: str, number: int) -> dict[str, Any]:
        question, right, wrong = FACTS[subject][number]
        answer = (7 * number + len(subject)) % 4
        choices = [*wrong[:answer], right, *wrong[answer:]]
        return {"question": question, "subject": subject, "choices": choices, "answer": answer}

    rows = {
        subject: {
            "dev": [row(subject, number) for number in range(NUM_SHOWN)],
            "test": [row(subject, number) for number in range(NUM_SHOWN, len(facts))],
        }
        for subject, facts in FACTS.items()
    }
    write_repository(tmp_path, MMLU, rows)
    joined = {split: [one for of in rows.values() for one in of[split]] for split in ("dev", "test")}
    source = f"source={write_own(tmp_path / 'own', joined)}"
    rollouts = ask_own(smollm2_dir, tmp_path / "out", "--task", "mmlu-choice", source, "num_few_shot=5")
    ours = {str(one.example.fields["question"]): one for one in rollouts}
    verdicts = []
    for subject in FACTS:
        task = f"mmlu_{subject}"
        result = ask_harness(smollm2_dir, tmp_path, task, "harness.num_few_shot=5")
        assert (result.num_fewshot, result.max_reply_tokens, result.truncated_frac) == (5, None, None)
        for sample in samples_of(tmp_path / "out", task):
            rollout = ours.pop(sample["doc"]["question"])
            prompt, reply = rollout.turns
            asked = [argument for _, argument in sorted(sample["arguments"].items())]
            assert {argument["arg_0"] for argument in asked} == {prompt.text}
            assert [argument["arg_1"] for argument in asked] == [" A", " B", " C", " D"]
            assert (reply.finish_reason, len(reply.token_ids)) == (FinishReason.CHOSEN, 1)
            theirs = [float(response[0][0]) for response in sample["resps"]]
            metrics = rollout.outcome.metrics
            assert [metrics[f"choice_{index}_nats"] for index in range(4)] == pytest.approx(
                theirs, abs=TOLERANCE_NATS
            )
            assert rollout.outcome.is_correct is (sample["acc"] == 1.0)
            verdicts.append(sample["acc"])
    assert not ours
    assert 0 < sum(verdicts) < len(verdicts)
