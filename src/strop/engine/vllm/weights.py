"""Loads new weights into vLLM's workers.

A worker reads the file, compares digest, names, shapes and types with the expected ones, and only then passes
the tensors to vLLM's reload. That the engine computes with them is proven by the canary of the run
(`strop.train.publishing`).

Runs inside vLLM's processes: torch, safetensors and light modules of strop only.
"""

from __future__ import annotations

import ctypes
import json
import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file

from strop.errors import WeightMismatch
from strop.policy.publication import read_published, tensors_digest, unfit

_HEAD = "lm_head.weight"
ADAPTER_FILE = "adapter_model.safetensors"
RAISED = (RuntimeError, ValueError, TypeError, LookupError, AttributeError, AssertionError, OSError)
"""Errors of vLLM's workers and loaders."""


class WeightWorker:
    """Joins vLLM's worker class (`worker_extension_cls`); its methods are called by name."""

    model_runner: Any
    model_config: Any
    reload_weights: Any

    def strop_follow_parent(self) -> None:
        """End with the process that started this one, however that ends; only on Linux."""
        if sys.platform == "linux":
            # 1 is PR_SET_PDEATHSIG.
            ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)

    def strop_load(self, path: str, digest: str) -> dict[str, Any]:
        """Load a file of weights, all of it or nothing.

        Returns why nothing was loaded (`refusal`), or why the loaded weights are not whole (`flaw`).
        """
        forms = read_forms(Path(self.model_config.model))
        try:
            tensors = read_published(path, expected_digest=digest)
            require_forms(path, tensors, forms, self.model_config.dtype)
        except WeightMismatch as error:
            return {"refusal": str(error), "flaw": None}
        try:
            self._take(self.model_runner.get_model(), tensors)
        except RAISED as error:
            return {"refusal": None, "flaw": f"the reload failed ({type(error).__name__}: {error})"}
        return {"refusal": None, "flaw": None}

    def _take(self, model: Any, tensors: Mapping[str, torch.Tensor]) -> None:
        """Pass the tensors to vLLM's reload, and repack the tied LM head, which it omits on a CPU (0.32)."""
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


def require_adapter(path: str, digest: str) -> None:
    """Refuse a LoRA adapter's directory without the promised digest. Raises: WeightMismatch."""
    try:
        actual = tensors_digest(load_file(Path(path) / ADAPTER_FILE).items())
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        actual = f"none ({error})"
    if actual != digest:
        raise WeightMismatch(
            f"the published adapter {path} has digest {actual}, not {digest}",
            allowed="exactly the adapter that the policy published",
            next_step="the engine keeps its old adapter; start the run again to publish anew",
        )
