"""strop beside TRL's GRPOTrainer on this device: same model, prompts, lengths and loss, one after the other.

Runs where TRL is installed. TRL generates with transformers, its engine without vLLM, so the ratio of whole
steps compares two engines as well. The ratio "if both had strop's engine" leaves that out: it is
computed, and not run, from strop's generation time and each system's own time for the rest of a step. Both
are forced to have advantages everywhere; replies have one fixed length, because a random model does not end
them.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.gpu.device import synchronize
from benchmarks.gpu.models import QWEN_0_5B, TINY, RandomModel, save_model
from benchmarks.gpu.result import PartResult, Setting
from benchmarks.gpu.work import GrpoStep, Workload
from strop.engine.native import NativeEngine
from strop.policy.language_model import LanguageModel
from strop.policy.learner import Learner
from strop.spec.train import OptimizerSpec
from strop.tokenizer import Tokenizer

_WORK = Workload(num_prompts=16, group_size=8, prompt_tokens=150, reply_tokens=300, is_ragged=False)
_MINIATURE = Workload(num_prompts=2, group_size=4, prompt_tokens=9, reply_tokens=12, is_ragged=False)
_ROWS_PER_FORWARD = 16
_LEARNING_RATE = 1e-6


def run_trl_0_5b(setting: Setting) -> PartResult:
    """Take steps with TRL, then with strop; the first of each warms up."""
    result = PartResult()
    random, work = (QWEN_0_5B, _WORK) if setting.is_gpu else (TINY, _MINIATURE)
    num_steps = 1 if setting.is_quick else 3
    path = save_model(random, setting.work_dir / "model", torch.float32, spread=0.02)
    rival = _TrlMeter(setting.device)
    _train_with_trl(path, random, work, rival, num_steps + 1)
    if setting.is_gpu:
        torch.cuda.empty_cache()
    model = LanguageModel.load(path, dtype=torch.bfloat16, device=str(setting.device))
    engine = NativeEngine(model, Tokenizer.load(path), max_num_seqs=work.num_rows, is_static=True)
    step = GrpoStep(engine, Learner(model, OptimizerSpec(lr=_LEARNING_RATE)), work)
    ours = [step.take() for _ in range(num_steps + 1)][1:]
    own_s = statistics.median(one.step_s for one in ours)
    generate_s = statistics.median(one.generate_s for one in ours)
    rival_s = statistics.median(rival.step_s[1:])
    rival_rest_s = rival_s - statistics.median(rival.generate_s[1:])
    num_tokens = ours[0].num_tokens
    is_same_work = rival.num_tokens[-1] == num_tokens
    result.check("both sample as many tokens", is_same_work, f"{num_tokens} and {rival.num_tokens[-1]}")
    result.measure("strop, scored tokens", num_tokens / own_s, "tokens/s")
    result.measure("TRL with transformers, scored tokens", rival.num_tokens[-1] / rival_s, "tokens/s")
    result.measure("strop by TRL, whole step, each with its engine", rival_s / own_s, "x")
    with_ours_s = generate_s + rival_rest_s
    result.measure("strop by TRL, if both had strop's engine (computed)", with_ours_s / own_s, "x")
    result.measure("strop by TRL, all but generation", rival_rest_s / (own_s - generate_s), "x")
    result.details = {
        "workload": dataclasses.asdict(work),
        "trl_step_s": rival.step_s,
        "trl_generate_s": rival.generate_s,
        "strop": [dataclasses.asdict(one) for one in ours],
    }
    return result


class _TrlMeter:
    """Collects the times of TRL's steps from inside its trainer."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._begun_at = 0.0
        self.step_s: list[float] = []
        self.generate_s: list[float] = []
        self.num_tokens: list[int] = []

    def begin(self) -> None:
        """Start the clock of a step."""
        synchronize(self._device)
        self._begun_at = time.perf_counter()

    def end(self) -> None:
        """Stop it."""
        synchronize(self._device)
        self.step_s.append(time.perf_counter() - self._begun_at)

    def watch(self, generate: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap TRL's generation."""

        def call(prompt_ids: Any, *inputs: Any, **named: Any) -> Any:
            synchronize(self._device)
            begun_at = time.perf_counter()
            completion_ids, logprobs = generate(prompt_ids, *inputs, **named)
            synchronize(self._device)
            self.generate_s.append(time.perf_counter() - begun_at)
            self.num_tokens.append(sum(len(ids) for ids in completion_ids))
            return completion_ids, logprobs

        return call


def _train_with_trl(
    path: Path, random: RandomModel, work: Workload, meter: _TrlMeter, num_steps: int
) -> None:
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import GRPOTrainer

    class Clock(TrainerCallback):
        """Times optimizer steps."""

        def on_step_begin(self, args: Any, state: Any, control: Any, **named: Any) -> None:
            meter.begin()

        def on_step_end(self, args: Any, state: Any, control: Any, **named: Any) -> None:
            meter.end()

    draw = np.random.default_rng(0)
    prompts = [
        " ".join(f"t{index}" for index in draw.integers(2, random.size.vocab_size, work.prompt_tokens))
        for _ in range(work.num_prompts * num_steps)
    ]

    def reward(completions: list[str], **_: Any) -> list[float]:
        return [float(index % 2) for index in range(len(completions))]

    trainer = GRPOTrainer(
        model=str(path),
        reward_funcs=reward,
        args=_trl_config(path, work, num_steps),
        train_dataset=Dataset.from_list([{"prompt": prompt} for prompt in prompts]),
        callbacks=[Clock()],
    )
    trainer._generate_single_turn = meter.watch(trainer._generate_single_turn)
    trainer.train()


def _trl_config(path: Path, work: Workload, num_steps: int) -> Any:
    """Return the same loss and lengths, in bf16 with fp32 weights, as TRL trains by default."""
    from trl import GRPOConfig

    rows = min(_ROWS_PER_FORWARD, work.num_rows)
    return GRPOConfig(
        output_dir=str(path / "trl"),
        model_init_kwargs={"dtype": "float32", "attn_implementation": "sdpa"},
        learning_rate=_LEARNING_RATE,
        lr_scheduler_type="constant",
        max_grad_norm=1.0,
        loss_type="dapo",
        beta=0.0,
        scale_rewards="group",
        num_generations=work.group_size,
        max_completion_length=work.reply_tokens,
        temperature=1.0,
        top_p=1.0,
        top_k=0,
        per_device_train_batch_size=rows,
        gradient_accumulation_steps=work.num_rows // rows,
        gradient_checkpointing=False,
        use_cpu=not torch.cuda.is_available(),
        bf16=True,
        max_steps=num_steps,
        save_strategy="no",
        logging_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
