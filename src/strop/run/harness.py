"""Evaluate a model by lm-eval: settings are checked before a process is started."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from strop.errors import CheckRefused, ConfigError
from strop.evaluate.harness import LM_EVAL, HarnessJob, HarnessResult, find_engine, run_harness
from strop.policy.footprint import read_model_size
from strop.run.evaluation import EVALS_ROOT, EvalRequest
from strop.run.inference import OpenedModel
from strop.spec import EngineSpec, ModelSpec, PlacementSpec
from strop.spec.display import dotted
from strop.spec.harness import HarnessSpec
from strop.spec.reader import load_section
from strop.spec.sources import parse_override
from strop.store.python_environment import ensure_environment

_OF_OTHERS = {"model.dtype", "engine.kind", "engine.python", "placement.threads"}
"""Settings of other sections that apply to lm-eval."""
_NEEDS_CODE = frozenset({"mbpp", "humaneval"})
"""Tasks that run what the model wrote; of others lm-eval says so itself."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HarnessSetup:
    """The settings of an evaluation by lm-eval, checked without a model and without lm-eval."""

    settings: HarnessSpec
    dtype: str
    has_vllm: bool
    """Whether engine.kind asks for vLLM."""
    python: str | None
    threads: int | None
    given: tuple[str, ...]
    """The settings of other sections that were given."""


def read_harness_setup(
    tasks: Sequence[str], words: Sequence[str], request: EvalRequest, *, may_run_code: bool
) -> HarnessSetup:
    """Read the settings of an evaluation by lm-eval; the arguments are those of `evaluate_by_harness`.

    Raises: ConfigError for a setting without effect, and for code that was not confirmed.
    """
    if request.num_samples or request.pass_at:
        raise ConfigError(
            "--harness lm-eval with samples or pass@k",
            allowed="what lm-eval's task asks for: its repeats and its metrics",
            next_step="leave them out, or leave --harness out",
        )
    odd = [name for name in tasks if re.fullmatch(r"[\w./-]+", name) is None]
    odd += [name for name in tasks if tasks.count(name) > 1]
    if odd:
        raise ConfigError(
            f"--harness lm-eval with task {odd[0]!r}",
            allowed="lm-eval's names of tasks, groups and tags, each once",
            next_step="correct it",
        )
    if (coding := sorted(_NEEDS_CODE & set(tasks))) and not may_run_code:
        raise ConfigError(
            f"--harness lm-eval with task {coding[0]}, which runs what the model wrote in no sandbox, as this"
            " user",
            allowed="such a task with --confirm-run-unsafe-code",
            next_step=f"leave --harness out: strop's own {coding[0]} runs it in a sandbox; or add the option"
            " on a machine that may be damaged",
        )
    places = {word: parse_override(word)[0] for word in words}
    others = {word: dotted(place) for word, place in places.items() if place[0] != "harness"}
    if foreign := sorted(set(others.values()) - _OF_OTHERS):
        raise ConfigError(
            f"--harness lm-eval with {' and '.join(foreign)}",
            allowed=f"{', '.join(sorted(_OF_OTHERS))} and the section harness: lm-eval has data, prompts and"
            " stop strings of its own",
            next_step="leave it out, or leave --harness out",
        )

    def of(section: str) -> list[str]:
        return [word for word, place in places.items() if place[0] == section]

    settings = load_section("harness", HarnessSpec, of("harness"))
    engine = load_section("engine", EngineSpec, of("engine"))
    if engine.kind == "vllm" and settings.engine == "hf":
        raise ConfigError(
            "engine.kind='vllm' with harness.engine='hf'",
            allowed="one of them",
            next_step="remove one: the harness asks, and harness.engine says by whom",
        )
    return HarnessSetup(
        settings=settings,
        dtype=load_section("model", ModelSpec, of("model")).dtype,
        has_vllm=engine.kind == "vllm",
        python=engine.python,
        threads=load_section("placement", PlacementSpec, of("placement")).threads,
        given=tuple(others.values()),
    )


def evaluate_by_harness(
    tasks: Sequence[str],
    words: Sequence[str],
    model: OpenedModel,
    request: EvalRequest,
    *,
    may_run_code: bool = False,
    say: Callable[[str], None],
) -> list[HarnessResult]:
    """Run lm-eval on tasks by its names for them; its Python environment is made on first use.

    `words` are settings of the section harness, and those of `_OF_OTHERS`. `may_run_code`: the user accepts
    that lm-eval runs the model's code outside any sandbox.
    Raises: ConfigError for a setting without effect, and for code that was not confirmed; CheckRefused if the
        model is too small; StoreError if the environment cannot be made; EngineError if lm-eval fails.
    """
    setup = read_harness_setup(tasks, words, request, may_run_code=may_run_code)
    if setup.given and model.url is not None:
        raise ConfigError(
            f"{', '.join(setup.given)} with a running server",
            allowed="what the server was started with",
            next_step="leave it out, or start the server so",
        )
    settings = setup.settings
    if setup.has_vllm:
        settings = settings.model_copy(update={"engine": "vllm"})
    max_positions = read_model_size(model.path).max_positions
    job = HarnessJob(
        task="",
        model_path=model.path,
        model_digest=model.digest,
        step=model.step,
        dtype=setup.dtype,
        max_positions=min(settings.max_model_tokens or max_positions, max_positions),
        num_examples=request.num_examples,
        settings=settings,
        url=model.url,
        served_name=model.served_name,
        may_run_code=may_run_code,
        threads=setup.threads,
        file_name=request.name,
    )
    jobs = [replace(find_engine(job, setup.python), task=task) for task in tasks]
    for job in jobs:
        if (budget := job.protocol[1]) is not None and budget >= job.max_positions:
            raise CheckRefused(
                f"{job.task} asks for {budget} tokens of a model with {job.max_positions} positions",
                allowed="a model with room for prompt and reply: lm-eval cuts prompts without a word",
                next_step="lower harness.max_reply_tokens, or evaluate with strop's own task",
            )
    ensure_environment(LM_EVAL, say=say)
    out_dir = Path(request.out_dir or EVALS_ROOT / f"lm-eval-{model.digest[:8]}")
    results = []
    for job in jobs:
        say(f"{job.task}: lm-eval by {job.engine}")
        results.append(run_harness(job, out_dir))
    return results
