"""A learner on several ranks takes the steps of one process.

Each number of ranks is started once and plays all scenes; the tests look at what came of them.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta
from multiprocessing import set_forkserver_preload
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch.multiprocessing.spawn import start_processes
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from strop.algorithm.catalog import GRPO, GSPO
from strop.algorithm.offline import Divergence, Preference
from strop.cluster.sharded import ShardedMasters, load_empty
from strop.errors import CorruptRecord, LearnerError, StoreError
from strop.policy.distilling import DistillTerm
from strop.policy.footprint import rank_kept_bytes, read_model_size
from strop.policy.language_model import DTYPES, LanguageModel
from strop.policy.learner import TEACHER, Learner, LossTerm, Term
from strop.policy.lora import ADAPTER_FILES
from strop.policy.objective import Scope, ScoredTokens, TokenTerms, TokenTermsFn
from strop.policy.optimizer import Histogram, Ranks, StepPlan, StepReport
from strop.policy.packing import PackedGroup, PackedReply, with_logprobs
from strop.policy.publication import digest_each, tensors_digest
from strop.policy.scoring import FrozenModel
from strop.policy.weights import export_tensors, load_published, own_tensors, weights_digest
from strop.rollout import FloatArray
from strop.spec.model import LoraSpec
from strop.spec.train import OptimizerSpec
from tests.fixtures.families import family_model
from tests.policy.worlds import Gradients, World, load_model, make_model, reinforce, relative_error

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:.*each sequence is computed by itself:RuntimeWarning"),
]

LR = 3e-3
BUDGET = 12
"""Positions of a micro-batch, so that ranks have several, and not equally many."""
TOLERANCE = 1e-6
GRADIENT_TOLERANCES = {
    **dict.fromkeys(("tied", "untied", "recomputed"), TOLERANCE),
    # Sums along a sequence are longer than any other, and rows are padded otherwise on other ranks.
    "states": 100 * TOLERANCE,
    # Of a model whose norms take the mean away: what is left of a sum is less than what was added.
    "bias": 10 * TOLERANCE,
}
"""Relative, per parameter tensor, in float32."""
JSD = Divergence(name="jsd")
Scene = dict[str, Any]
Change = Callable[[LanguageModel], None]


def batch(seed: int = 0, num_groups: int = 5) -> list[PackedGroup]:
    worlds = [World(seed * 100 + index) for index in range(num_groups)]
    return [
        world.packed(3 + index, [4, 2 + index], advantage=1.0 - 0.7 * index)
        for index, world in enumerate(worlds)
    ]


def lone(seed: int) -> list[PackedGroup]:
    """Return what one rank has to feed."""
    return [World(seed * 100).packed(3, [4])]


def term(
    groups: Sequence[PackedGroup], name: str = "rl", rule: TokenTermsFn = reinforce, weight: float = 1.0
) -> LossTerm:
    return LossTerm(name=name, groups=groups, temperature=0.7, token_terms=rule, weight=weight)


def quadratic(tokens: ScoredTokens, /) -> TokenTerms:
    return TokenTerms(loss_N=tokens.logprob_M.square(), grad_N=2 * tokens.logprob_M)


def broken(tokens: ScoredTokens, /) -> TokenTerms:
    return TokenTerms(
        loss_N=torch.zeros_like(tokens.logprob_M), grad_N=torch.full_like(tokens.logprob_M, math.inf)
    )


def mean_of_reply(tokens: ScoredTokens, /) -> TokenTerms:
    """Weigh tokens by their reply's mean, which no batch without tokens has."""
    num_replies = int(tokens.reply_M.max()) + 1
    counts = torch.bincount(tokens.reply_M, minlength=num_replies)
    sums = torch.zeros(num_replies).index_add_(0, tokens.reply_M, tokens.logprob_M)
    weight = (sums / counts.clamp(min=1))[tokens.reply_M]
    return TokenTerms(loss_N=weight * tokens.logprob_M, grad_N=weight)


def others(groups: Sequence[PackedGroup]) -> list[Term]:
    """Return a term over whole replies, and one that learns from what the same weights say otherwise."""
    shown = [replace(group, teacher_prompt_ids=group.prompt_ids[::-1].copy()) for group in groups]
    return [
        replace(term(groups, "sequence", mean_of_reply, 0.3), scope=Scope.REPLY),
        DistillTerm(name="own", groups=shown, temperature=1.0, divergence=JSD, is_own_teacher=True),
    ]


def weigh(reply: PackedReply, advantage: float) -> PackedReply:
    """Return one half of a pair, of five in a batch."""
    return replace(reply, advantage=advantage, weight=0.2)


def load_frozen(model_dir: Path) -> FrozenModel:
    """Load a model that never learns, whole or this rank's rows of it."""
    is_whole, dtype = not dist.is_initialized(), torch.float32
    model = LanguageModel.load(model_dir, dtype=dtype) if is_whole else load_empty(model_dir, dtype)
    for _, parameter in model.named_parameters():
        parameter.requires_grad_(False)
    if is_whole:
        return FrozenModel(model, max_positions=BUDGET)
    weights = ShardedMasters(model, model_dir)
    return FrozenModel(model, max_positions=BUDGET, weights=weights, ranks=Ranks(is_group=True))


def heard(scores: list[FloatArray]) -> list[FloatArray]:
    """Return what the first rank found, on every rank, as the loop sends it."""
    box = [scores]
    if dist.is_initialized():
        dist.broadcast_object_list(box)
    return box[0]


def play_frozen(learner: Learner, frozen: FrozenModel) -> tuple[list[FloatArray], StepReport]:
    """Take a step over whole replies, over pairs, and over what a teacher thinks."""
    pairs = [replace(one, replies=tuple(map(weigh, one.replies, (1.0, -1.0)))) for one in batch(11)]
    sided = with_logprobs(pairs, "reference", heard(frozen.score(pairs, 0.7)))
    learner.frozen[TEACHER] = frozen
    terms: list[Term] = [
        replace(term(batch(10), "gspo", GSPO, 0.5), scope=GSPO.scope),
        replace(
            term(sided, "dpo", Preference(name="dpo", beta=0.2)),
            scope=Scope.GROUP,
        ),
        DistillTerm(name="taught", groups=batch(12), temperature=1.0, divergence=JSD),
    ]
    return frozen.score(batch(10), 0.7), learner.step_terms(terms)


def play_update(learner: Learner) -> Scene:
    """Take a batch in three mini-batches."""
    algorithm = replace(GRPO, mode="decoupled", clip_low=0.01, clip_high=0.01)
    parts = [
        with_logprobs(share, "old", heard(learner.score(share, 0.7)))
        for share in (batch(20, 4), batch(21, 3), batch(20, 4))
    ]
    terms = [replace(term(part, rule=algorithm), entropy_weight=0.1) for part in parts]
    plans = [StepPlan(version=1, place=place) for place in range(3)]
    scene: Scene = {
        "reports": [learner.step_terms([one], plan) for one, plan in zip(terms, plans, strict=True)],
        "version": learner.version,
    }
    return {**scene, "now": learner.score(batch(20, 4), 0.7)}


def sharded(
    model_dir: Path, *, dtype: str = "float32", change: Change = lambda model: None, **spec: Any
) -> Learner:
    model = load_empty(model_dir, DTYPES[dtype])
    change(model)
    masters, ranks = ShardedMasters(model, model_dir), Ranks(is_group=True)
    given = OptimizerSpec(**({"lr": LR} | spec))
    return Learner(model, given, micro_batch_positions=BUDGET, masters=masters, ranks=ranks)


def single(
    model_dir: Path, *, dtype: str = "float32", change: Change = lambda model: None, **spec: Any
) -> Learner:
    model = LanguageModel.load(model_dir, dtype=DTYPES[dtype])
    change(model)
    return Learner(model, OptimizerSpec(**({"lr": LR} | spec)), micro_batch_positions=BUDGET)


def adapt(model: LanguageModel) -> None:
    model.adapt(LoraSpec(rank=3, alpha=6.0), seed=5)


def refusal(work: Callable[[], object]) -> str:
    """Return what a work was refused with."""
    with pytest.raises((LearnerError, StoreError)) as caught:
        work()
    return f"{type(caught.value).__name__}: {caught.value}"


def play_rank(models: dict[str, Path], kept: Path, target: Path) -> Scene:
    """Play every scene on this rank."""
    rank = dist.get_rank()
    scene: Scene = {"gradients": {}}
    for name in ("tied", "untied", "states", "bias"):
        learner = sharded(models[name])
        scene["gradients"][name] = learner.gradients(batch(), temperature=0.7, token_terms=reinforce)
    scene["loaded"] = {name: load_frozen(path).digest_tensors() for name, path in models.items()}
    again = sharded(models["tied"], change=LanguageModel.recompute_activations)
    scene["gradients"]["recomputed"] = again.gradients(batch(), temperature=0.7, token_terms=reinforce)
    learner = sharded(models["tied"], max_grad_norm=1.0)
    scene["steps"] = [learner.step_terms([term(batch(seed))]) for seed in range(3)]
    scene["scores"] = learner.score(batch(), 0.7)
    two_terms = [term(batch(3)), term(batch(4), "pull", quadratic, 0.1)]
    scene["two terms"] = learner.step_terms(two_terms)
    # The other ranks have nothing to feed, and take part.
    scene["one rank only"] = learner.step_terms([term(lone(5))])
    scene["other terms of one rank"] = learner.step_terms(others(lone(9)))
    scene["empty"] = learner.step_terms([term([])])
    rule = broken if rank == 0 else reinforce
    scene["not finite"] = refusal(lambda: learner.step_terms([term(batch(6), rule=rule)]))
    scene["after"] = learner.step_terms([term(batch(7))])
    scene["version"] = learner.version
    scene["kept"] = count_kept_bytes(learner)
    for part in ("state", "export"):
        (target / part).mkdir(parents=True, exist_ok=True)
    learner.save_state(target / "state")
    scene["digest"] = learner.write_weights(target / "weights.safetensors")
    scene["named"] = {learner.export(target / "export", models["tied"]), learner.weights_digest()}
    scene["tensors"] = learner.digest_tensors()
    own_dir = target / f"seen by {rank}"
    own_dir.mkdir()
    scene["apart"] = learner.write_weights(own_dir / "weights.safetensors")
    scene["no room"] = refusal(lambda: learner.write_weights(target / "absent" / "weights.safetensors"))
    scene["resumed"] = [resume(models["tied"], path) for path in sorted(kept.iterdir())]
    scene["adapted"] = play_adapted(sharded(models["rounded"], dtype="bfloat16", change=adapt), target)
    scene["update"] = play_update(sharded(models["tied"]))
    scene["frozen"] = play_frozen(sharded(models["tied"]), load_frozen(models["untied"]))
    return scene


class Allocations(TorchDispatchMode):
    """Notes the shapes of all tensors that have memory."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.shapes: set[tuple[int, ...]] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        output = func(*args, **(kwargs or {}))
        for one in tree_leaves(output):
            # Not of fake tensors, nor of views: a file is mapped into memory, and read where it is needed.
            is_view = any(returned.alias_info for returned in func._schema.returns)
            if type(one) is torch.Tensor and one.device.type != "meta" and not is_view:
                self.shapes.add(tuple(one.shape))
        return output


def count_kept_bytes(learner: Learner) -> int:
    """Return what a rank holds between steps, each storage once."""
    masters = learner._masters.values()
    tensors = [tensor for master in masters for tensor in (master, master.grad) if tensor is not None]
    tensors += [t for s in learner._optimizer.moments.values() for t in s.values() if t.dim()]
    head = learner._weights.head_gradients()
    tensors += [gradient for gradient in (head.weight, head.bias) if gradient is not None]
    storages = [tensor.untyped_storage() for tensor in tensors]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def resume(model_dir: Path, path: Path) -> tuple[int, StepReport]:
    """Go on from another learner's state."""
    learner = sharded(model_dir)
    learner.load_state(path)
    return learner.version, learner.step_terms([term(batch(8))])


def play_adapted(learner: Learner, target: Path) -> Scene:
    """Train adapters in bf16, and keep them."""
    reports = [learner.step_terms([term(batch(seed))]) for seed in range(2)]
    for part in ("adapter", "adapter-state"):
        (target / part).mkdir(parents=True, exist_ok=True)
    learner.save_state(target / "adapter-state")
    merged = learner.write_weights(target / "merged.safetensors")
    return {"reports": reports, "digest": learner.write_adapter(target / "adapter"), "merged": merged}


def run_ranks(work: Callable[..., Any], num_ranks: int, store_dir: Path, *args: Any) -> list[Any]:
    """Return what `work(*args)` returned on each rank. Raises: ProcessRaisedException of the first."""
    store_dir.mkdir(parents=True, exist_ok=True)
    # Imported once, by the server that the ranks are forks of, if this session has not used it before.
    names = ("llama", "qwen2", "qwen3_next", "phi", "deepseek_v3")
    set_forkserver_preload([work.__module__, *(f"transformers.models.{x}.modeling_{x}" for x in names)])
    start_processes(  # type: ignore[no-untyped-call]
        serve_rank, (work, num_ranks, store_dir, args), nprocs=num_ranks, start_method="forkserver"
    )
    return [torch.load(store_dir / f"{rank}.pt", weights_only=False) for rank in range(num_ranks)]


def serve_rank(rank: int, work: Callable[..., Any], num_ranks: int, store_dir: Path, args: Any) -> None:
    torch.set_num_threads(1)
    method, limit = f"file://{store_dir / 'store'}", timedelta(seconds=300.0)
    dist.init_process_group("gloo", init_method=method, rank=rank, world_size=num_ranks, timeout=limit)
    torch.save(work(*args), store_dir / f"{rank}.pt")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {
        "tied": make_model(root / "tied"),
        "untied": make_model(root / "untied", tie_word_embeddings=False, family="qwen2"),
        "rounded": make_model(root / "rounded", dtype="bfloat16"),
        # Run sequence by sequence; and a head with a bias.
        "states": family_model(root / "states", "qwen3_next"),
        "bias": family_model(root / "bias", "phi"),
        # Experts that are joined at loading, and a buffer in the file.
        "experts": family_model(root / "experts", "deepseek_v3"),
    }


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("ranks")


@pytest.fixture(scope="module")
def alone(models: dict[str, Path], root: Path) -> Scene:
    """Play the scenes in one process, and keep its state for the ranks."""
    scene: Scene = {"gradients": {}}
    for name in ("tied", "untied", "states", "bias"):
        scene["gradients"][name] = single(models[name]).gradients(
            batch(), temperature=0.7, token_terms=reinforce
        )
    scene["gradients"]["recomputed"] = scene["gradients"]["tied"]
    learner = single(models["tied"], max_grad_norm=1.0)
    scene["steps"] = [learner.step_terms([term(batch(seed))]) for seed in range(3)]
    scene["scores"] = learner.score(batch(), 0.7)
    scene["two terms"] = learner.step_terms([term(batch(3)), term(batch(4), "pull", quadratic, 0.1)])
    scene["one rank only"] = learner.step_terms([term(lone(5))])
    scene["other terms of one rank"] = learner.step_terms(others(lone(9)))
    scene["empty"] = learner.step_terms([term([])])
    scene["after"] = learner.step_terms([term(batch(7))])
    (root / "kept" / "1").mkdir(parents=True)
    learner.save_state(root / "kept" / "1")
    scene["learner"] = learner
    return scene


@pytest.fixture(scope="module")
def played(models: dict[str, Path], root: Path, alone: Scene) -> dict[int, list[Scene]]:
    """Play the scenes on 2 ranks, then on 4, which also go on from the state of the 2."""
    scenes = {}
    for num_ranks in (2, 4):
        target = root / str(num_ranks)
        scenes[num_ranks] = run_ranks(
            play_rank, num_ranks, root / f"store-{num_ranks}", models, root / "kept", target
        )
        (target / "state").rename(root / "kept" / str(num_ranks))
    return scenes


@pytest.fixture(params=[2, 4])
def scenes(request: pytest.FixtureRequest, played: dict[int, list[Scene]]) -> list[Scene]:
    """Return what each rank of one number of them has played."""
    return played[request.param]


def assert_same_step(report: StepReport, expected: StepReport, *, tolerance: float = 1e-5) -> None:
    assert report.loss == pytest.approx(expected.loss, rel=tolerance, abs=1e-9)
    assert report.grad_norm == pytest.approx(expected.grad_norm, rel=tolerance, abs=1e-9)
    assert report.lr == expected.lr
    assert report.sums == pytest.approx(expected.sums, rel=1e-3, abs=1e-4)
    assert_same_values(report.drift, expected.drift)
    for own_term, other in zip(report.terms, expected.terms, strict=True):
        assert own_term.name == other.name
        assert own_term.loss == pytest.approx(other.loss, rel=tolerance, abs=1e-9)
        assert own_term.grad_norm == pytest.approx(other.grad_norm, rel=tolerance, abs=1e-9)
        assert (own_term.cosine is None) == (other.cosine is None)
        assert own_term.cosine is None or own_term.cosine == pytest.approx(other.cosine, abs=1e-5)


def assert_same_values(one: Histogram, other: Histogram) -> None:
    assert one.num_values == other.num_values
    if one.num_values:
        found, expected = ((each.mean, each.min, each.max) for each in (one, other))
        np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-4)
        # Each is off by at most a bin.
        np.testing.assert_allclose(one.quantile(0.9), other.quantile(0.9), rtol=0.18, atol=1e-4)


def test_each_rank_loads_its_rows_of_what_one_process_loads(
    scenes: list[Scene], models: dict[str, Path]
) -> None:
    """Single experts are joined, and buffers come from files and from the config."""
    for name, path in models.items():
        model = LanguageModel.load(path, dtype=torch.float32)
        expected = digest_each(model.named_parameters())
        assert [scene["loaded"][name] for scene in scenes] == [expected, *[{}] * (len(scenes) - 1)]


def test_no_rank_but_the_first_holds_a_whole_tensor(models: dict[str, Path], tmp_path: Path) -> None:
    """Each of eight ranks once loaded the whole model, widened it, and ran it."""
    scenes = run_ranks(play_loading, 2, tmp_path / "store", models["untied"])
    whole = {tuple(p.shape) for _, p in load_model(models["untied"]).named_parameters() if p.dim() > 1}
    assert not scenes[1] & whole


def play_loading(model_dir: Path) -> set[tuple[int, ...]]:
    allocations = Allocations()
    with allocations:
        load_frozen(model_dir)
    return allocations.shapes


@pytest.mark.parametrize("name", GRADIENT_TOLERANCES)
def test_gradients_are_those_of_one_process(scenes: list[Scene], alone: Scene, name: str) -> None:
    for scene in scenes:
        gradients: Gradients = scene["gradients"][name]
        assert gradients.keys() == alone["gradients"][name].keys()
        assert relative_error(gradients, alone["gradients"][name]) <= GRADIENT_TOLERANCES[name]


def test_steps_are_those_of_one_process(scenes: list[Scene], alone: Scene) -> None:
    for scene in scenes:
        for report, expected in zip(scene["steps"], alone["steps"], strict=True):
            assert_same_step(report, expected)
        for name in ("two terms", "one rank only", "other terms of one rank", "empty", "after"):
            assert_same_step(scene[name], alone[name])
        assert scene["version"] == alone["learner"].version == 8


def test_whole_replies_pairs_and_teachers_are_those_of_one_process(
    scenes: list[Scene], models: dict[str, Path]
) -> None:
    learner, frozen = single(models["tied"]), load_frozen(models["untied"])
    before = learner.model.head_weight.detach().clone()
    scores, expected = play_frozen(learner, frozen)
    assert [one.name for one in expected.terms] == ["gspo", "dpo", "taught"]
    assert all(one.grad_norm > 0.0 for one in expected.terms)
    assert {"pair_accuracy", "pair_margin_nats"} <= expected.sums.keys()
    assert not torch.equal(before, learner.model.head_weight)
    for scene in scenes:
        assert_same_step(scene["frozen"][1], expected)
    assert_same_scores([scene["frozen"][0] for scene in scenes], scores, 1e-5)


def test_the_mini_batches_of_a_batch_are_those_of_one_process(
    scenes: list[Scene], models: dict[str, Path]
) -> None:
    learner = single(models["tied"])
    expected = play_update(learner)
    for scene in (one["update"] for one in scenes):
        assert scene["version"] == expected["version"] == 1
        for report, other in zip(scene["reports"], expected["reports"], strict=True):
            assert_same_step(report, other)
            assert report.update_ratio == pytest.approx(other.update_ratio, rel=1e-4)
            assert report.totals.keys() == other.totals.keys()
            for name, total in report.totals.items():
                assert total.count == other.totals[name].count
                assert total.mean == pytest.approx(other.totals[name].mean, rel=1e-2, abs=1e-6)
            assert_same_values(report.log_ratio, other.log_ratio)
        # Every rank was told the same, whatever it has of the batch.
        assert scene["reports"][2].totals == scenes[0]["update"]["reports"][2].totals
    assert {"clip_low_frac", "clip_high_frac", "policy_entropy_nats"} <= expected["reports"][2].totals.keys()
    assert_same_scores([scene["update"]["now"] for scene in scenes], expected["now"], 1e-4)


def test_log_7_all_ranks_report_alike(scenes: list[Scene]) -> None:
    """Incident: KL and clip fraction came from one micro-batch of rank 0, about 1/32 of the data."""
    first = scenes[0]
    # What the last rank alone was given is seen on the first, which had nothing.
    num_tokens = sum(int(reply.is_scored.sum()) for group in lone(5) for reply in group.replies)
    assert [scene["one rank only"].drift.num_values for scene in scenes] == [num_tokens] * len(scenes)
    for scene in scenes[1:]:
        for name in ("two terms", "after"):
            one, other = scene[name], first[name]
            assert (one.loss, one.grad_norm, one.changed_frac) == (
                other.loss,
                other.grad_norm,
                other.changed_frac,
            )
            assert one.drift.counts.tolist() == other.drift.counts.tolist()
    # In fp32 every sampled weight moves, on every rank.
    assert first["after"].changed_frac == pytest.approx(1.0, abs=0.05)
    assert first["after"].master_changed_frac == 1.0


def test_a_rank_keeps_the_estimated_bytes(scenes: list[Scene], models: dict[str, Path]) -> None:
    estimate = rank_kept_bytes(read_model_size(models["tied"]), "float32", len(scenes))
    for scene in scenes:
        # Norms are not counted, and rows are padded to equal numbers.
        assert scene["kept"] == pytest.approx(estimate, rel=0.03)


def test_ranks_score_as_one_process(scenes: list[Scene], alone: Scene) -> None:
    # Both learners have taken three steps.
    assert_same_scores([scene["scores"] for scene in scenes], alone["scores"], 1e-4)


def assert_same_scores(found: list[list[FloatArray]], expected: list[FloatArray], tolerance: float) -> None:
    """Each reply's, on the first rank alone."""
    assert not any(found[1:])
    for actual, one in zip(found[0], expected, strict=True):
        np.testing.assert_allclose(actual, one, atol=tolerance)


def test_what_one_rank_cannot_do_no_rank_does(scenes: list[Scene]) -> None:
    for scene in scenes:
        assert scene["not finite"].startswith("LearnerError: optimizer step 8 has loss ")
        assert "norm nan. Allowed: finite values" in scene["not finite"]
        assert scene["no room"].startswith("StoreError: ")
        assert "absent/weights.partial could not be written" in scene["no room"]


def test_one_directory_and_one_file_hold_the_whole_model(
    scenes: list[Scene], models: dict[str, Path], root: Path
) -> None:
    target = root / str(len(scenes))
    exported = load_model(target / "export")
    restored = single(models["tied"])
    restored.load_state(root / "kept" / str(len(scenes)))
    assert [scene["tensors"] for scene in scenes] == [
        digest_each(restored.model.named_parameters()),
        *[{}] * (len(scenes) - 1),
    ]
    digests = {scene["digest"] for scene in scenes}
    assert digests == {weights_digest(exported), weights_digest(restored.model)}
    (digest,) = digests
    assert [scene["named"] for scene in scenes] == [digests] * len(scenes)
    # Where a rank does not see the first one's file, that one writes all of it.
    assert {scene["apart"] for scene in scenes} == digests
    assert [path.parent.name for path in target.glob("seen*/*")] == ["seen by 0"]
    for path in (target / "weights.safetensors", target / "seen by 0" / "weights.safetensors"):
        load_published(exported, path, expected_digest=digest)
    # The bytes are those that one process writes of the same weights.
    export_tensors(
        restored.model.module, own_tensors(restored.model), models["tied"], root / f"again-{len(scenes)}"
    )
    again, written = (
        path / "model.safetensors" for path in (root / f"again-{len(scenes)}", target / "export")
    )
    assert again.read_bytes() == written.read_bytes()


def test_a_state_goes_on_with_any_number_of_ranks(
    played: dict[int, list[Scene]], models: dict[str, Path], root: Path
) -> None:
    # Each number of ranks went on from what lay there when it started: 1, then 1 and 2.
    assert [len(played[num_ranks][0]["resumed"]) for num_ranks in (2, 4)] == [1, 2]
    for source, num_ranks, index in (("1", 2, 0), ("1", 4, 0), ("2", 4, 1)):
        learner = single(models["tied"])
        learner.load_state(root / "kept" / source)
        expected = learner.step_terms([term(batch(8))])
        for scene in played[num_ranks]:
            version, report = scene["resumed"][index]
            assert version == 8
            assert_same_step(report, expected)


def test_rows_are_stored_once(played: dict[int, list[Scene]], root: Path) -> None:
    whole = load_file(root / "kept" / "1" / "optimizer.safetensors")
    for num_ranks in (2, 4):
        files = sorted((root / "kept" / str(num_ranks)).glob("*.safetensors"))
        assert len(files) == num_ranks
        parts = [load_file(path) for path in files]
        for name, tensor in whole.items():
            rows = torch.cat([part[name] for part in parts if name in part])
            torch.testing.assert_close(rows, tensor, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("name", ["a file is missing", "a file is cut"])
def test_a_damaged_part_is_refused(
    played: dict[int, list[Scene]], models: dict[str, Path], root: Path, tmp_path: Path, name: str
) -> None:
    kept = tmp_path / "kept"
    shutil.copytree(root / "kept" / "2", kept)
    path = sorted(kept.glob("*.safetensors"))[-1]
    if name == "a file is missing":
        path.unlink()
    else:
        path.write_bytes(path.read_bytes()[:-100])
    learner = single(models["tied"])
    with pytest.raises(CorruptRecord, match="kept cannot be restored"):
        learner.load_state(kept)
    assert learner.version == 0


def test_adapters_train_on_ranks_as_in_one_process(
    scenes: list[Scene], models: dict[str, Path], root: Path
) -> None:
    target = root / str(len(scenes))
    own_target = root / f"adapted-{len(scenes)}"
    learner = single(models["rounded"], dtype="bfloat16", change=adapt)
    alone = play_adapted(learner, own_target)
    for scene in scenes:
        for report, expected in zip(scene["adapted"]["reports"], alone["reports"], strict=True):
            assert report.loss == pytest.approx(expected.loss, rel=0.03)
            assert report.grad_norm == pytest.approx(expected.grad_norm, rel=0.03)
    stored, expected = (load_file(path / "adapter" / ADAPTER_FILES[0]) for path in (target, own_target))
    assert stored.keys() == expected.keys()
    assert {scene["adapted"]["digest"] for scene in scenes} == {tensors_digest(stored.items())}
    # A state of ranks holds the adapters alone, and goes on in one process.
    learner.load_state(target / "adapter-state")
    assert weights_digest(learner.model) == scenes[0]["adapted"]["merged"]
    parts = [load_file(path) for path in (target / "adapter-state").glob("*.safetensors")]
    assert {name.rsplit(".", 2)[-2] for part in parts for name in part} == {"lora_A", "lora_B"}
