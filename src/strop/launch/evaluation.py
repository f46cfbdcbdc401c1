"""Evaluating a model on this machine, on one task or several, with its replies kept.

Everything is checked before the model is loaded: the tasks' examples, the settings, and what is in the
folders already. The same command again goes on where a killed one stopped; where nothing is left to
generate, no model is loaded at all.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack, ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from strop.evaluate import (
    EvalPlan,
    EvalResult,
    EvalSettings,
    PlannedEvaluation,
    ShardFolder,
    plan_evaluation,
    read_result,
    result_name,
    run_evaluation,
    write_result,
)
from strop.evaluate.shards import refuse_other_plan
from strop.launch.inference import Asking, OpenedModel, hold_judge, read_trained_ids, serve_model
from strop.policy.footprint import read_model_size
from strop.tasks import build_task
from strop.tokenizer import Tokenizer

if TYPE_CHECKING:
    pass

EVALS_ROOT = Path("evals")
"""Where results and replies go if nobody says; names there hold the plan's digest."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EvalWish:
    """What is wanted of an evaluation, beside task and sampling; as in `EvalSettings`."""

    num_examples: int | None = None
    num_samples: int | None = None
    pass_at: tuple[int, ...] = ()
    pass_threshold: float | None = None
    out_dir: Path | None = None
    """Folder of the results. None: `EVALS_ROOT`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredResult:
    """A result and its file."""

    result: EvalResult
    path: Path


@dataclass(kw_only=True, slots=True)
class _Prepared:
    """An evaluation that was checked and whose folder is held."""

    asking: Asking
    planned: PlannedEvaluation
    folder: ShardFolder
    result_path: Path


def evaluate_here(
    askings: Sequence[Asking], model: OpenedModel, wish: EvalWish, *, say: Callable[[str], None]
) -> list[StoredResult]:
    """Evaluate a model on tasks, one after another; each result is written when it is there.

    `say` is told what is read from before and where results are.
    Raises: CheckRefused if examples called held-out were trained on, or a folder holds another
        evaluation; ConfigError for settings that a task or the model cannot follow.
    """
    with ExitStack() as held:
        prepared = _prepare(askings, model, wish, held)
        return asyncio.run(_evaluate(prepared, model, say))


def _prepare(
    askings: Sequence[Asking], model: OpenedModel, wish: EvalWish, held: ExitStack
) -> list[_Prepared]:
    tokenizer = Tokenizer.load(model.path)
    max_positions = read_model_size(model.path).max_positions
    trained_ids = read_trained_ids(model.run_path)
    prepared = []
    for asking in askings:
        spec = asking.spec
        planned = plan_evaluation(
            task=build_task(spec.task),
            tokenizer=tokenizer,
            settings=EvalSettings(
                run_seed=spec.seed,
                step=model.step,
                split=asking.split,
                prompt_format=spec.model.prompt_format,
                num_examples=wish.num_examples,
                num_samples=wish.num_samples,
                sampling=asking.sampling,
                pass_at=wish.pass_at,
                pass_threshold=wish.pass_threshold,
                dtype=spec.model.dtype,
            ),
            model_digest=model.digest,
            trained_ids=trained_ids,
            max_positions=max_positions,
        )
        result_path = _place(planned.plan, wish.out_dir)
        if result_path.exists():
            refuse_other_plan(result_path, read_result(result_path), planned.plan)
        # Beside the result and named like it, without '.json'.
        folder = ShardFolder(result_path.with_suffix(""), planned.plan, spec.task.model_dump(mode="json"))
        held.enter_context(folder)
        prepared.append(_Prepared(asking=asking, planned=planned, folder=folder, result_path=result_path))
    return prepared


def _place(plan: EvalPlan, out_dir: Path | None) -> Path:
    """Return where a result goes. Without a folder of the user's, the name tells plans apart."""
    name = result_name(plan)
    if out_dir is not None:
        return out_dir / name
    return EVALS_ROOT / f"{name.removesuffix('.json')}-{plan.digest[:8]}.json"


async def _evaluate(
    prepared: Sequence[_Prepared], model: OpenedModel, say: Callable[[str], None]
) -> list[StoredResult]:
    stored = []
    async with AsyncExitStack() as stack:
        engine = None
        if any(one.folder.num_kept < one.planned.plan.num_examples for one in prepared):
            engine, _ = await stack.enter_async_context(serve_model(prepared[0].asking.spec, model))
        tokenizer = Tokenizer.load(model.path)
        for one in prepared:
            plan, num_kept = one.planned.plan, one.folder.num_kept
            if num_kept:
                say(
                    f"{plan.task}: the replies to {num_kept} of {plan.num_examples} examples are kept from"
                    f" before in {one.folder.path}"
                )
            async with hold_judge(one.asking.spec, one.planned.task) as judge:
                result = await run_evaluation(one.planned, engine, tokenizer, judge=judge, folder=one.folder)
            write_result(result, one.result_path)
            say(f"{plan.task}: {one.result_path}")
            stored.append(StoredResult(result=result, path=one.result_path))
    return stored
