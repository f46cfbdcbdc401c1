"""TRL's arm: one real GRPO optimizer step of `GRPOTrainer` per command.

Runs with the interpreter of TRL's own environment. The trainer runs its own `train()`; a callback
stops it before every optimizer step until the harness asks for one, so a step is exactly what
TRL does between `on_step_begin` and `on_step_end`: generation, rewards, loss, backward, update.
Fetching the prompts from the data loader lies outside and is not counted against TRL.

Before every step the weights of the start are put back, outside the measured time, so that each
step is the same work however often it is repeated. Adam's moments stay.

Setting: `autocast`, whether products are in bfloat16. The rest is the fastest that was found.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from typing import Any

from benchmarks import cases
from benchmarks.arms.worker import Channel, Record, WorkerOrder, peak_bytes, read_order
from benchmarks.prompts import read_prompts
from benchmarks.verifier import forced_rewards, last_number_reward, signal_tokens, zero_variance_frac

ROWS_PER_FORWARD = 16
"""Completions per forward and backward; the step accumulates up to all rows."""


class StepMeter:
    """Collects what one step did, from inside the trainer."""

    def __init__(self, order: WorkerOrder) -> None:
        self.order = order
        self.step = 0
        self.seconds: dict[str, float] = {}
        self.rewards_PG: list[float] = []
        self.lengths_PG: list[int] = []
        self.prompt_lengths_PG: list[int] = []
        self.cpu_begun_s = 0.0

    def begin(self) -> None:
        """Start the processor clock of a step."""
        self.cpu_begun_s = time.process_time()

    def timed(self, stage: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a trainer method so that its wall time is added to a stage."""

        def call(*args: Any, **kwargs: Any) -> Any:
            before = time.perf_counter()
            result = function(*args, **kwargs)
            self.seconds[stage] = self.seconds.get(stage, 0.0) + time.perf_counter() - before
            return result

        return call

    def watch_generation(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap `_generate_single_turn` so that lengths are counted as well."""
        timed = self.timed("gen", function)

        def call(prompt_ids: list[list[int]], *args: Any, **kwargs: Any) -> Any:
            completion_ids, logprobs = timed(prompt_ids, *args, **kwargs)
            self.prompt_lengths_PG = [len(ids) for ids in prompt_ids]
            self.lengths_PG = [len(ids) for ids in completion_ids]
            return completion_ids, logprobs

        return call

    def reward(self, completions: list[Any], answer: list[str], **_: Any) -> list[float]:
        """TRL's reward function: the natural verifier, or rewards that force signal."""
        case = self.order.case
        texts = [completion[0]["content"] for completion in completions]
        natural = [last_number_reward(text, gold) for text, gold in zip(texts, answer, strict=True)]
        if case.rewards == "forced":
            natural = forced_rewards(case.num_prompts, case.group_size, case.seed + self.step)
        self.rewards_PG = natural
        return natural

    def record(self, total_s: float) -> Record:
        """Return the finished step's record and begin the next one."""
        lengths, prompts = self.lengths_PG, self.prompt_lengths_PG
        learn_s = total_s - self.seconds.get("gen", 0.0) - self.seconds.get("verify", 0.0)
        fields: Record = {
            "step_s": total_s,
            "cpu_s": time.process_time() - self.cpu_begun_s,
            "t_gen": self.seconds.get("gen", 0.0),
            "t_verify": self.seconds.get("verify", 0.0),
            "t_learn": learn_s,
            "t_sync": 0.0,
            "t_other": 0.0,
            "Lp_mean": sum(prompts) / len(prompts),
            "Lp_max": max(prompts),
            "Lc_mean": sum(lengths) / len(lengths),
            "Lc_max": max(lengths),
            "scored_tok": sum(lengths),
            "nonzero_tok": signal_tokens(self.rewards_PG, lengths, self.order.case.group_size),
            "positions_forwarded": len(lengths) * (max(prompts) + max(lengths)),
            "positions_real": sum(prompts) + sum(lengths),
            "z": zero_variance_frac(self.rewards_PG, self.order.case.group_size),
            "reward_mean": sum(self.rewards_PG) / len(self.rewards_PG),
            "peak_bytes": peak_bytes(),
        }
        self.seconds = {}
        self.step += 1
        return fields


def build_config(order: WorkerOrder, output_dir: str) -> Any:
    """Return the GRPOConfig of a case: same loss, clip and learning rate as strop's arm."""
    from trl import GRPOConfig

    case = order.case
    return GRPOConfig(
        output_dir=output_dir,
        model_init_kwargs={"dtype": "float32", "attn_implementation": "sdpa"},
        learning_rate=cases.LEARNING_RATE,
        lr_scheduler_type="constant",
        max_grad_norm=cases.MAX_GRAD_NORM,
        loss_type="dapo",
        epsilon=cases.CLIP_LOW,
        epsilon_high=cases.CLIP_HIGH,
        beta=0.0,
        scale_rewards="group",
        num_generations=case.group_size,
        max_completion_length=case.max_new_tokens,
        temperature=1.0,
        top_p=1.0,
        top_k=0,
        shuffle_dataset=False,
        per_device_train_batch_size=ROWS_PER_FORWARD,
        gradient_accumulation_steps=case.num_rows // ROWS_PER_FORWARD,
        gradient_checkpointing=False,
        use_cpu=True,
        bf16=bool(order.settings["autocast"]),
        max_steps=1_000_000,
        save_strategy="no",
        logging_strategy="no",
        report_to="none",
        disable_tqdm=True,
        seed=case.seed,
    )


def build_trainer(order: WorkerOrder, channel: Channel, output_dir: str) -> Any:
    """Return a GRPOTrainer whose steps wait for the harness."""
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import GRPOTrainer

    meter = StepMeter(order)

    class StepGate(TrainerCallback):
        """Waits before each optimizer step and reports after it."""

        def __init__(self) -> None:
            self.begun_at = 0.0
            self.start_weights: dict[str, Any] = {}

        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if not self.start_weights:
                parameters = dict(kwargs["model"].named_parameters())
                self.start_weights = {name: p.detach().clone() for name, p in parameters.items()}
                channel.ready(settings=order.settings)
            channel.wait_for_step()
            for name, parameter in kwargs["model"].named_parameters():
                parameter.data.copy_(self.start_weights[name])
            meter.begin()
            self.begun_at = time.perf_counter()

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            record = meter.record(time.perf_counter() - self.begun_at)
            moved = [p.data - self.start_weights[n] for n, p in kwargs["model"].named_parameters()]
            channel.reply({**record, "update_norm": sum(float(d.norm()) ** 2 for d in moved) ** 0.5})

    prompts = read_prompts(order.prompts_path)
    rows = [{"prompt": prompt.messages, "answer": prompt.answer} for prompt in prompts]
    trainer = GRPOTrainer(
        model=order.model_dir,
        reward_funcs=meter.reward,
        args=build_config(order, output_dir),
        train_dataset=Dataset.from_list(rows),
        callbacks=[StepGate()],
    )
    trainer._generate_single_turn = meter.watch_generation(trainer._generate_single_turn)
    trainer._calculate_rewards = meter.timed("verify", trainer._calculate_rewards)
    return trainer


def main() -> None:
    """Serve steps until told to quit."""
    channel = Channel()
    order = read_order()
    import torch

    torch.set_num_threads(order.threads)
    torch.set_num_interop_threads(1)
    with tempfile.TemporaryDirectory() as output_dir:
        build_trainer(order, channel, output_dir).train()


if __name__ == "__main__":
    main()
