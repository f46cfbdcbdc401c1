"""The proof at loading finds what is wrong with a forward, and says what a model needs that cannot be run."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from strop.errors import ConfigError, split_error
from strop.policy import proof
from strop.policy.attention import PrefixSharedAttention
from strop.policy.head import Head
from strop.policy.language_model import LanguageModel, load_module
from strop.policy.packing import PackedLayout
from tests.fixtures.families import family_model
from tests.fixtures.tiny_model import tiny_model
from tests.policy.worlds import make_model

DTYPES = [torch.float32, torch.bfloat16]


def load_alone(path: Path, dtype: torch.dtype = torch.float32) -> LanguageModel:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        return LanguageModel.load(path, dtype=dtype)


def leak_between_replies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a reply see the prompt of another group instead of its own."""
    right = PrefixSharedAttention.__init__

    def wrong(self: PrefixSharedAttention, layout: PackedLayout, device: torch.device) -> None:
        right(self, layout, device)
        self._group_of_S = self._group_of_S.flip(0)

    monkeypatch.setattr(PrefixSharedAttention, "__init__", wrong)


def forget_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        PrefixSharedAttention,
        "_bias_of",
        lambda self, _, right=PrefixSharedAttention._bias_of: right(self, None),
    )


def forget_shared_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    """Send a prompt the gradient of its first reply alone; values stay right."""

    def wrong(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        (group_of_S,) = ctx.saved_tensors
        return grads[0].new_zeros(ctx.shape).index_copy(0, group_of_S, grads[0]), None

    monkeypatch.setattr("strop.policy.attention._Share.backward", staticmethod(wrong))


def forget_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Overwrite the newest key at every step of generation."""
    monkeypatch.setattr("strop.policy.kv_cache.KVCache.advance", lambda _: None)


def mix_rows_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Move the wrong row when one has ended."""
    monkeypatch.setattr(
        "strop.policy.kv_cache.CachedRows.keep", lambda self, rows: self.cache.keep(list(reversed(rows)))
    )


FAULTS: dict[str, tuple[Callable[[pytest.MonkeyPatch], None], str]] = {
    "a leak between replies": (leak_between_replies, "scoring is off"),
    "windows that are not kept": (forget_windows, "scoring is off"),
    "gradients that do not add up": (forget_shared_gradients, "gradient has a cosine of"),
    "a step that is forgotten": (forget_a_step, "generating is off"),
    "rows that change places": (mix_rows_up, "generating is off"),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("inject", "said"), FAULTS.values(), ids=list(FAULTS))
def test_a_fault_in_packed_rows_is_found(
    tmp_path: Path,
    inject: Callable[[pytest.MonkeyPatch], None],
    said: str,
    dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In bf16 too, where the smallest of them is less than rounding."""
    path = tiny_model(tmp_path, family="mistral", sliding_window=64)
    assert not LanguageModel.load(path, dtype=dtype).is_alone
    inject(monkeypatch)
    with pytest.warns(RuntimeWarning, match=f"by itself.*because in packed rows .*{said}"):
        model = LanguageModel.load(path, dtype=dtype)
    assert model.is_alone


def test_without_memory_to_widen_a_fault_is_still_found_in_bf16(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("strop.policy.proof.free_memory_bytes", lambda: 0)
    path = tiny_model(tmp_path)
    assert not LanguageModel.load(path, dtype=torch.bfloat16).is_alone
    leak_between_replies(monkeypatch)
    with pytest.warns(RuntimeWarning, match="scoring is off"):
        LanguageModel.load(path, dtype=torch.bfloat16)


def test_a_fault_in_every_way_of_running_is_a_refusal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Head, "project", lambda self, hidden: hidden @ self.weight.t() * 1.01)
    with pytest.raises(ConfigError, match=r"the family llama.*: scoring is off by 0\.\d"):
        LanguageModel.load(tiny_model(tmp_path), dtype=torch.float32)


REFUSED: dict[str, tuple[str, str]] = {
    "a head with layers of its own": ("bert", "its head is more than a matrix"),
    "a model that looks ahead": ("xlnet", "what stands behind a token changes what it says of the next one"),
    "a model that wants more": ("reformer", "its own forward fails on token ids alone"),
}


@pytest.mark.parametrize(("family", "said"), REFUSED.values(), ids=list(REFUSED))
def test_what_cannot_be_run_is_refused_by_what_it_needs(tmp_path: Path, family: str, said: str) -> None:
    path = family_model(tmp_path, family)
    with pytest.raises(ConfigError) as refusal:
        LanguageModel.load(path, dtype=torch.float32)
    given, _, next_step = split_error(str(refusal.value))
    assert given.startswith(f"{path}, of the family {family}, cannot be run exactly: {said}")
    assert "\n" not in given
    # Nothing is recommended that was just refused.
    assert family not in next_step


def test_a_model_that_says_nothing_finite_is_refused(tmp_path: Path) -> None:
    path = make_model(tmp_path)
    tensors = load_file(path / "model.safetensors")
    tensors["model.norm.weight"][:] = float("nan")
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigError, match="its own forward gives log-probabilities that are not finite"):
        LanguageModel.load(path, dtype=torch.float32)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("family", ["mistral", "gpt_oss", "mamba2"])
def test_the_proof_leaves_a_model_as_it_was(tmp_path: Path, family: str, dtype: torch.dtype) -> None:
    path = family_model(tmp_path, family)
    before, after = load_module(path, dtype), load_alone(path, dtype).module
    assert after.config.sliding_window == before.config.sliding_window if family != "mamba2" else True
    for (name, one), (other_name, other) in zip(
        before.named_parameters(), after.named_parameters(), strict=True
    ):
        assert (name, one.dtype, one.requires_grad) == (other_name, other.dtype, other.requires_grad)
        assert torch.equal(one, other)
        assert other.grad is None
    for one, other in zip(before.buffers(), after.buffers(), strict=True):
        assert one.dtype == other.dtype
        assert torch.equal(one, other)
    assert not any(part._forward_hooks or part._forward_pre_hooks for part in after.modules())


def test_two_experts_that_change_places_are_tried_with_other_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rounding may choose another expert for one token; the next probe decides."""
    right, asked = proof._find_flaw, []

    def unlucky(*arguments: Any, **named: Any) -> str | None:
        asked.append(arguments)
        return "scoring is off by 0.01 nats" if len(asked) == 1 else right(*arguments, **named)

    monkeypatch.setattr(proof, "_find_flaw", unlucky)
    model = LanguageModel.load(family_model(tmp_path, "mixtral"), dtype=torch.float32)
    assert (len(asked), model.is_alone) == (2, False)
    assert asked[0][1].groups[0].prompt_ids.tolist() != asked[1][1].groups[0].prompt_ids.tolist()
