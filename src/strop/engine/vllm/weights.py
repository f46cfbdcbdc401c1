"""Loads new weights into vLLM's workers, and proves that they are live.

A worker reads the file, compares digest, names, shapes and types with the expected ones, and only then passes
the tensors to vLLM's reload. Then it checks the live model, because a reload that drops a tensor is silent:
on a CPU, vLLM keeps matrices repacked for its kernels, and its reload does not update the packed copy of a
tied LM head. Plain tensors are compared bit for bit; some columns of repacked ones are read through the
kernel that serves requests, with one-hot inputs, which give the stored values exactly.

Proven: Llama-like models (every tensor is at its checkpoint's name, alone or fused), one worker per engine.
With tensor parallelism a worker holds a part of each tensor, and only that its tensors changed is proven.
Runs inside vLLM's processes: torch, safetensors and light modules of strop only.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file

from strop.engine.vllm.environment import follow_parent
from strop.errors import WeightMismatch
from strop.policy.publication import read_published, tensors_digest, unfit

_PROBED_COLUMNS = 16
"""Probed columns of each repacked matrix. A step of training changes many values in so many columns."""
_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"
ADAPTER_FILE = "adapter_model.safetensors"
RAISED = (RuntimeError, ValueError, TypeError, LookupError, AttributeError, AssertionError, OSError)
"""Errors of vLLM's workers and loaders."""


class WeightWorker:
    """Joins vLLM's worker class (`worker_extension_cls`); its methods are called by name."""

    model_runner: Any
    model_config: Any
    parallel_config: Any
    reload_weights: Any

    def strop_follow_parent(self) -> None:
        """End with the process that started this one, however that ends."""
        follow_parent()

    def strop_load(self, path: str, digest: str) -> dict[str, Any]:
        """Load a file of weights, all of it or nothing, and prove it.

        Returns why nothing was loaded (`refusal`), or why the loaded weights are wrong (`flaw`).
        """
        forms = read_forms(Path(self.model_config.model))
        try:
            tensors = read_published(path, expected_digest=digest)
            require_forms(path, tensors, forms, self.model_config.dtype)
        except WeightMismatch as error:
            return {"refusal": str(error), "flaw": None}
        model = self.model_runner.get_model()
        is_split = self.parallel_config.tensor_parallel_size > 1
        before = _live_digest(model) if is_split else ""
        try:
            self._take(model, tensors)
        except RAISED as error:
            return {"refusal": None, "flaw": f"the reload failed ({type(error).__name__}: {error})"}
        if is_split:
            is_kept = _live_digest(model) == before
            return {"refusal": None, "flaw": "no live tensor changed" if is_kept else None}
        return {"refusal": None, "flaw": find_stale(model, tensors)}

    def _take(self, model: Any, tensors: Mapping[str, torch.Tensor]) -> None:
        """Pass the tensors to vLLM's reload, and repack the LM head, which it omits."""
        self.reload_weights(weights_iterator=iter(tensors.items()))
        head: Any = getattr(model, "lm_head", None)
        if hasattr(head, "cpu_linear") and head.weight.numel():
            head.quant_method.process_weights_after_loading(head)


def read_forms(model_dir: Path) -> dict[str, tuple[int, ...]]:
    """Return name and shape of every tensor that the policy publishes of a model in a directory."""
    config = json.loads((model_dir / "config.json").read_text())
    is_tied = bool(config.get("tie_word_embeddings", False))
    forms: dict[str, tuple[int, ...]] = {}
    for file in sorted(model_dir.glob("*.safetensors")):
        with safe_open(str(file), framework="pt") as stored:
            for name in stored.keys():  # noqa: SIM118  (safe_open is no mapping)
                if not (name == _HEAD and is_tied) and not name.endswith(".inv_freq"):
                    forms[name] = tuple(stored.get_slice(name).get_shape())
    return forms


def model_digest(model_dir: Path, dtype: torch.dtype) -> str:
    """Return the digest of a model directory as the policy that loads it would publish it."""
    forms = read_forms(model_dir)
    tensors: dict[str, torch.Tensor] = {}
    for file in sorted(model_dir.glob("*.safetensors")):
        tensors |= {name: tensor for name, tensor in load_file(file).items() if name in forms}
    return tensors_digest((name, tensor.to(dtype)) for name, tensor in tensors.items())


def require_forms(
    source: str,
    tensors: Mapping[str, torch.Tensor],
    forms: Mapping[str, tuple[int, ...]],
    dtype: torch.dtype,
) -> None:
    """Refuse tensors of other names, shapes or types. Raises: WeightMismatch."""
    for name in sorted(tensors.keys() | forms.keys()):
        if name not in tensors:
            raise unfit(source, f"{name} is missing")
        if name not in forms:
            raise unfit(source, f"{name} is unknown to the model")
        if tuple(tensors[name].shape) != forms[name] or tensors[name].dtype != dtype:
            raise unfit(source, f"{name} is {tensors[name].dtype} {tuple(tensors[name].shape)}")


def find_stale(model: Any, tensors: Mapping[str, torch.Tensor]) -> str | None:
    """Describe the first tensor that is not in the live model; None if all are."""
    modules = {name.replace(".base_layer", ""): module for name, module in model.named_modules()}
    if _HEAD not in tensors and _EMBEDDING in tensors and "lm_head" in modules:
        tensors = {**tensors, _HEAD: tensors[_EMBEDDING]}
    for name, module_name, leaf, start in _places(model, tensors):
        module = modules.get(module_name)
        if module is None:
            return f"{name} has no place in the live model"
        if not _is_live(module, leaf, start, tensors[name]):
            return f"{name} is not live"
    return None


def _places(model: Any, tensors: Mapping[str, torch.Tensor]) -> Iterator[tuple[str, str, str, int]]:
    """Yield tensor, live module, kind (weight or bias) and first row there."""
    fusions: Mapping[str, list[str]] = getattr(model, "packed_modules_mapping", {})
    fused = {part: (whole, parts) for whole, parts in fusions.items() for part in parts}
    for name in tensors:
        module_name, _, leaf = name.rpartition(".")
        prefix, _, last = module_name.rpartition(".")
        if last not in fused:
            yield name, module_name, leaf, 0
            continue
        whole, parts = fused[last]
        before = parts[: parts.index(last)]
        start = sum(len(tensors[f"{prefix}.{part}.{leaf}"]) for part in before)
        yield name, f"{prefix}.{whole}", leaf, start


def _is_live(module: Any, leaf: str, start: int, tensor: torch.Tensor) -> bool:
    """Whether a module has these values, in its plain tensor and in its repacked one."""
    rows = slice(start, start + len(tensor))
    plain = getattr(module, leaf)
    if plain.numel():
        held = plain.detach()[rows].to(tensor.device)
        if held.shape != tensor.shape or not torch.equal(held.to(tensor.dtype), tensor):
            return False
    if leaf != "weight" or not hasattr(module, "cpu_linear"):
        return bool(plain.numel())
    # The probed columns depend on the values, so they are not predictable.
    sample = tensor[0].contiguous().view(torch.uint8).numpy().tobytes()
    seed = int.from_bytes(hashlib.blake2b(sample, digest_size=7).digest(), "little")
    generator = torch.Generator().manual_seed(seed)
    columns = torch.randperm(tensor.shape[1], generator=generator)[:_PROBED_COLUMNS]
    inputs = torch.zeros(len(columns), tensor.shape[1], dtype=tensor.dtype)
    inputs[torch.arange(len(columns)), columns] = 1.0
    with torch.inference_mode():
        outputs = module.cpu_linear(inputs, plain, None)[:, rows]
    return torch.equal(outputs.to(tensor.dtype), tensor[:, columns].T)


def _live_digest(model: Any) -> str:
    return tensors_digest(model.named_parameters())


def find_adapter_flaw(path: str, digest: str) -> str | None:
    """Return the flaw of a LoRA adapter's directory; None if it has the promised digest."""
    try:
        tensors = load_file(Path(path) / ADAPTER_FILE)
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        return f"the published adapter {path} cannot be read ({error})"
    actual = tensors_digest(tensors.items())
    if actual != digest:
        return f"the published adapter {path} has digest {actual}, not {digest}"
    return None
