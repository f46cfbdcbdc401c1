"""vLLM's arm: one batch of generation per command with the offline `LLM` class.

Settings: `eager`, and `dtype`. Runs with the interpreter of vLLM's own environment. Eager and compiled
mode are two arms; the faster of the two is the rival. Prefix caching stays at its default (on), so vLLM
prefills a prompt's eight copies once, as strop does. A new set of prompts comes with every command, so
nothing is answered from the cache of an earlier one.
"""

from __future__ import annotations

import os
import time
from typing import Any

from benchmarks.arms.worker import Channel, Record, WorkerOrder, generation_record, read_order
from benchmarks.process_memory import tree_peak_bytes
from benchmarks.prompts import Prompt, read_prompts, step_prompts


def build_engine(order: WorkerOrder) -> Any:
    """Return a vLLM engine for the case's model."""
    from vllm import LLM

    return LLM(
        model=order.model_dir,
        dtype=order.settings["dtype"],
        enforce_eager=order.settings["eager"],
        max_model_len=1024,
        max_num_seqs=order.case.num_rows,
        max_num_batched_tokens=4096,
        seed=order.case.seed,
        disable_log_stats=True,
    )


def sampling_params(order: WorkerOrder) -> Any:
    """Return the sampling of one step: plain, at temperature 1, from the full vocabulary."""
    from vllm import SamplingParams

    case = order.case
    return SamplingParams(
        n=case.group_size,
        temperature=1.0,
        top_p=1.0,
        top_k=0,
        max_tokens=case.max_new_tokens,
        min_tokens=0,
        ignore_eos=case.ignore_eos,
        # Of each sampled token: reinforcement learning needs them.
        logprobs=0,
    )


def generate(engine: Any, prompts: list[Prompt], params: Any) -> Record:
    """Generate all completions of one step and return its record."""
    begun_at = time.perf_counter()
    outputs = engine.chat([prompt.messages for prompt in prompts], params, use_tqdm=False)
    total_s = time.perf_counter() - begun_at
    lengths = [len(completion.token_ids) for output in outputs for completion in output.outputs]
    prompt_lengths = [len(output.prompt_token_ids) for output in outputs]
    return generation_record(total_s, prompt_lengths, lengths, tree_peak_bytes(os.getpid()))


def main() -> None:
    """Serve steps until told to quit."""
    channel = Channel()
    order = read_order()
    engine = build_engine(order)
    prompts = read_prompts(order.prompts_path)
    channel.ready(settings=order.settings)
    step = 0
    while True:
        channel.wait_for_step()
        params = sampling_params(order)
        channel.reply(generate(engine, step_prompts(prompts, order.case, step), params))
        step += 1


if __name__ == "__main__":
    main()
