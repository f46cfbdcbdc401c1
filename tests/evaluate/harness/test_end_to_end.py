"""P3: `strop eval --harness lm-eval` with a real model, from end to end, and the same by our own engine.

Equal weights, prompts, stops and budget; greedy, in float32 on CPU. So every reply and verdict must be the
same, not only the score.
"""

from __future__ import annotations

import asyncio
import io
import json
from collections.abc import Mapping, Sequence
from contextlib import redirect_stderr
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from strop.cli import main
from strop.engine import Completion
from strop.rollout import Example, FinishReason, Sampling, Split
from strop.run.inference import open_model, read_setup, serve_model
from strop.tasks import build_task
from tests.evaluate.harness.harness_world import make_spec
from tests.fixtures.builders import request_for

pytestmark = pytest.mark.slow
PAIRS = ((3, 4), (5, 2), (10, 6), (7, 7))
"""Of apples. The model adds all but the last rightly."""
NUM_EXAMPLES = len(PAIRS)
MODES = {"strict-match": "strict", "flexible-extract": "flex"}


@dataclass(frozen=True, kw_only=True)
class Generated:
    """What `strop eval --harness lm-eval` left behind, with the model's own replies."""

    model: Path
    data: Mapping[str, Path]
    result: Mapping[str, Any]
    samples: Sequence[Mapping[str, Any]]
    said: str
    """On standard error."""

    def example(self, sample: Mapping[str, Any]) -> Example:
        """Return the example of our task that was asked."""
        task = build_task(make_spec("gsm8k_cot", self.data))
        (found,) = (
            example
            for example in task.examples(Split.HELD_OUT)
            if example.example_id == sample["doc"]["example_id"]
        )
        return found

    def judge(self, sample: Mapping[str, Any], reply: str) -> bool:
        """Judge a reply by our task, as the sample's filter does."""
        task = build_task(make_spec("gsm8k_cot", self.data, mode=MODES[sample["filter"]]))
        return task.verify(self.example(sample), reply).is_correct is True


@pytest.fixture(scope="module")
def generated(tmp_path_factory: pytest.TempPathFactory, smollm2_dir: Path, harness_python: Path) -> Generated:
    folder = tmp_path_factory.mktemp("generated")
    # A name with published scores.
    model = folder / "Qwen" / "Qwen3-1.7B-Base"
    model.parent.mkdir()
    model.symlink_to(smollm2_dir)
    asked = "Tom has {} apples and buys {} more. How many apples does he have now?"
    rows = [
        {"question": asked.format(a, b), "answer": f"{a} + {b} = {a + b}\n#### {a + b}"} for a, b in PAIRS
    ]
    (folder / "test.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "train.jsonl").write_text(json.dumps({"question": "And?", "answer": "#### 1"}) + "\n")
    words = ["eval", str(model), "--harness", "lm-eval", "--task", "gsm8k_cot", "--split", "held_out"]
    words += ["--num-examples", str(NUM_EXAMPLES), "--out", str(folder), f"source={folder}"]
    with pytest.MonkeyPatch.context() as patch, redirect_stderr(io.StringIO()) as said:
        patch.setenv("STROP_OFFLINE", "1")
        assert main([*words, "model.dtype=float32"]) == 0
    stem = folder / "lm-eval-gsm8k_cot-step-000000"
    lines = stem.with_suffix(".samples.jsonl").read_text(encoding="utf-8").split("\n")[:-1]
    return Generated(
        model=model,
        data={"gsm8k": folder},
        result=json.loads(stem.with_suffix(".json").read_text()),
        samples=[json.loads(line) for line in lines],
        said=said.getvalue(),
    )


def test_p3_from_end_to_end_and_judged_again(generated: Generated) -> None:
    result = generated.result
    ran = (result["num_examples"], result["num_fewshot"], result["max_reply_tokens"], result["dtype"])
    assert ran == (NUM_EXAMPLES, 4, 1024, "float32")
    assert result["stops"] == ["Q:", "</s>", "<|im_end|>"]
    assert len(generated.samples) == 2 * NUM_EXAMPLES
    verdicts = [sample["exact_match"] == 1.0 for sample in generated.samples]
    assert verdicts == [generated.judge(sample, sample["resps"][0][0]) for sample in generated.samples]
    # The model is right at times, and wrong at times.
    assert 0 < sum(verdicts) < len(verdicts)
    for name in MODES:
        found = [sample["exact_match"] for sample in generated.samples if sample["filter"] == name]
        assert result["metrics"][f"exact_match,{name}"]["value"] == pytest.approx(sum(found) / NUM_EXAMPLES)


def test_p3_few_examples_are_not_compared_with_the_published_score(generated: Generated) -> None:
    wanted = f"not compared with the published 54.13 % ± 1.37: num_examples is {NUM_EXAMPLES} here"
    assert f"gsm8k_cot strict-match: {wanted}" in " ".join(generated.said.split())


def test_p3_our_engine_gives_the_same_replies_and_verdicts(generated: Generated) -> None:
    words = [f"source={generated.data['gsm8k']}", "model.dtype=float32", "placement.threads=1"]
    setup = read_setup("gsm8k", words, Split.HELD_OUT)
    said = {row["arguments"]["gen_args_0"]["arg_0"]: row["resps"][0][0] for row in generated.samples}

    async def ask(prompts: Sequence[str]) -> list[Completion]:
        async with serve_model(setup.spec, open_model(str(generated.model))) as (engine, tokenizer):
            requests = [
                request_for(
                    tokenizer.encode(prompt),
                    max_tokens=generated.result["max_reply_tokens"],
                    seed=0,
                    stops=tokenizer.stop_token_ids,
                    sampling=Sampling(temperature=0.0),
                    stop_strings=tuple(generated.result["stops"]),
                )
                for prompt in prompts
            ]
            return list(await asyncio.gather(*map(engine.generate, requests)))

    replies = dict(zip(said, asyncio.run(ask(list(said))), strict=True))
    assert {prompt: reply.text for prompt, reply in replies.items()} == said
    for sample in generated.samples:
        reply = replies[sample["arguments"]["gen_args_0"]["arg_0"]]
        assert generated.judge(sample, reply.text) is (sample["exact_match"] == 1.0)
    num_cut = sum(reply.finish_reason is FinishReason.LENGTH for reply in replies.values())
    assert num_cut / len(replies) == generated.result["truncated_frac"]
