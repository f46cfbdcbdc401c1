"""Low-rank adapters (LoRA, arXiv:2106.09685) on linear layers: y = W x + (alpha / rank) B A x.

W is frozen and has no gradient, no master and no moments. B starts at 0, so that the first step is the
base model's. Parameters are named as in peft (`....q_proj.lora_A.weight`), and `write_adapter` writes the
two files that peft and vLLM load. Without dropout, biases and embeddings; one adapter per model.

Shapes: N positions, D inputs of a layer, O outputs, r rank.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from strop.errors import ConfigError, StoreError
from strop.spec.model import LoraSpec

PEFT_PREFIX = "base_model.model."
"""What peft puts before a parameter's name in its files."""
ADAPTER_FILES = ("adapter_model.safetensors", "adapter_config.json")
_PARTS = (".lora_A.weight", ".lora_B.weight")
_NUM_PROBES, _NUM_SIGMA = 4, 6.0
"""Random inputs that a merged layer is tested with, and the allowed multiple of the rounding error."""


class AdaptedLinear(torch.nn.Linear):
    """A frozen linear layer with an adapter; `adapt_linears` converts linear layers in place."""

    lora_A: torch.nn.Linear
    lora_B: torch.nn.Linear
    scaling: float

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Multiply, and add the adapter's output."""
        return super().forward(input) + self.adapt(input)

    def adapt(self, x: torch.Tensor) -> torch.Tensor:
        """Return the adapter's output. Shapes: (N, D) to (N, O)."""
        change: torch.Tensor = self.lora_B(self.lora_A(x)) * self.scaling
        return change


def adapt_linears(module: Any, spec: LoraSpec, *, seed: int) -> None:
    """Freeze a transformers model and give its target layers adapters, equal in every process.

    Raises: ConfigError naming the targets that are no name of a linear layer.
    """
    assert spec.rank is not None
    module.requires_grad_(False)
    generator = torch.Generator().manual_seed(seed)
    found = set()
    linears = [(name, part) for name, part in module.named_modules() if type(part) is torch.nn.Linear]
    for path, linear in linears:
        name = path.rpartition(".")[2]
        if name in spec.target_names:
            found.add(name)
            # As peft starts: uniform within 1 / sqrt(inputs), which is Kaiming's with a = sqrt(5).
            bound = 1.0 / math.sqrt(linear.in_features)
            first = (torch.rand(spec.rank, linear.in_features, generator=generator) * 2.0 - 1.0) * bound
            weight = linear.weight
            # Real where the model is not loaded yet.
            device = torch.device("cpu") if weight.is_meta else weight.device
            made = []
            for values in (first, torch.zeros(linear.out_features, spec.rank)):
                part = torch.nn.Linear(values.shape[1], values.shape[0], bias=False, device="meta")
                part.weight = torch.nn.Parameter(values.to(device=device, dtype=weight.dtype))
                made.append(part)
            # In place: the layer keeps its name and weight, and references to it stay valid.
            linear.__class__ = AdaptedLinear
            linear.lora_A, linear.lora_B = made
            linear.scaling = spec.scaling  # type: ignore[assignment]
    if found != set(spec.target_names):
        names = sorted({path.rpartition(".")[2] for path, _ in linears})
        raise ConfigError(
            f"lora.targets={spec.targets!r}, but no layer is called"
            f" {', '.join(sorted(set(spec.target_names) - found))}",
            allowed=f"names of the model's linear layers: {', '.join(names)}",
            next_step="leave out what the model does not have",
        )


def merge_adapters(tensors: Mapping[str, torch.Tensor], spec: LoraSpec) -> dict[str, torch.Tensor]:
    """Return the weights of a plain model with the outputs of the adapted one, up to rounding.

    Products are added in fp32 and rounded once to the type of the weight.
    """
    merged = {name: tensor for name, tensor in tensors.items() if not name.endswith(_PARTS)}
    for name in tensors:
        if not name.endswith(_PARTS[0]):
            continue
        path = name.removesuffix(_PARTS[0])
        first, second = (tensors[path + part].float() for part in _PARTS)
        weight = tensors[f"{path}.weight"]
        merged[f"{path}.weight"] = (weight.float() + spec.scaling * (second @ first)).to(weight.dtype)
    return merged


def find_merge_flaw(
    module: Any, tensors: Mapping[str, torch.Tensor], merged: Mapping[str, torch.Tensor]
) -> str | None:
    """Name the first layer whose merged weight gives other outputs than the layer of the live model.

    The adapter's outputs for a few random inputs are compared, within the rounding of the weight's type.
    `module` is the live model, `tensors` are all of its tensors by name.
    """
    generator = torch.Generator().manual_seed(0)
    for name in tensors:
        if not name.endswith(_PARTS[0]):
            continue
        path = name.removesuffix(_PARTS[0])
        first, second = (tensors[path + part].float() for part in _PARTS)
        weight, whole = tensors[f"{path}.weight"].float(), merged[f"{path}.weight"]
        x = torch.randn(first.shape[1], _NUM_PROBES, generator=generator)
        added = module.get_submodule(path).scaling * (second @ (first @ x))
        rounding = torch.finfo(whole.dtype).eps / 2 * (whole.float().square() @ x.square()).sqrt()
        gap = ((whole.float() - weight) @ x - added).abs()
        if bool((gap > _NUM_SIGMA * rounding + 1e-3 * added.abs()).any()):
            return f"{path} adds {float(gap.max()):.2g} less or more than its adapter"
    return None


def without_adapters(tensors: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors that are no part of an adapter."""
    yield from (pair for pair in tensors if not pair[0].endswith(_PARTS))


def name_for_peft(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the adapters among a model's tensors under the names of peft's files."""
    return {PEFT_PREFIX + name: tensor for name, tensor in tensors.items() if name.endswith(_PARTS)}


def write_adapter(adapters: Mapping[str, torch.Tensor], spec: LoraSpec, target: Path) -> None:
    """Write peft's two files into a directory, created if it is missing.

    `adapters` have the names of `name_for_peft`. Raises: StoreError if a file cannot be written.
    """
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": None,
        "r": spec.rank,
        # A whole number as an integer: vLLM compares ranks and alphas as integers.
        "lora_alpha": int(spec.alpha) if spec.alpha == int(spec.alpha) else spec.alpha,
        "lora_dropout": 0.0,
        "target_modules": sorted(spec.target_names),
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
    }
    weights_name, config_name = ADAPTER_FILES
    try:
        target.mkdir(parents=True, exist_ok=True)
        stored = {name: tensor.contiguous() for name, tensor in adapters.items()}
        save_file(stored, target / weights_name, metadata={"format": "pt"})
        (target / config_name).write_text(json.dumps(config, indent=2))
    except (OSError, SafetensorError) as error:
        raise StoreError(
            f"the adapters could not be written to {target} ({error})",
            allowed="a directory that can be written to",
            next_step="free disk space or mend its permissions, and start the run again",
        ) from error
