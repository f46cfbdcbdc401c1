"""strop's gradient of a given batch, from the learner that trains; and such a batch, from its engine."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file

from benchmarks.arms.gradient_order import GradientGroup, count_tokens, read_gradient_order, read_groups
from benchmarks.arms.strop_arm import build_requests
from benchmarks.arms.strop_loop import build_spec
from benchmarks.cases import Case
from benchmarks.prompts import make_prompts
from benchmarks.verifier import forced_rewards
from strop.algorithm import Algorithm, Credit, assign_credit, build_algorithm
from strop.engine.native import NativeEngine
from strop.policy.language_model import DTYPES, LanguageModel
from strop.policy.learner import Learner
from strop.policy.objective import ScoredTokens, TokenTerms
from strop.policy.packing import PackedGroup, PackedReply
from strop.tokenizer import Tokenizer


def sample_groups(case: Case, model_dir: Path, dtype: str) -> list[GradientGroup]:
    """Sample a step of the case and give every group rewards that differ."""
    tokenizer = Tokenizer.load(model_dir)
    engine = NativeEngine(LanguageModel.load(model_dir, dtype=DTYPES[dtype]), tokenizer)
    requests = build_requests(case, tokenizer, make_prompts(case, 1), 0)

    async def answer() -> list[list[int]]:
        completions = await asyncio.gather(*(engine.generate(request) for request in requests))
        return [completion.token_ids.tolist() for completion in completions]

    replies = asyncio.run(answer())
    size = case.group_size
    credit = _assign(case, forced_rewards(case.num_prompts, size, case.seed), replies)
    return [
        GradientGroup(
            prompt_ids=requests[index * size].prompt_ids.tolist(),
            replies=replies[index * size : (index + 1) * size],
            advantages=[float(advantage) for advantage in credit.advantage_P_G[index]],
        )
        for index in range(case.num_prompts)
    ]


def _assign(case: Case, rewards: Sequence[float], replies: Sequence[Sequence[int]]) -> Credit:
    starts = range(0, case.num_rows, case.group_size)
    return assign_credit(
        _algorithm(case),
        [list(rewards[start : start + case.group_size]) for start in starts],
        [[len(reply) for reply in replies[start : start + case.group_size]] for start in starts],
        [[False] * case.group_size for _ in starts],
        case.max_new_tokens,
    )


def _algorithm(case: Case) -> Algorithm:
    return build_algorithm(build_spec(case).algorithm)


def pack_groups(groups: Sequence[GradientGroup]) -> list[PackedGroup]:
    """Return the batch as the learner takes it, each token with the weight of a mean over all."""
    weight = 1.0 / count_tokens(groups)
    return [
        PackedGroup(
            prompt_ids=np.array(group.prompt_ids, dtype=np.int32),
            replies=tuple(
                PackedReply(
                    token_ids=np.array(reply, dtype=np.int32),
                    is_scored=np.ones(len(reply), dtype=np.bool_),
                    # Not read: the old log-probabilities are the learner's own.
                    engine_logprobs=np.zeros(len(reply), dtype=np.float32),
                    advantage=advantage,
                    weight=weight,
                )
                for reply, advantage in zip(group.replies, group.advantages, strict=True)
            ),
        )
        for group in groups
    ]


def compute_gradient(
    case: Case, model_dir: Path, groups: Sequence[GradientGroup], dtype: str
) -> dict[str, torch.Tensor]:
    """Return the gradient (float32) by parameter name, before any clipping."""
    spec, algorithm = build_spec(case), _algorithm(case)
    learner = Learner(LanguageModel.load(model_dir, dtype=DTYPES[dtype]), spec.optimizer)

    def token_terms(tokens: ScoredTokens, /) -> TokenTerms:
        return algorithm.token_terms(tokens.logprob_M, tokens.logprob_M, tokens.advantage_M)

    return learner.gradients(pack_groups(groups), temperature=1.0, token_terms=token_terms)


def main() -> None:
    """Compute and write."""
    order = read_gradient_order()
    torch.set_num_threads(order.threads)
    groups = read_groups(order.rollouts_path)
    gradient = compute_gradient(order.case, order.model_dir, groups, order.dtype)
    save_file({name: tensor.float().contiguous() for name, tensor in gradient.items()}, order.gradient_path)


if __name__ == "__main__":
    main()
