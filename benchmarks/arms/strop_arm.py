"""strop's arm: one GRPO optimizer step, or one batch of generation, per command.

The parts are the library's own, in the order in which the training loop uses them: tokenizer,
native engine on the policy's weights, credit, packed learner. As in TRL's arm, the weights of the
start are put back before every step, outside the measured time; Adam's moments stay.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.arms.strop_learner import StropLearner
from benchmarks.arms.worker import Channel, Record, WorkerOrder, peak_bytes, read_order
from benchmarks.prompts import Prompt, read_prompts, step_prompts
from benchmarks.verifier import forced_rewards, last_number_reward, signal_tokens, zero_variance_frac
from strop.engine.contract import Completion, GenerationRequest
from strop.engine.native import NativeEngine
from strop.engine.seeds import stream_seed
from strop.policy.language_model import LanguageModel
from strop.rollout import IntArray, Message, Sampling
from strop.tokenizer import Tokenizer


@dataclass(frozen=True, kw_only=True, slots=True)
class Generated:
    """The replies of one step, groups one after the other."""

    prompt_ids_P: list[IntArray]
    completions_PG: list[Completion]
    seconds: float


class StropWorker:
    """Holds the model and does one step after the other."""

    def __init__(self, order: WorkerOrder) -> None:
        self.case = order.case
        self.prompts = read_prompts(order.prompts_path)
        model_dir = Path(order.model_dir)
        self.tokenizer = Tokenizer.load(model_dir)
        self.model = LanguageModel.load(model_dir, dtype=torch.bfloat16)
        self.engine = NativeEngine(self.model, self.tokenizer)
        self.learner = StropLearner(self.model, order.case) if order.case.kind == "grpo" else None
        self.step = 0

    def _requests(
        self, prompts: Sequence[Prompt], prompt_ids_P: Sequence[IntArray]
    ) -> list[GenerationRequest]:
        case = self.case
        stops = frozenset[int]() if case.ignore_eos else self.tokenizer.stop_token_ids
        return [
            GenerationRequest(
                prompt_ids=prompt_ids,
                seed=stream_seed(case.seed, f"{prompt.left}+{prompt.right}", self.step, index),
                sampling=Sampling(),
                max_tokens=case.max_new_tokens,
                stop_token_ids=stops,
            )
            for prompt, prompt_ids in zip(prompts, prompt_ids_P, strict=True)
            for index in range(case.group_size)
        ]

    async def generate(self, prompts: Sequence[Prompt]) -> Generated:
        """Render, tokenize and answer the prompts of one step."""
        begun_at = time.perf_counter()
        chats = [tuple(Message(**message) for message in prompt.messages) for prompt in prompts]
        prompt_ids_P = [self.tokenizer.encode(self.tokenizer.render(chat)) for chat in chats]
        requests = self._requests(prompts, prompt_ids_P)
        completions = await asyncio.gather(*(self.engine.generate(request) for request in requests))
        return Generated(
            prompt_ids_P=prompt_ids_P,
            completions_PG=list(completions),
            seconds=time.perf_counter() - begun_at,
        )

    def _rewards(self, prompts: Sequence[Prompt], completions_PG: Sequence[Completion]) -> list[float]:
        case = self.case
        answers = [prompt.answer for prompt in prompts for _ in range(case.group_size)]
        natural = [
            last_number_reward(completion.text, answer)
            for completion, answer in zip(completions_PG, answers, strict=True)
        ]
        if case.rewards == "forced":
            return forced_rewards(case.num_prompts, case.group_size, case.seed + self.step)
        return natural

    def _lengths(self, generated: Generated) -> Record:
        prompts = [len(ids) for ids in generated.prompt_ids_P]
        replies = [len(completion.token_ids) for completion in generated.completions_PG]
        return {
            "Lp_mean": sum(prompts) / len(prompts),
            "Lp_max": max(prompts),
            "Lc_mean": sum(replies) / len(replies),
            "Lc_max": max(replies),
            "scored_tok": sum(replies),
            "peak_bytes": peak_bytes(),
        }

    async def generation_step(self) -> Record:
        """Generate once and return the record."""
        generated = await self.generate(step_prompts(self.prompts, self.case, self.step))
        self.step += 1
        lengths = self._lengths(generated)
        rate = lengths["scored_tok"] / generated.seconds
        return {"step_s": generated.seconds, "t_gen": generated.seconds, "tok_per_s": rate, **lengths}

    async def grpo_step(self) -> Record:
        """Generate, judge and learn once and return the record."""
        assert self.learner is not None
        prompts = step_prompts(self.prompts, self.case, self.step)
        self.learner.restore_weights()
        cpu_begun_s, begun_at = time.process_time(), time.perf_counter()
        generated = await self.generate(prompts)
        rewards = self._rewards(prompts, generated.completions_PG)
        judged_at = time.perf_counter()
        learned = self.learner.learn(generated.prompt_ids_P, generated.completions_PG, rewards)
        ended_at = time.perf_counter()
        cpu_s = time.process_time() - cpu_begun_s
        self.step += 1
        lengths_PG = [len(completion.token_ids) for completion in generated.completions_PG]
        return {
            "step_s": ended_at - begun_at,
            "cpu_s": cpu_s,
            "t_gen": generated.seconds,
            "t_verify": judged_at - begun_at - generated.seconds,
            "t_learn": ended_at - judged_at,
            "t_sync": 0.0,
            "t_other": 0.0,
            **self._lengths(generated),
            "nonzero_tok": signal_tokens(rewards, lengths_PG, self.case.group_size),
            "z": zero_variance_frac(rewards, self.case.group_size),
            "reward_mean": sum(rewards) / len(rewards),
            **learned,
            "update_norm": self.learner.update_norm(),
        }


async def serve(channel: Channel, worker: StropWorker) -> None:
    """Answer steps until told to quit."""
    channel.ready(settings={})
    while True:
        # Reading blocks the event loop on purpose: between steps nothing of strop may run.
        channel.wait_for_step()
        is_grpo = worker.case.kind == "grpo"
        channel.reply(await (worker.grpo_step() if is_grpo else worker.generation_step()))


def main() -> None:
    """Serve steps until told to quit."""
    channel = Channel()
    order = read_order()
    torch.set_num_threads(order.threads)
    torch.set_num_interop_threads(1)
    asyncio.run(serve(channel, StropWorker(order)))


if __name__ == "__main__":
    main()
