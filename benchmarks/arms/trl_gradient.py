"""TRL's gradient of a given batch, from `GRPOTrainer.train()` itself.

Runs with the interpreter of TRL's own environment. Only what the trainer would generate and judge is
handed in; forward, loss, scaling, accumulation and autocast are TRL's own. The gradient is taken
before the optimizer's first step, and never clipped.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.arms.gradient_order import (
    GradientGroup,
    GradientOrder,
    count_tokens,
    read_gradient_order,
    read_groups,
)
from benchmarks.arms.trl_arm import ROWS_PER_FORWARD, build_config
from benchmarks.arms.worker import WorkerOrder


def build_micro_batches(
    groups: Sequence[GradientGroup], *, num_rows: int, pad_id: int
) -> list[dict[str, Any]]:
    """Return the batch as TRL prepares it: prompts padded on the left, replies on the right.

    Shapes of each: (num_rows, longest prompt), (num_rows, longest reply); advantages (num_rows,).
    """
    import torch

    rows = [
        (group.prompt_ids, reply, advantage)
        for group in groups
        for reply, advantage in zip(group.replies, group.advantages, strict=True)
    ]
    num_tokens = torch.tensor(count_tokens(groups))
    batches = []
    for start in range(0, len(rows), num_rows):
        chosen = rows[start : start + num_rows]
        longest_prompt = max(len(prompt) for prompt, _, _ in chosen)
        longest_reply = max(len(reply) for _, reply, _ in chosen)
        prompts = [[pad_id] * (longest_prompt - len(prompt)) + prompt for prompt, _, _ in chosen]
        prompt_masks = [[0] * (longest_prompt - len(prompt)) + [1] * len(prompt) for prompt, _, _ in chosen]
        replies = [reply + [pad_id] * (longest_reply - len(reply)) for _, reply, _ in chosen]
        reply_masks = [[1] * len(reply) + [0] * (longest_reply - len(reply)) for _, reply, _ in chosen]
        batches.append(
            {
                "prompt_ids": torch.tensor(prompts),
                "prompt_mask": torch.tensor(prompt_masks),
                "completion_ids": torch.tensor(replies),
                "completion_mask": torch.tensor(reply_masks),
                "advantages": torch.tensor([advantage for _, _, advantage in chosen]),
                "num_items_in_batch": num_tokens,
            }
        )
    return batches


def build_trainer(order: GradientOrder, output_dir: str) -> Any:
    """Return a GRPOTrainer that trains on the given batch and ends at its first gradient."""
    from datasets import Dataset
    from safetensors.torch import save_file
    from transformers import TrainerCallback
    from trl import GRPOTrainer

    class GradientWriter(TrainerCallback):
        """Writes the gradient of the first step, and ends the process."""

        def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            gradients = {
                name: parameter.grad.float().contiguous()
                for name, parameter in kwargs["model"].named_parameters()
                if parameter.grad is not None
            }
            save_file(gradients, order.gradient_path)
            raise SystemExit(0)

    worker = WorkerOrder(
        case=order.case,
        model_dir=str(order.model_dir),
        prompts_path=Path(),
        threads=order.threads,
        settings={"autocast": order.dtype == "bfloat16"},
    )
    config = build_config(worker, output_dir)
    config.max_grad_norm = 0.0  # transformers clips only above 0
    groups = read_groups(order.rollouts_path)
    trainer = GRPOTrainer(
        model=str(order.model_dir),
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        args=config,
        # Never looked at: only its size matters to the sampler.
        train_dataset=Dataset.from_list([{"prompt": str(index)} for index in range(order.case.num_prompts)]),
        callbacks=[GradientWriter()],
    )
    pad_id = trainer.processing_class.pad_token_id
    batches = iter(build_micro_batches(groups, num_rows=ROWS_PER_FORWARD, pad_id=pad_id))
    trainer._prepare_inputs = lambda inputs: next(batches)
    return trainer


def main() -> None:
    """Compute and write."""
    import torch

    order = read_gradient_order()
    torch.set_num_threads(order.threads)
    with tempfile.TemporaryDirectory() as output_dir:
        build_trainer(order, output_dir).train()


if __name__ == "__main__":
    main()
