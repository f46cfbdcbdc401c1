"""How many positions a learner forwards at once where its run does not say."""

from __future__ import annotations

import torch

from strop.policy.footprint import DEFAULT_MICRO_BATCH_POSITIONS, gpu_positions, size_of_config
from strop.policy.language_model import LanguageModel


def default_positions(model: LanguageModel, *, num_ranks: int = 1) -> int:
    """Return the default for the device of a model, of which each of several ranks keeps a share.

    On a GPU it follows from the device's size and the model's, not from what happens to be free, so that a
    run that goes on later is cut the same way.
    """
    if model.device.type != "cuda":
        return DEFAULT_MICRO_BATCH_POSITIONS
    adapters = None
    if model.adapters is not None:
        adapters = sum(parameter.numel() for _, parameter in model.trained_parameters())
    return gpu_positions(
        torch.cuda.get_device_properties(model.device).total_memory,
        size_of_config(model.module.config.to_dict()),
        str(model.dtype).removeprefix("torch."),
        num_ranks=num_ranks,
        num_trained=adapters,
        is_recomputed=model.recomputes,
    )
