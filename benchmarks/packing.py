"""Splitting a step's 1.8 million tokens over 64 ranks and laying them out, and the bytes that they cross in.

1,024 rollouts in groups of eight with log-normal lengths are balanced by estimated FLOPs of a 135M model,
then laid out as the flat tensors of every micro-batch, on one core. Goals: 0.2 s for both on 64 ranks;
10 ms for the plan and 30 ms for the arrays on 16 ranks; the largest micro-batch within 1.01 of the mean.

The balancer alone deals log-normal weights into 64 x 4 and 16 x 64 bins, sixteen to a bin: 1.01, 5 ms.
Bytes per token: of groups on their way to a learner's ranks (9 in plain GRPO), and of requests and replies
on their way to an engine and back (17 at most), where replies have the text of arithmetic and come home
together, or each alone.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.figures import Figure, Measured
from strop.engine import Completion, GenerationRequest
from strop.engine.wire import AnswerPart, GenerateAnswer, GenerateCall
from strop.policy.balancing import BatchPlan, PositionCost, partition, plan_batch
from strop.policy.batch_wire import decode_groups, encode_groups
from strop.policy.footprint import read_model_size
from strop.policy.packing import PackedBatch, PackedGroup, PackedReply
from strop.rollout import FinishReason, Sampling
from strop.tokenizer import Tokenizer

NUM_GROUPS = 128
GROUP_SIZE = 8
MEAN_PROMPT = 250
MEAN_REPLY = 1_725
SIGMA = 0.6
# Positions of a rank's micro-batch: two for each of 16 ranks, one for each of 64.
NUM_RANKS = {16: 65_536, 64: 32_768}
NUM_REPEATS = 20


def make_groups(seed: int = 0) -> list[PackedGroup]:
    """Draw the step: 1.8 million tokens."""
    random = np.random.default_rng(seed)
    median = MEAN_REPLY / np.exp(SIGMA**2 / 2)
    groups = []
    for _ in range(NUM_GROUPS):
        lengths = np.maximum(2, random.lognormal(np.log(median), SIGMA, GROUP_SIZE).astype(int))
        prompt_ids = random.integers(0, 49_152, random.integers(MEAN_PROMPT // 2, MEAN_PROMPT * 3 // 2))
        replies = tuple(
            PackedReply(
                token_ids=random.integers(0, 49_152, length).astype(np.int32),
                is_scored=np.ones(length, np.bool_),
                engine_logprobs=-random.random(length).astype(np.float32),
                advantage=1.0,
                weight=1e-3,
            )
            for length in lengths
        )
        groups.append(PackedGroup(prompt_ids=prompt_ids.astype(np.int32), replies=replies))
    return groups


def count_tokens(groups: Sequence[PackedGroup]) -> int:
    """Return the tokens of a step, each prompt once."""
    return sum(len(group.prompt_ids) + sum(len(one.token_ids) for one in group.replies) for group in groups)


def _time(work: Callable[[], object], num_repeats: int) -> tuple[float, ...]:
    seconds = []
    for _ in range(num_repeats):
        begun_at = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - begun_at)
    return tuple(seconds)


def _fill(plan: BatchPlan) -> None:
    for rank in plan.groups_W_K:
        for micro_batch in rank:
            PackedBatch.of_groups(micro_batch, torch.device("cpu"))


def _figure(name: str, measured: Sequence[float], unit: str, **goal: float) -> Figure:
    return Figure(name=name, unit=unit, value=statistics.median(measured), measured=tuple(measured), **goal)


def _measure_packing(
    groups: Sequence[PackedGroup], cost: PositionCost, num_ranks: int, num_repeats: int
) -> list[Figure]:
    def plan() -> BatchPlan:
        return plan_batch(groups, num_ranks=num_ranks, max_positions=NUM_RANKS[num_ranks], cost=cost)

    made = plan()
    plans = _time(plan, num_repeats)
    fills = _time(lambda: _fill(made), num_repeats)
    both = [left + right for left, right in zip(plans, fills, strict=True)]
    narrow = num_ranks == 16
    name = f"1.8 million tokens for {num_ranks} ranks"
    return [
        _figure(f"{name}: plan", plans, "s, median", **({"at_most": 0.010} if narrow else {})),
        _figure(f"{name}: arrays", fills, "s, median", **({"at_most": 0.030} if narrow else {})),
        _figure(f"{name}: both", both, "s, median", at_most=0.2),
        _figure(f"{name}: largest micro-batch", [made.imbalance], "of the mean", at_most=1.01),
    ]


def _measure_balance(num_ranks: int, num_micro_batches: int, num_repeats: int) -> list[Figure]:
    num_bins = num_ranks * num_micro_batches
    weights = np.random.default_rng(0).lognormal(0.0, SIGMA, 16 * num_bins)
    loads = np.bincount(partition(weights, num_bins), weights, num_bins)
    name = f"{len(weights)} weights in {num_ranks} x {num_micro_batches} bins"
    seconds = _time(lambda: partition(weights, num_bins), num_repeats)
    return [
        _figure(f"{name}: time", seconds, "s, median", at_most=0.005),
        _figure(f"{name}: largest bin", [float(loads.max() / loads.mean())], "of the mean", at_most=1.01),
    ]


def _engine_bytes(tokenizer: Tokenizer, num_steps: int) -> tuple[float, float]:
    """Return the bytes per token of requests and replies whose text is `num_steps` lines of sums.

    The first value is of replies that come together, the second of replies that each come alone.
    """
    random = np.random.default_rng(0)
    requests, replies = [], []
    for group in range(8):
        prompt_ids = tokenizer.encode(f"Question {group}: what is {group} times 17, and why? Think in steps.")
        for _ in range(GROUP_SIZE):
            a, b = (int(value) for value in random.integers(2, 99, 2))
            text = " ".join(f"Step {n}: {a} * {n} + {b} = {a * n + b}." for n in range(num_steps))
            token_ids = tokenizer.encode(text)
            requests.append(
                GenerationRequest(
                    prompt_ids=prompt_ids,
                    seed=int(random.integers(0, 2**63)),
                    sampling=Sampling(temperature=0.7),
                    max_tokens=512,
                    stop_token_ids=tokenizer.stop_token_ids,
                )
            )
            replies.append(
                Completion(
                    token_ids=token_ids,
                    logprobs=-random.random(len(token_ids)).astype(np.float32),
                    text=text,
                    finish_reason=FinishReason.EOS,
                    policy_version=123,
                )
            )
    asked = GenerateCall.of(requests).model_dump_json().encode()
    together = GenerateAnswer.of(replies).model_dump_json(exclude_defaults=True).encode()
    lines = [AnswerPart.of({place: reply}) for place, reply in enumerate(replies)]
    alone = "\n".join([one.model_dump_json(exclude_defaults=True) for one in lines]).encode()
    num_prompt_tokens = sum(len(request.prompt_ids) for request in requests[::GROUP_SIZE])
    num_tokens = num_prompt_tokens + sum(len(reply.token_ids) for reply in replies)
    return (len(asked) + len(together)) / num_tokens, (len(asked) + len(alone)) / num_tokens


def measure_packing(*, is_quick: bool, model_dir: Path) -> Measured:
    """Measure all of it, on one core."""
    torch.set_num_threads(1)
    num_repeats = 1 if is_quick else NUM_REPEATS
    groups = make_groups()
    cost = PositionCost.of_model(read_model_size(model_dir))
    figures: list[Figure] = []
    for num_ranks in NUM_RANKS:
        figures += _measure_packing(groups, cost, num_ranks, num_repeats)
    for shape in ((64, 4), (16, 64)):
        figures += _measure_balance(*shape, num_repeats)
    message = encode_groups(groups)
    num_tokens = count_tokens(groups)
    tokenizer = Tokenizer.load(model_dir)
    figures += [
        _figure("to the learner", [len(message) / num_tokens], "bytes/token", at_most=9.0),
        _figure("to the learner: encode", _time(lambda: encode_groups(groups), num_repeats), "s, median"),
        _figure("to the learner: decode", _time(lambda: decode_groups(message), num_repeats), "s, median"),
    ]
    for num_steps in (2, 20):
        name = f"engine and back, replies of {num_steps} lines"
        for manner, found in zip(("", ", each alone"), _engine_bytes(tokenizer, num_steps), strict=True):
            figures.append(_figure(name + manner, [found], "bytes/token", at_most=17.0))
    details: dict[str, Any] = {"num_tokens": num_tokens, "num_rollouts": NUM_GROUPS * GROUP_SIZE}
    return Measured(figures=figures, details=details)
