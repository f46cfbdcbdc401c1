"""Results of lm-eval: read from its files, and refused if they do not follow the pinned protocol."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import computed_field

from strop.errors import CorruptRecord
from strop.evaluate.harness.engine import LM_EVAL
from strop.evaluate.harness.jobs import FreeJob, HarnessJob
from strop.evaluate.result import SUSPECT_TRUNCATED_FRAC, Record
from strop.rollout import Split
from strop.tokenizer import Tokenizer

DEFAULT_REPLY_TOKENS = 256
"""Reply budget of lm-eval's engines if neither task nor user sets one."""
LOCAL_PREFIX = "strop_"
"""Before lm-eval's name of a task that runs on the examples of a strop task."""


class HarnessMetric(Record):
    """One metric of lm-eval."""

    value: float
    stderr: float | None


class HarnessPart(Record):
    """One task of a group."""

    num_examples: int
    metrics: dict[str, HarnessMetric]


class HarnessResult(Record):
    """The result of one model on one task of lm-eval."""

    harness: str
    task: str
    """lm-eval's name of the task."""
    task_version: str
    """lm-eval's version of its task."""
    split: Split
    step: int
    model_digest: str
    dtype: str | None
    """None: chosen by a server, and unknown."""
    num_examples: int
    data_digest: str
    """Hash over the evaluated rows and, for strop's data, the rows that few-shot examples come from."""
    num_fewshot: int
    max_reply_tokens: int | None
    """None if lm-eval's own task generates nothing."""
    stops: tuple[str, ...]
    seed: int
    engine: str = "hf"
    """The generating engine: 'vllm', 'hf' or 'server'."""
    arguments: tuple[str, ...] = ()
    """Settings that change the scores and are no field of the protocol."""
    num_cut_prompts: int = 0
    """Prompts longer than the model's context, which lm-eval silently cuts."""
    plan: str = ""
    """Hash over all inputs of lm-eval; empty in results of older versions."""
    metrics: dict[str, HarnessMetric]
    """By metric and filter, for example 'exact_match,strict-match'. For a group: over all its examples; empty
    for groups for which lm-eval computes no score."""
    parts: dict[str, HarnessPart]
    """The tasks of a group by name; empty for one task."""
    truncated_frac: float
    """Share of replies whose re-encoded length reaches the budget."""

    @property
    def scored_parts(self) -> dict[str, HarnessPart]:
        """The task or group itself, and the tasks of a group, by name."""
        return {self.task: HarnessPart(num_examples=self.num_examples, metrics=self.metrics), **self.parts}

    @classmethod
    def read(cls, data: bytes) -> HarnessResult:
        """Parse a result file. Raises: ValueError if it is none."""
        content = json.loads(data)
        content.pop("truncation_suspect", None)
        return cls.model_validate_json(json.dumps(content))

    @computed_field  # type: ignore[prop-decorator]
    @property
    def truncation_suspect(self) -> bool:
        """Whether so many replies were truncated that the score may reflect the budget, not the model."""
        return self.truncated_frac > SUSPECT_TRUNCATED_FRAC


@dataclass(frozen=True, kw_only=True, slots=True)
class HarnessOutput:
    """A result, and the facts of its files."""

    result: HarnessResult
    samples: bytes
    """lm-eval's log of replies, verbatim; one line for each example and filter."""
    longest_prompt_tokens: int


@dataclass(frozen=True, kw_only=True, slots=True)
class _TaskOutput:
    """The output of one task of lm-eval."""

    name: str
    version: str
    num_fewshot: int
    max_reply_tokens: int | None
    """None if nothing is generated."""
    stops: tuple[str, ...]
    seed: int
    part: HarnessPart
    samples: bytes
    rows: Mapping[str, Mapping[str, Any]]
    """One of the logged samples of each example, by example id."""


def read_output(job: HarnessJob, out_dir: Path, names: Sequence[str], data_digest: str) -> HarnessOutput:
    """Read the output of lm-eval's tasks `names`.

    Raises: CorruptRecord if a file or a number is missing, or the protocol is not the pinned one.
    """
    try:
        content = json.loads(_find_one(out_dir, "*/results_*.json").read_bytes())
        outputs = [_read_task(content, out_dir, name) for name in names]
        rows = {example_id: row for output in outputs for example_id, row in output.rows.items()}
        # Choices are not truncated.
        replies = [] if job.protocol.chooses else [str(row["resps"][0][0]) for row in rows.values()]
        prompts = {
            example_id: str(row["arguments"]["gen_args_0"]["arg_0"]) for example_id, row in rows.items()
        }
        metrics = pool_metrics([output.part for output in outputs])
    except (ValueError, KeyError, TypeError, IndexError) as error:
        raise _unexpected(f"{type(error).__name__}: {error}") from error
    _require_pinned(job, outputs, prompts)
    tokenizer = Tokenizer.load(job.model_path)
    num_cut = sum(len(tokenizer.encode(reply)) >= job.protocol.max_reply_tokens for reply in replies)
    versions = sorted({output.version for output in outputs})
    result = HarnessResult(
        harness=LM_EVAL.name,
        task=job.protocol.task,
        task_version=", ".join(versions),
        split=Split.HELD_OUT,
        step=job.step,
        model_digest=job.model_digest,
        dtype=job.dtype,
        num_examples=len(rows),
        data_digest=data_digest,
        num_fewshot=job.protocol.num_fewshot,
        max_reply_tokens=job.protocol.max_reply_tokens,
        stops=outputs[0].stops,
        seed=job.settings.seed,
        engine=job.engine.kind,
        arguments=job.arguments,
        metrics=metrics,
        parts={output.name: output.part for output in outputs} if job.protocol.part_of else {},
        truncated_frac=num_cut / max(len(replies), 1),
    )
    return HarnessOutput(
        result=result,
        samples=b"".join(output.samples for output in outputs),
        longest_prompt_tokens=max(len(tokenizer.encode(prompt)) for prompt in prompts.values()),
    )


def read_free_output(job: FreeJob, out_dir: Path) -> HarnessOutput:
    """Read the output of a task, group or tag on lm-eval's own data.

    Raises: CorruptRecord if a file or a number is missing, or the number of few-shot examples is not that of
        the settings.
    """
    try:
        content = json.loads(_find_one(out_dir, "*/results_*.json").read_bytes())
        outputs = [_read_task(content, out_dir, name) for name in content["configs"]]
        whole = content["results"].get(job.name, {})
        rows = [row for output in outputs for row in output.rows.values()]
        prompts = [str(row["arguments"]["gen_args_0"]["arg_0"]) for row in rows]
    except (ValueError, KeyError, TypeError, IndexError) as error:
        raise _unexpected(f"{type(error).__name__}: {error}") from error
    shots, num_few_shot = {output.num_fewshot for output in outputs}, job.settings.num_few_shot
    if not outputs or (num_few_shot is not None and shots != {num_few_shot}):
        raise _unexpected(f"it showed {sorted(shots)} examples, and {num_few_shot} were asked for")
    tokenizer = Tokenizer.load(job.model_path)
    # Choices have no budget, and are not truncated.
    replies = [
        (str(row["resps"][0][0]), output.max_reply_tokens)
        for output in outputs
        if output.max_reply_tokens is not None
        for row in output.rows.values()
    ]
    num_cut = sum(len(tokenizer.encode(reply)) >= budget for reply, budget in replies)
    budget = max((o.max_reply_tokens for o in outputs if o.max_reply_tokens is not None), default=None)
    lengths = [len(tokenizer.encode(prompt)) for prompt in prompts]
    # lm-eval's own hash of each row, independent of their order.
    hashes = [sorted(str(row.get("doc_hash")) for row in output.rows.values()) for output in outputs]
    result = HarnessResult(
        harness=LM_EVAL.name,
        task=job.name,
        task_version=", ".join(sorted({output.version for output in outputs})),
        split=Split.HELD_OUT,
        step=job.step,
        model_digest=job.model_digest,
        dtype=job.dtype,
        num_examples=len(rows),
        data_digest=hashlib.sha256(json.dumps(hashes).encode()).hexdigest()[:16],
        num_fewshot=max(shots),
        max_reply_tokens=budget,
        stops=outputs[0].stops,
        seed=job.settings.seed,
        engine=job.engine.kind,
        arguments=job.arguments,
        metrics=_read_metrics(whole) if len(outputs) > 1 else dict(outputs[0].part.metrics),
        parts={output.name: output.part for output in outputs} if len(outputs) > 1 else {},
        truncated_frac=num_cut / max(len(replies), 1),
        num_cut_prompts=sum(length > job.max_positions - (budget or 0) for length in lengths),
    )
    return HarnessOutput(
        result=result,
        samples=b"".join(output.samples for output in outputs),
        longest_prompt_tokens=max(lengths, default=0),
    )


def _read_metrics(numbers: Mapping[str, Any]) -> dict[str, HarnessMetric]:
    metrics = {}
    for key, value in numbers.items():
        if "," not in key or "_stderr," in key or not isinstance(value, int | float):
            continue
        metric, _, filter_name = key.partition(",")
        stderr = numbers.get(f"{metric}_stderr,{filter_name}")
        metrics[key] = HarnessMetric(
            value=value, stderr=float(stderr) if isinstance(stderr, int | float) else None
        )
    return metrics


def _read_task(content: Mapping[str, Any], out_dir: Path, name: str) -> _TaskOutput:
    samples = _find_one(out_dir, f"*/samples_{name}_*.jsonl").read_bytes()
    config = content["configs"][name]
    settings = config.get("generation_kwargs") or {}
    # lm-eval's engines have a default budget.
    default = DEFAULT_REPLY_TOKENS if config.get("output_type") == "generate_until" else None
    num_examples = int(content["n-samples"][name]["effective"])
    return _TaskOutput(
        name=name.removeprefix(LOCAL_PREFIX),
        version=str(content["versions"][name]),
        num_fewshot=int(content["n-shot"][name]),
        max_reply_tokens=settings.get("max_gen_toks", default),
        stops=tuple(settings.get("until", ())),
        seed=int(content["config"]["fewshot_seed"]),
        part=HarnessPart(num_examples=num_examples, metrics=_read_metrics(content["results"][name])),
        samples=samples,
        # strop's rows have an example id, lm-eval's own a number.
        rows={
            str(row["doc"].get("example_id", row.get("doc_id"))): row
            for row in map(json.loads, samples.splitlines())
        },
    )


def _find_one(out_dir: Path, pattern: str) -> Path:
    paths = list(out_dir.glob(pattern))
    if len(paths) != 1:
        raise ValueError(f"it has {len(paths)} files {pattern}, not 1")
    return paths[0]


def _require_pinned(job: HarnessJob, outputs: Sequence[_TaskOutput], prompts: Mapping[str, str]) -> None:
    """Compare the run with the pinned protocol. Raises: CorruptRecord."""
    settings = job.settings
    budget = None if job.protocol.chooses else job.protocol.max_reply_tokens
    pinned = (job.protocol.num_fewshot, budget, job.settings.seed)
    for output in outputs:
        ran = (output.num_fewshot, output.max_reply_tokens, output.seed)
        num_rows, num_examples = len(output.rows), output.part.num_examples
        if ran != pinned or num_examples != num_rows or not output.part.metrics:
            raise _unexpected(
                f"shots, budget and seed of {output.name} are {ran}, pinned are {pinned}; {num_rows} logged"
                f" examples of {num_examples}"
            )
    examples = {example.example_id: example for example in job.examples}
    if set(examples) != set(prompts):
        raise _unexpected(f"it logged {len(prompts)} examples, and {len(examples)} were given")
    for example_id, prompt in prompts.items():
        pinned_prompt = job.protocol.prompt(examples[example_id])
        # A chat template appends the assistant's turn.
        is_pinned = (
            pinned_prompt.strip() in prompt if settings.chat_template else prompt.endswith(pinned_prompt)
        )
        if not is_pinned:
            raise _unexpected(f"the prompt of example {example_id} does not end in {pinned_prompt[-60:]!r}")


def pool_metrics(parts: Sequence[HarnessPart]) -> dict[str, HarnessMetric]:
    """Join the metrics of a group's tasks, weighted by their examples.

    The standard error is that of the pooled sample variance, like lm-eval's `pooled_sample_stderr`; None if a
    part has none, such as one with a single example.
    Raises: KeyError if a part lacks a metric of the first one.
    """
    if len(parts) == 1:
        return dict(parts[0].metrics)
    total = sum(part.num_examples for part in parts)
    pooled = {}
    for name in parts[0].metrics:
        counted = [(part.num_examples, part.metrics[name]) for part in parts]
        value = math.fsum(count * metric.value for count, metric in counted) / total
        # (n - 1) * (the sample's variance), from a standard error s / sqrt(n).
        squares = [
            (count - 1) * count * metric.stderr**2 for count, metric in counted if metric.stderr is not None
        ]
        is_known = len(squares) == len(parts) and total > len(parts)
        stderr = math.sqrt(math.fsum(squares) / (total - len(parts)) / total) if is_known else None
        pooled[name] = HarnessMetric(value=value, stderr=stderr)
    return pooled


def _unexpected(cause: str) -> CorruptRecord:
    return CorruptRecord(
        f"lm-eval's output is not what {LM_EVAL.name} writes ({cause})",
        allowed="results and samples of the pinned protocol",
        next_step="remove its environment and start the same command again",
    )
