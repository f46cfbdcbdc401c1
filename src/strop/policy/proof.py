"""The proof at every load: strop's forwards equal the model's eager forward of single sequences.

Two prompts of different lengths with two replies each go through the functions that training uses
(trunk and head over a packed batch, and the backward through both) and those that generation uses (prefill,
steps over states, rows that end before others). Log-probabilities, and the gradients that reach the
embeddings, are compared with the model's eager forward of each sequence alone. Windows are narrowed
meanwhile, so that the few tokens reach beyond them. The first way of running the model that passes is
chosen: packed rows with fused layers, packed rows, each sequence by itself. A model that passes in none is
refused.

The comparison is made in float32, where rounding cannot hide a wrong forward: a model in bfloat16
is widened for it where memory allows, and then compared once more in bfloat16.

Shapes: T tokens of a sequence, M scored tokens, I distinct token ids, D hidden width, V vocabulary.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from strop.errors import ConfigError
from strop.hardware import free_memory_bytes
from strop.policy.attention import PLAIN, PrefixSharedAttention, ScoreRule
from strop.policy.families import say_alone, why_alone
from strop.policy.fused_trunk import build_fused_trunk
from strop.policy.head import HeadForm, UnknownHead, find_head_form
from strop.policy.language_model import LanguageModel, ModelShape, find_trunk, read_shape
from strop.policy.packing import PackedGroup, PackedLayout
from strop.policy.probe import Answer, ask_engine, ask_learner, ask_module, make_groups, spread_token_ids

_NARROW = 4
"""Positions that windows see during the proof; prompts and replies go beyond."""
_SHIFTS = (17, 31)
"""Shifts of the token ids, one for each probe. Two experts with nearly equal scores may swap by rounding;
they will not swap again with other tokens."""
_EXACT_GAP = 1e-5
"""In float32: largest gap of a log-probability (nats), per unit of the largest logit, which is at least 1."""
_LAST_BIT = {True: 2.0**-23, False: 2.0**-8}
_ROUNDINGS = {True: 10.0, False: 3.0}
"""Allowed multiples of the change that the last bit of the embeddings makes, in float32 (True) and bfloat16:
a deep model may amplify rounding."""
_CAUSAL_GAP = 1e-4
"""Change of a logit by later tokens, relative to the largest logit, above which a model is not causal."""
_EXACT_COSINE_GAP = 1e-6
"""In float32: 1 - cosine of the gradients."""
_ROUNDED_GAP_NATS = 0.1
"""In bfloat16: mean gap. Layers, head and layout were proven in float32 before."""
_ROUNDED_COSINE_GAP = 0.02
_NUM_WORDS = 1024
"""Vocabulary of the small model that stands for a whole one."""
_SPARE = 1.25
"""Free memory required, as a multiple of the bytes that widening takes."""

# Errors that code may raise which expects other inputs than token ids.
_FAILURES = (
    *(RuntimeError, ValueError, TypeError, LookupError, AttributeError, AssertionError),
    *(ArithmeticError, StopIteration, ImportError),
)
_WINDOWS = (
    *("sliding_window", "sliding_window_size", "attention_chunk_size", "local_attention"),
    *("attention_window_size", "window_size"),
)


class _Flaw(Exception):
    """Why a way of running a model is wrong, or what a model lacks; the end of a sentence."""


@dataclass(frozen=True, slots=True, eq=False)
class _Probe:
    """The sequences that a model is proven with, and the results of its eager forward."""

    groups: tuple[PackedGroup, ...]
    own: Answer
    measure_change: Callable[[float], float]
    """Returns the change of log-probabilities (nats) when embeddings change by a fraction."""


Way = Callable[[str], LanguageModel | None]
"""Builds a model that runs a module in one way, from the flaw of the previous way; None if it cannot."""


def prove(kind: type[LanguageModel], module: Any, name: str, *, may_fuse: bool) -> LanguageModel:
    """Return a model that runs a transformers module in the first way that is right.

    Raises: ConfigError with the flaw, if none is.
    """
    try:
        with _frozen(module):
            model = _choose(kind, module, may_fuse=may_fuse)
    except _Flaw as flaw:
        raise ConfigError(
            f"{name}, of the family {module.config.model_type}, cannot be run exactly: {flaw}",
            allowed="causal language models that are asked with token ids alone",
            next_step="choose a model of a family that docs/models.md lists as run",
        ) from flaw
    if model.shape.alone_because is not None:
        warnings.warn(f"{name}: {say_alone(model.shape.alone_because)}", RuntimeWarning, stacklevel=3)
    return model


def judge(path: Path, dtype: torch.dtype) -> tuple[ModelShape, HeadForm, str]:
    """Prove a random model of a directory's config with a layer of each kind and few words.

    Returns its sizes, the form of its head, and its implementation of attention: for ranks, none of which
    ever holds a whole model. Raises: ConfigError like `prove`.
    """
    config = AutoConfig.from_pretrained(path, local_files_only=True)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        build: Any = partial(AutoModelForCausalLM.from_config, dtype=dtype, attn_implementation="eager")
        try:
            module = build(shorten_config(deepcopy(config)))
        except _FAILURES:
            # A config that does not tell its depth in one place.
            module = build(config)
    model = prove(LanguageModel, module.eval(), str(path), may_fuse=False)
    return model.shape, model.form, module.config.get_text_config()._attn_implementation


def shorten_config(config: Any) -> Any:
    """Leave at least two layers in a config, one of each kind, and a small vocabulary."""
    text = config.get_text_config()
    depth = text.num_hidden_layers
    lists = [name for name, value in vars(text).items() if isinstance(value, list) and len(value) == depth]
    firsts = [getattr(text, name).index(kind) for name in lists for kind in getattr(text, name)]
    kept = min(max(2, 1 + max(firsts, default=0)), depth)
    for name in lists:
        setattr(text, name, getattr(text, name)[:kept])
    text.num_hidden_layers = kept
    text.vocab_size, text.pad_token_id = min(text.vocab_size, _NUM_WORDS), None
    return config


def _choose(kind: type[LanguageModel], module: Any, *, may_fuse: bool) -> LanguageModel:
    """Try the ways of running a module in turn, in float32 and then in its type."""
    head = module.get_output_embeddings()
    if head is None or find_trunk(module) is None or module.get_input_embeddings() is None:
        raise _Flaw("it has no head over a vocabulary")
    is_wide = head.weight.dtype is torch.float32
    with _narrowed(module):
        with _widened(module) as is_exact:
            probes = [_ask_eagerly(module, shift, has_gradients=True) for shift in _SHIFTS]
            ways = _ways(kind, module, _read_head(module), may_fuse=may_fuse)
            try:
                model, place, flaw = _first_right(ways, probes, "", is_exact=is_exact)
            except _Flaw:
                _require_causal(module)
                raise
        if is_exact and not is_wide:
            probes = [_ask_eagerly(module, shift, has_gradients=False) for shift in _SHIFTS]
            model, _, _ = _first_right(ways[place:], probes, flaw, is_exact=False)
    return model


def _first_right(
    ways: Sequence[Way], probes: Sequence[_Probe], flaw: str, *, is_exact: bool
) -> tuple[LanguageModel, int, str]:
    """Return the first model that passes a probe, the place of its way, and the flaw of the way before.

    Raises: _Flaw if there is none.
    """
    for place, way in enumerate(ways):
        model = way(flaw)
        if model is None:
            continue
        flaws = []
        for probe in probes:
            flaw_here = _find_flaw(model, probe, is_exact=is_exact)
            if flaw_here is None:
                return model, place, flaw
            flaws.append(flaw_here)
        flaw = flaws[-1]
    raise _Flaw(flaw)


def _require_causal(module: Any) -> None:
    """Raises: _Flaw if later tokens change the model's prediction of an earlier one."""
    module.set_attn_implementation("eager")
    device = module.get_output_embeddings().weight.device
    token_ids = torch.from_numpy(spread_token_ids(module, 12, shift=0)).long().to(device)[None]
    with torch.no_grad():
        long, short = (module(input_ids=token_ids[:, :num], use_cache=False).logits[0, 5] for num in (12, 6))
    if float((long - short).abs().max()) > _CAUSAL_GAP * max(float(long.abs().max()), 1.0):
        raise _Flaw("what stands behind a token changes what it says of the next one")


def _ask_eagerly(module: Any, shift: int, *, has_gradients: bool) -> _Probe:
    """Compute a probe by the module's eager forward, before any way is tried and changes the module."""
    groups = make_groups(module, shift)

    def eager(change: float) -> Answer:
        """Run the module's eager forward, with embeddings changed by a fraction."""
        previous = module.config.get_text_config()._attn_implementation
        module.set_attn_implementation("eager")
        try:
            return ask_module(module, groups, change, has_gradient=has_gradients and not change)
        except _FAILURES as error:
            raise _Flaw(f"its own forward fails on token ids alone ({_describe(error)})") from error
        finally:
            module.set_attn_implementation(previous)

    own = eager(0.0)
    if not bool(own.logprob_M.isfinite().all()):
        raise _Flaw("its own forward gives log-probabilities that are not finite")
    return _Probe(groups, own, lambda change: float((eager(change).logprob_M - own.logprob_M).abs().max()))


def _ways(kind: type[LanguageModel], module: Any, form: HeadForm, *, may_fuse: bool) -> list[Way]:
    """List the ways of running a module, the fastest first."""
    shape, because = None, why_alone(module.config.to_dict())
    if because is None:
        try:
            shape = _observe(kind, module, form)
        except _Flaw as flaw:
            because = str(flaw)

    def packed(_: str, *, is_fused: bool) -> LanguageModel | None:
        fused = build_fused_trunk(module) if is_fused else None
        if is_fused and fused is None:
            return None
        model = kind(module, shape=shape, form=form)
        model.fused = fused
        return model

    def alone(flaw: str, *, implementation: str, keeps_states: bool) -> LanguageModel | None:
        try:
            module.set_attn_implementation(implementation)
        except _FAILURES:
            return None
        why = because or f"in packed rows {flaw}"
        model = kind(module, shape=replace(read_shape(module), alone_because=why), form=form)
        model.keeps_states = keeps_states
        return model

    ways: list[Way] = []
    if shape is not None:
        ways += [partial(packed, is_fused=is_fused) for is_fused in (True, False)[0 if may_fuse else 1 :]]
    for keeps_states in (True, False):
        ways += [
            partial(alone, implementation=implementation, keeps_states=keeps_states)
            for implementation in ("sdpa", "eager")
        ]
    return ways


class _Observer:
    """An attention that records the calls of the layers."""

    def __init__(self, layout: PackedLayout, device: torch.device) -> None:
        self._inner = PrefixSharedAttention(layout, device)
        self.layers: list[int] = []
        self.sizes: set[tuple[int, int, int, int]] = set()
        """Query heads, key-value heads, and widths of keys and values."""
        self.is_linear = True

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scaling: float,
        rule: ScoreRule = PLAIN,
    ) -> torch.Tensor:
        """Record and compute one layer. Shapes: see `AttentionContext.attend`."""
        self.layers.append(layer)
        self.sizes.add((query.shape[0], key.shape[0], key.shape[2], value.shape[2]))
        self.is_linear = self.is_linear and rule.is_linear
        return self._inner.attend(layer, query, key, value, scaling, rule)


@torch.no_grad()
def _observe(kind: type[LanguageModel], module: Any, form: HeadForm) -> ModelShape:
    """Return the sizes of a model whose layers all attend through strop.

    Raises: _Flaw if they do not.
    """
    device = module.get_output_embeddings().weight.device
    token_ids = spread_token_ids(module, 2, shift=0)
    observer = _Observer(PackedLayout.of_prompts([2]), device)
    try:
        shape = read_shape(module)
        model = kind(module, shape=shape, form=form)
        model.trunk(torch.from_numpy(token_ids).long().to(device), torch.arange(2, device=device), observer)
    except _FAILURES as error:
        is_ours = isinstance(error, NotImplementedError)
        raise _Flaw(str(error) if is_ours else f"it takes no packed rows ({_describe(error)})") from error
    if observer.layers != list(range(shape.num_layers)):
        raise _Flaw("not each of its layers attends once")
    if len(observer.sizes) > 1:
        raise _Flaw("its layers have heads of different sizes")
    ((num_heads, num_kv_heads, key_width, value_width),) = observer.sizes
    return replace(
        shape,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_width=key_width,
        value_width=value_width,
        has_plain_scores=observer.is_linear and key_width == value_width,
    )


def _read_head(module: Any) -> HeadForm:
    device = module.get_output_embeddings().weight.device
    token_ids = torch.from_numpy(spread_token_ids(module, 2, shift=0)).long().to(device)
    try:
        return find_head_form(module, find_trunk(module), token_ids)
    except UnknownHead as unknown:
        raise _Flaw(str(unknown)) from unknown
    except _FAILURES as error:
        raise _Flaw(f"its own forward fails on token ids alone ({_describe(error)})") from error


def _find_flaw(model: LanguageModel, probe: _Probe, *, is_exact: bool) -> str | None:
    """Return how a model's results for a probe are wrong, in training or in generation; None if right."""
    own = probe.own
    try:
        trained = ask_learner(model, probe.groups, has_gradient=own.gradient_I_D is not None)
        generated_M = ask_engine(model, probe.groups)
    except _FAILURES as error:
        return f"it fails with {_describe(error)}"
    scale = max(own.largest_logit, 1.0)
    for doing, logprob_M in (("scoring", trained.logprob_M), ("generating", generated_M)):
        gaps = (logprob_M - own.logprob_M).abs()
        size = float(gaps.max() if is_exact else gaps.mean())
        bound = _EXACT_GAP * scale if is_exact else _ROUNDED_GAP_NATS
        if size <= bound:
            continue
        if not size <= _ROUNDINGS[is_exact] * probe.measure_change(_LAST_BIT[is_exact]):
            return f"{doing} is off by {size:.2g} nats"
    if trained.gradient_I_D is None or own.gradient_I_D is None:
        return None
    one, other = trained.gradient_I_D, own.gradient_I_D
    cosine = float((one * other).sum() / (one.norm() * other.norm()))
    if not 1.0 - cosine <= (_EXACT_COSINE_GAP if is_exact else _ROUNDED_COSINE_GAP):
        return f"its gradient has a cosine of {cosine:.3g} to the right one"
    return None


@contextmanager
def _frozen(module: Any) -> Iterator[None]:
    """Freeze all weights: their gradients would take as many bytes again."""
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    for parameter in trained:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in trained:
            parameter.requires_grad_(True)


@contextmanager
def _narrowed(module: Any) -> Iterator[None]:
    """Narrow every window of a module, wherever its code reads it."""
    owners = [module.config, module.config.get_text_config(), *module.modules()]
    owners += [part.config for part in module.modules() if hasattr(part, "config")]
    kept: list[tuple[dict[str, Any], str, int]] = []
    for values in {id(owner): vars(owner) for owner in owners}.values():
        wide = [name for name in _WINDOWS if type(values.get(name)) is int and values[name] > _NARROW]
        kept += [(values, name, values[name]) for name in wide]
    for values, name, _ in kept:
        values[name] = _NARROW
    try:
        yield
    finally:
        for values, name, width in kept:
            values[name] = width


@contextmanager
def _widened(module: Any) -> Iterator[bool]:
    """Convert a module to float32 where memory allows, and back. Yields whether it is in float32."""
    tensors = {id(tensor): tensor for tensor in (*module.parameters(), *module.buffers())}.values()
    narrow = [tensor for tensor in tensors if tensor.is_floating_point() and tensor.dtype.itemsize < 4]
    missing = sum(tensor.numel() * (4 - tensor.dtype.itemsize) for tensor in narrow)
    device = module.get_output_embeddings().weight.device
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else free_memory_bytes()
    if free is not None and _SPARE * missing > free:
        yield False
        return
    kept = [(tensor, tensor.dtype) for tensor in narrow]
    for tensor in narrow:
        tensor.data = tensor.data.float()
    try:
        yield True
    finally:
        for tensor, dtype in kept:
            tensor.data = tensor.data.to(dtype)


def _describe(error: BaseException) -> str:
    """Describe an error of a family's code in a few words."""
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:120]}"
