"""What the harness said of a model: read from its files, and refused where it is not the pinned protocol."""

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
"""Of lm-eval's engines, where neither task nor user says how long a reply may get."""
LOCAL_PREFIX = "strop_"
"""Before the harness's name of a task, whose data is then ours."""


class HarnessMetric(Record):
    """One number of the harness."""

    value: float
    stderr: float | None


class HarnessPart(Record):
    """One task of a group."""

    num_examples: int
    metrics: dict[str, HarnessMetric]


class HarnessResult(Record):
    """What the harness said of one model on one task."""

    harness: str
    task: str
    """The harness's name."""
    task_version: str
    """The harness's version of its task."""
    split: Split
    step: int
    model_digest: str
    dtype: str | None
    """None: a server's own, which it does not tell."""
    num_examples: int
    data_digest: str
    """Hash over the rows that were asked and, of our data, that few-shot examples were drawn from."""
    num_fewshot: int
    max_reply_tokens: int | None
    """None where lm-eval's own task generates nothing."""
    stops: tuple[str, ...]
    seed: int
    engine: str = "hf"
    """What generated: 'vllm', 'hf' or 'server'."""
    arguments: tuple[str, ...] = ()
    """Settings beside the protocol's own that change what is asked or how it is answered."""
    num_cut_prompts: int = 0
    """Prompts that were longer than the model's positions, which lm-eval cuts without a word."""
    plan: str = ""
    """Hash over everything that the harness was given; empty in results of older versions."""
    metrics: dict[str, HarnessMetric]
    """By metric and filter, for example 'exact_match,strict-match'. Of a group: over all its examples; empty
    for lm-eval's groups without a score of their own."""
    parts: dict[str, HarnessPart]
    """The tasks of a group by name; empty for one task."""
    truncated_frac: float
    """Share of replies that are as long as the budget when they are encoded again."""

    @property
    def scored_parts(self) -> dict[str, HarnessPart]:
        """The task or group, and the tasks of a group, by name."""
        return {self.task: HarnessPart(num_examples=self.num_examples, metrics=self.metrics), **self.parts}

    @classmethod
    def read(cls, data: bytes) -> HarnessResult:
        """Read a result as it was written. Raises: ValueError if it is none."""
        content = json.loads(data)
        content.pop("truncation_suspect", None)
        return cls.model_validate_json(json.dumps(content))

    @computed_field  # type: ignore[prop-decorator]
    @property
    def truncation_suspect(self) -> bool:
        """Whether so many replies were cut that the score may say more about the budget than the model."""
        return self.truncated_frac > SUSPECT_TRUNCATED_FRAC


@dataclass(frozen=True, kw_only=True, slots=True)
class HarnessOutput:
    """A result, with what it was read from."""

    result: HarnessResult
    samples: bytes
    """The harness's log of replies, as it stands; one line for each example and filter."""
    longest_prompt_tokens: int


@dataclass(frozen=True, kw_only=True, slots=True)
class _Said:
    """What stands in the files on one of the harness's tasks."""

    name: str
    version: str
    num_fewshot: int
    max_reply_tokens: int | None
    """None where nothing is generated."""
    stops: tuple[str, ...]
    seed: int
    part: HarnessPart
    samples: bytes
    rows: Mapping[str, Mapping[str, Any]]
    """One of the logged samples of each example, by example id."""


def read_output(job: HarnessJob, out_dir: Path, names: Sequence[str], data_digest: str) -> HarnessOutput:
    """Read what the harness wrote on its tasks `names`.

    Raises: CorruptRecord if a file or a number is missing, or the protocol is not the pinned one.
    """
    try:
        results_path = _find_one(out_dir, "*/results_*.json")
        found = json.loads(results_path.read_bytes())
        said = [_read_task(found, out_dir, name) for name in names]
        rows = {example_id: row for one in said for example_id, row in one.rows.items()}
        # Of likelihoods nothing is cut.
        replies = [] if job.protocol.chooses else [str(row["resps"][0][0]) for row in rows.values()]
        prompts = {
            example_id: str(row["arguments"]["gen_args_0"]["arg_0"]) for example_id, row in rows.items()
        }
        metrics = pool_metrics([one.part for one in said])
    except (ValueError, KeyError, TypeError, IndexError) as error:
        raise _unexpected(f"{type(error).__name__}: {error}") from error
    _require_pinned(job, said, prompts)
    tokenizer = Tokenizer.load(job.model_path)
    num_cut = sum(len(tokenizer.encode(reply)) >= job.protocol.max_reply_tokens for reply in replies)
    versions = sorted({one.version for one in said})
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
        stops=said[0].stops,
        seed=job.settings.seed,
        engine=job.engine.kind,
        arguments=job.arguments,
        metrics=metrics,
        parts={one.name: one.part for one in said} if job.protocol.part_of else {},
        truncated_frac=num_cut / max(len(replies), 1),
    )
    return HarnessOutput(
        result=result,
        samples=b"".join(one.samples for one in said),
        longest_prompt_tokens=max(len(tokenizer.encode(prompt)) for prompt in prompts.values()),
    )


def read_free_output(job: FreeJob, out_dir: Path) -> HarnessOutput:
    """Read what the harness wrote on a task, group or tag of its own.

    Raises: CorruptRecord if a file or a number is missing, or more examples were shown than asked for.
    """
    try:
        found = json.loads(_find_one(out_dir, "*/results_*.json").read_bytes())
        said = [_read_task(found, out_dir, name) for name in found["configs"]]
        whole = found["results"].get(job.name, {})
        rows = [row for one in said for row in one.rows.values()]
        prompts = [str(row["arguments"]["gen_args_0"]["arg_0"]) for row in rows]
    except (ValueError, KeyError, TypeError, IndexError) as error:
        raise _unexpected(f"{type(error).__name__}: {error}") from error
    shots, wanted = {one.num_fewshot for one in said}, job.settings.num_few_shot
    if not said or (wanted is not None and shots != {wanted}):
        raise _unexpected(f"it showed {sorted(shots)} examples, and {wanted} were asked for")
    tokenizer = Tokenizer.load(job.model_path)
    # Of likelihoods there is no budget, and nothing is cut.
    replies = [
        (str(row["resps"][0][0]), one.max_reply_tokens)
        for one in said
        if one.max_reply_tokens is not None
        for row in one.rows.values()
    ]
    num_cut = sum(len(tokenizer.encode(reply)) >= budget for reply, budget in replies)
    budget = max((one.max_reply_tokens for one in said if one.max_reply_tokens is not None), default=None)
    lengths = [len(tokenizer.encode(prompt)) for prompt in prompts]
    # lm-eval's own hash of each row, in no order.
    hashes = [sorted(str(row.get("doc_hash")) for row in one.rows.values()) for one in said]
    result = HarnessResult(
        harness=LM_EVAL.name,
        task=job.name,
        task_version=", ".join(sorted({one.version for one in said})),
        split=Split.HELD_OUT,
        step=job.step,
        model_digest=job.model_digest,
        dtype=job.dtype,
        num_examples=len(rows),
        data_digest=hashlib.sha256(json.dumps(hashes).encode()).hexdigest()[:16],
        num_fewshot=max(shots),
        max_reply_tokens=budget,
        stops=said[0].stops,
        seed=job.settings.seed,
        engine=job.engine.kind,
        arguments=job.arguments,
        metrics=_read_metrics(whole) if len(said) > 1 else dict(said[0].part.metrics),
        parts={one.name: one.part for one in said} if len(said) > 1 else {},
        truncated_frac=num_cut / max(len(replies), 1),
        num_cut_prompts=sum(length > job.max_positions - (budget or 0) for length in lengths),
    )
    return HarnessOutput(
        result=result,
        samples=b"".join(one.samples for one in said),
        longest_prompt_tokens=max(lengths, default=0),
    )


def _read_metrics(numbers: Mapping[str, Any]) -> dict[str, HarnessMetric]:
    return {
        key: HarnessMetric(value=value, stderr=_read_stderr(numbers, key))
        for key, value in numbers.items()
        if "," in key and "_stderr," not in key and isinstance(value, int | float)
    }


def _read_task(found: Mapping[str, Any], out_dir: Path, name: str) -> _Said:
    samples = _find_one(out_dir, f"*/samples_{name}_*.jsonl").read_bytes()
    numbers = found["results"][name]
    config = found["configs"][name]
    settings = config.get("generation_kwargs") or {}
    # Without a budget of its own, lm-eval's engines take their default.
    default = DEFAULT_REPLY_TOKENS if config.get("output_type") == "generate_until" else None
    num_examples = int(found["n-samples"][name]["effective"])
    return _Said(
        name=name.removeprefix(LOCAL_PREFIX),
        version=str(found["versions"][name]),
        num_fewshot=int(found["n-shot"][name]),
        max_reply_tokens=settings.get("max_gen_toks", default),
        stops=tuple(settings.get("until", ())),
        seed=int(found["config"]["fewshot_seed"]),
        part=HarnessPart(num_examples=num_examples, metrics=_read_metrics(numbers)),
        samples=samples,
        # Of ours by example id; lm-eval's own rows have a number.
        rows={
            str(row["doc"].get("example_id", row.get("doc_id"))): row
            for row in map(json.loads, samples.splitlines())
        },
    )


def _find_one(out_dir: Path, pattern: str) -> Path:
    found = list(out_dir.glob(pattern))
    if len(found) != 1:
        raise ValueError(f"it has {len(found)} files {pattern}, not 1")
    return found[0]


def _require_pinned(job: HarnessJob, said: Sequence[_Said], prompts: Mapping[str, str]) -> None:
    """Compare what was run with what is pinned.

    Raises: CorruptRecord.
    """
    settings = job.settings
    budget = None if job.protocol.chooses else job.protocol.max_reply_tokens
    pinned = (job.protocol.num_fewshot, budget, job.settings.seed)
    for one in said:
        ran = (one.num_fewshot, one.max_reply_tokens, one.seed)
        if ran != pinned or one.part.num_examples != len(one.rows) or not one.part.metrics:
            raise _unexpected(
                f"shots, budget and seed of {one.name} are {ran}, pinned are {pinned}; {len(one.rows)} logged"
                f" examples of {one.part.num_examples}"
            )
    asked = {example.example_id: example for example in job.examples}
    if set(asked) != set(prompts):
        raise _unexpected(f"it logged {len(prompts)} examples, and {len(asked)} were given")
    for example_id, prompt in prompts.items():
        wanted = job.protocol.prompt(asked[example_id])
        # Behind it a chat template writes whose turn it is.
        if not (wanted.strip() in prompt if settings.chat_template else prompt.endswith(wanted)):
            raise _unexpected(f"the prompt of example {example_id} does not end in {wanted[-60:]!r}")


def pool_metrics(parts: Sequence[HarnessPart]) -> dict[str, HarnessMetric]:
    """Join the metrics of a group's tasks, weighted by their examples.

    The standard error is that of the pooled sample variance, as lm-eval's `pooled_sample_stderr` defines it;
    None where a part has none, as one with a single example.
    Raises: KeyError if a part lacks a metric of the first one.
    """
    if len(parts) == 1:
        return dict(parts[0].metrics)
    total = sum(part.num_examples for part in parts)
    pooled = {}
    for name in parts[0].metrics:
        found = [(part.num_examples, part.metrics[name]) for part in parts]
        value = math.fsum(count * metric.value for count, metric in found) / total
        # (n - 1) * (the sample's variance), from a standard error s / sqrt(n).
        squares = [
            (count - 1) * count * metric.stderr**2 for count, metric in found if metric.stderr is not None
        ]
        is_known = len(squares) == len(parts) and total > len(parts)
        stderr = math.sqrt(math.fsum(squares) / (total - len(parts)) / total) if is_known else None
        pooled[name] = HarnessMetric(value=value, stderr=stderr)
    return pooled


def _read_stderr(numbers: Mapping[str, Any], key: str) -> float | None:
    metric, _, filter_name = key.partition(",")
    stderr = numbers.get(f"{metric}_stderr,{filter_name}")
    return float(stderr) if isinstance(stderr, int | float) else None


def _unexpected(cause: str) -> CorruptRecord:
    return CorruptRecord(
        f"lm-eval's output is not what {LM_EVAL.name} writes ({cause})",
        allowed="results and samples of the pinned protocol",
        next_step="remove its environment and start the same command again",
    )
