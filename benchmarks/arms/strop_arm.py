"""strop's arm: one step of the real training loop, or one batch of generation, per command.

Settings: `dtype` is the number format that it computes in.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks.arms.strop_loop import serve_grpo
from benchmarks.arms.worker import Channel, Record, WorkerOrder, generation_record, peak_bytes, read_order
from benchmarks.cases import Case
from benchmarks.prompts import Prompt, read_prompts, step_prompts
from strop.engine.contract import GenerationRequest, stream_seed
from strop.engine.native import NativeEngine
from strop.policy.language_model import DTYPES, LanguageModel
from strop.rollout import Message, Sampling
from strop.tokenizer import Tokenizer


def build_requests(
    case: Case, tokenizer: Tokenizer, prompts: Sequence[Prompt], step: int
) -> list[GenerationRequest]:
    """Render and tokenize the prompts of one step and ask for each group's replies."""
    stops = frozenset[int]() if case.ignore_eos else tokenizer.stop_token_ids
    requests = []
    for prompt in prompts:
        chat = tuple(Message.from_json(message) for message in prompt.messages)
        prompt_ids = tokenizer.encode(tokenizer.render(chat))
        requests += [
            GenerationRequest(
                prompt_ids=prompt_ids,
                seed=stream_seed(case.seed, f"{prompt.left}+{prompt.right}", step, index),
                sampling=Sampling(),
                max_tokens=case.max_new_tokens,
                stop_token_ids=stops,
            )
            for index in range(case.group_size)
        ]
    return requests


async def generate(
    engine: NativeEngine, tokenizer: Tokenizer, case: Case, prompts: Sequence[Prompt], step: int
) -> Record:
    """Answer the prompts of one step; tokenizing and decoding count as generation."""
    begun_at = time.perf_counter()
    requests = build_requests(case, tokenizer, prompts, step)
    completions = await asyncio.gather(*(engine.generate(request) for request in requests))
    total_s = time.perf_counter() - begun_at
    prompt_lengths = [len(request.prompt_ids) for request in requests]
    lengths = [len(completion.token_ids) for completion in completions]
    return generation_record(total_s, prompt_lengths, lengths, peak_bytes())


async def serve_generation(channel: Channel, order: WorkerOrder) -> None:
    """Generate batch by batch, as the harness asks."""
    model_dir = Path(order.model_dir)
    tokenizer = Tokenizer.load(model_dir)
    model = LanguageModel.load(model_dir, dtype=DTYPES[order.settings["dtype"]])
    engine = NativeEngine(model, tokenizer)
    prompts = read_prompts(order.prompts_path)
    channel.ready(settings=order.settings)
    step = 0
    while True:
        # Blocks the event loop on purpose: between steps nothing of strop may run.
        channel.wait_for_step()
        chosen = step_prompts(prompts, order.case, step)
        channel.reply(await generate(engine, tokenizer, order.case, chosen, step))
        step += 1


def main() -> None:
    """Serve steps until told to quit."""
    channel = Channel()
    order = read_order()
    torch.set_num_threads(order.threads)
    torch.set_num_interop_threads(1)
    if order.case.kind == "generate":
        asyncio.run(serve_generation(channel, order))
        return
    with tempfile.TemporaryDirectory(prefix="strop-bench-run-") as root:
        asyncio.run(serve_grpo(channel, order, Path(root)))


if __name__ == "__main__":
    main()
