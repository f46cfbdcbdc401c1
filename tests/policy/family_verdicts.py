"""What strop makes of a family of models, measured on a small one, and the table of docs/models.md.

`python -m tests.policy.family_verdicts docs/models.md` writes the table anew behind the page's mark.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from transformers.models.auto.modeling_auto import AutoModelForCausalLM

from strop.engine.native import NativeEngine
from strop.errors import ConfigError, split_error
from strop.policy.language_model import LanguageModel
from strop.policy.learner import Learner
from strop.policy.packing import PackedGroup
from strop.rollout import IntArray
from strop.spec.train import OptimizerSpec
from strop.tokenizer import Tokenizer
from tests.fixtures.builders import request_for
from tests.fixtures.families import FAMILIES, NOT_BUILT, family_model
from tests.policy.worlds import Gradients, World, reinforce

MARK = "<!-- Written by tests/policy/family_verdicts.py; what stands below is replaced. -->"
MAX_GAP_NATS = 1e-5
MAX_STEP_GAP_NATS = 1e-4
"""Of generation: states that are computed step by step round otherwise than in one pass."""
MIN_COSINE = 0.999999

_SECTIONS = {
    "packed": "Packed",
    "alone": "Each sequence by itself",
    "refused": "Refused",
    "not tried": "Not tried",
}


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """How a family is run, and how exactly."""

    run: str
    """A name of `_SECTIONS`."""
    why: str = ""
    scoring_nats: float = 0.0
    """Largest gap of a log-probability, of a batch of prompts with replies against each sequence alone."""
    generating_nats: float = 0.0
    """The same of what the engine reports of its own replies."""
    cosine: float = 1.0
    """Between the gradients of all weights."""

    def is_exact(self, slack: float = 1.0) -> bool:
        """Whether it is as exact as promised, or almost; what is not run needs not be."""
        is_near = (
            self.scoring_nats <= slack * MAX_GAP_NATS and self.generating_nats <= slack * MAX_STEP_GAP_NATS
        )
        return is_near and self.cosine >= MIN_COSINE


def measure_family(model_dir: Path) -> Verdict:
    """Load a model, learn, score and generate with it, and compare with its own forward."""
    try:
        with warnings.catch_warnings():
            # Models that are run one by one say so.
            warnings.simplefilter("ignore", RuntimeWarning)
            model = LanguageModel.load(model_dir, dtype=torch.float32)
    except ConfigError as refusal:
        reason = split_error(str(refusal))[0].replace(str(model_dir), "it")
        return Verdict(run="refused", why=reason.partition(" cannot be run exactly: ")[2] or reason)
    groups = make_groups()
    own = Own(model_dir)
    # So small a micro-batch that the batch is cut.
    learner = Learner(model, OptimizerSpec(), micro_batch_positions=20)
    scored = np.concatenate(learner.score(groups, 1.0))
    gradients = learner.gradients(groups, temperature=1.0, token_terms=reinforce)
    expected, own_gradients = own.learn(groups)
    replies = generate(model, model_dir, groups)
    gaps = [logprobs - own.logprobs(prompt, reply) for prompt, reply, logprobs in replies]
    return Verdict(
        run="packed" if model.shape.alone_because is None else "alone",
        why=model.shape.alone_because or "",
        scoring_nats=float(np.abs(scored - expected).max()),
        generating_nats=float(np.abs(np.concatenate(gaps)).max()),
        cosine=cosine(gradients, own_gradients),
    )


def make_groups() -> list[PackedGroup]:
    """Return prompts with replies of many lengths, up to 13 tokens together; windows of 8 end before."""
    world = World(3)
    return [
        world.packed(7, [6, 1], advantage=1.0),
        world.packed(1, [9], advantage=-0.7),
    ]


def list_sequences(groups: Iterable[PackedGroup]) -> list[tuple[IntArray, IntArray, float]]:
    """Return each prompt with each of its replies, and the weight of its log-probabilities in the loss."""
    return [
        (group.prompt_ids, reply.token_ids, -reply.advantage * reply.weight)
        for group in groups
        for reply in group.replies
    ]


class Own:
    """The model by transformers alone: eager attention, one sequence at a time."""

    def __init__(self, model_dir: Path) -> None:
        module: Any = AutoModelForCausalLM.from_pretrained(
            model_dir, dtype=torch.float32, attn_implementation="eager"
        )
        self.module = module.eval()
        embeddings = self.module.get_input_embeddings()
        embeddings.padding_idx = None

    def logprobs(self, prompt: IntArray, reply: IntArray) -> np.ndarray:
        """Return the log-probability of each token of a reply."""
        with torch.no_grad():
            return self._logprobs(prompt, reply).numpy()

    def learn(self, groups: Iterable[PackedGroup]) -> tuple[np.ndarray, Gradients]:
        """Return the log-probability of each token of the replies, and the gradient of every weight."""
        found = []
        for prompt, reply, weight in list_sequences(groups):
            logprobs = self._logprobs(prompt, reply)
            (weight * logprobs.sum()).backward()  # type: ignore[no-untyped-call]
            found.append(logprobs.detach().numpy())
        gradients = {name: one.grad for name, one in self.module.named_parameters() if one.grad is not None}
        return np.concatenate(found), gradients

    def _logprobs(self, prompt: IntArray, reply: IntArray) -> torch.Tensor:
        token_ids = torch.from_numpy(np.concatenate([prompt, reply])).long()
        logits = self.module(input_ids=token_ids[None, :-1], use_cache=False).logits[0].float()
        places = torch.arange(len(prompt) - 1, len(token_ids) - 1)
        return torch.log_softmax(logits, dim=-1)[places, token_ids[places + 1]]


def generate(
    model: LanguageModel, model_dir: Path, groups: Sequence[PackedGroup]
) -> list[tuple[IntArray, IntArray, np.ndarray]]:
    """Sample two replies to each prompt, in an engine of fewer rows.

    Returns prompt, reply and what the engine says are its log-probabilities.
    """
    tokenizer = Tokenizer.load(model_dir)
    requests = [
        request_for(group.prompt_ids, max_tokens=8, seed=seed, stops=tokenizer.stop_token_ids)
        for group in groups
        for seed in range(2)
    ]

    async def ask() -> list[tuple[IntArray, IntArray, np.ndarray]]:
        engine = NativeEngine(model, tokenizer, max_num_seqs=3)
        replies = await asyncio.gather(*(engine.generate(request) for request in requests))
        await engine.close()
        pairs = zip(requests, replies, strict=True)
        return [(request.prompt_ids, reply.token_ids, reply.logprobs) for request, reply in pairs]

    return asyncio.run(ask())


def cosine(actual: Gradients, expected: Gradients) -> float:
    """Return the cosine between two gradients of a whole model."""
    dot = sum(float((actual[name].double() * one.double()).sum()) for name, one in expected.items())
    norms = [sum(float(one.double().square().sum()) for one in part.values()) for part in (actual, expected)]
    return dot / float(np.sqrt(norms[0] * norms[1]))


def measure_all(families: Iterable[str] = FAMILIES) -> dict[str, Verdict]:
    """Measure families of the installed transformers."""
    # A second one costs small models more than it gives.
    torch.set_num_threads(1)
    found = {}
    for name in sorted(families):
        if name in NOT_BUILT:
            found[name] = Verdict(run="not tried", why=NOT_BUILT[name])
            continue
        with tempfile.TemporaryDirectory() as folder:
            try:
                model_dir = family_model(Path(folder), name)
            except Exception as error:
                found[name] = Verdict(run="not tried", why=f"no small one is built ({type(error).__name__})")
                continue
            found[name] = measure_family(model_dir)
    return found


def render(verdicts: dict[str, Verdict]) -> str:
    """Return the tables of the page."""
    lines = [f"With transformers {transformers.__version__}, {len(verdicts)} families.", ""]
    for run, title in _SECTIONS.items():
        chosen = {name: verdict for name, verdict in verdicts.items() if verdict.run == run}
        is_run = run in {"packed", "alone"}
        lines += [f"## {title}: {len(chosen)}", ""]
        lines += ["| family | scoring | generating | 1 - cosine |" if is_run else "| family | why |"]
        lines[-1] = "| family | why | scoring | generating | 1 - cosine |" if run == "alone" else lines[-1]
        lines += ["|---" * (lines[-1].count("|") - 1) + "|"]
        lines += [_row(name, verdict, is_run=is_run) for name, verdict in chosen.items()]
        lines += [""]
    return "\n".join(lines)


def _row(name: str, verdict: Verdict, *, is_run: bool) -> str:
    cells = [f"`{name}`", *([verdict.why] if verdict.run != "packed" else [])]
    if is_run:
        gap = max(1.0 - verdict.cosine, 0.0)
        cells += [f"{verdict.scoring_nats:.0e}", f"{verdict.generating_nats:.0e}", f"{gap:.0e}"]
    return f"| {' | '.join(cells)} |"


def read_page(page: Path) -> dict[str, tuple[str, str]]:
    """Return (run, why) by family, as the page says."""
    found, run = {}, ""
    by_title = {title: run for run, title in _SECTIONS.items()}
    for line in page.read_text().partition(MARK)[2].splitlines():
        if line.startswith("## "):
            run = by_title[line.removeprefix("## ").partition(":")[0]]
        elif line.startswith("| `"):
            cells = [cell.strip() for cell in line.strip("|").split("|")]
            found[cells[0].strip("`")] = (run, "" if run == "packed" else cells[1])
    return found


def main(arguments: Sequence[str]) -> int:
    """Write the tables behind the page's mark. Returns the exit code."""
    page = Path(arguments[0])
    text = page.read_text()
    if MARK not in text:
        print(f"{page} has no line {MARK}", file=sys.stderr)  # noqa: T201
        return 2
    page.write_text(f"{text.partition(MARK)[0]}{MARK}\n\n{render(measure_all())}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
