"""Results of lm-eval, read from the files that it writes."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from statistics import fmean
from typing import Any

from pydantic import computed_field

from strop.errors import CorruptRecord
from strop.evaluate.result import SUSPECT_TRUNCATED_FRAC, Record
from strop.tokenizer import Tokenizer

DEFAULT_REPLY_TOKENS = 256
"""Reply budget of lm-eval's engines if neither task nor user sets one."""
_GENERATION = "generate_until"


class HarnessMetric(Record):
    """One metric of lm-eval."""

    value: float
    stderr: float | None


class HarnessPart(Record):
    """One task of a group."""

    num_examples: int
    metrics: dict[str, HarnessMetric]


class HarnessResult(Record):
    """The result of one model on one task, group or tag of lm-eval."""

    harness: str
    task: str
    """lm-eval's name."""
    task_version: str
    """lm-eval's version of its task; of a group all that differ."""
    step: int
    model_digest: str
    dtype: str | None
    """None: chosen by a server, and unknown."""
    num_examples: int
    data_digest: str
    """Hash over lm-eval's hashes of the evaluated rows."""
    num_fewshot: int
    max_reply_tokens: int | None
    """None if nothing is generated."""
    stops: tuple[str, ...]
    seed: int
    engine: str
    """The generating engine: 'vllm', 'hf' or 'server'."""
    arguments: tuple[str, ...] = ()
    """Further settings that change the scores."""
    plan: str = ""
    """Hash over all inputs of lm-eval."""
    metrics: dict[str, HarnessMetric]
    """By metric and filter, for example 'exact_match,strict-match'. For a group: over all its examples; empty
    for groups for which lm-eval computes no score."""
    parts: dict[str, HarnessPart]
    """The tasks of a group by name; empty for one task."""
    num_cut_prompts: int = 0
    """Prompts longer than the model's context, which lm-eval silently cuts."""
    truncated_frac: float | None
    """Share of the replies that the budget cut, as the engine says. None: it does not say of all, or nothing
    is generated."""

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
        """Whether so many replies were cut that the score may reflect the budget, not the model."""
        return self.truncated_frac is not None and self.truncated_frac > SUSPECT_TRUNCATED_FRAC


def read_output(
    out_dir: Path,
    ends_path: Path,
    facts: Mapping[str, Any],
    *,
    tokenizer: Tokenizer,
    max_positions: int,
    num_few_shot: int | None,
) -> tuple[HarnessResult, bytes]:
    """Read what lm-eval wrote about one task, group or tag; return the result and all samples.

    `facts`: fields of the result that lm-eval's files do not have. `num_few_shot`: the number that was asked
    for; None: any.
    Raises: CorruptRecord if a file or a number is missing, or other shots were shown than asked for.
    """
    task = facts["task"]
    try:
        content = json.loads(_find_one(out_dir, "*/results_*.json").read_bytes())
        configs = content["configs"]
        samples = {name: _find_one(out_dir, f"*/samples_{name}_*.jsonl").read_bytes() for name in configs}
        # Filters share the samples of a row.
        rows = {
            name: {row["doc_id"]: row for row in map(json.loads, lines.splitlines())}
            for name, lines in samples.items()
        }
        parts = {
            name: HarnessPart(
                num_examples=int(content["n-samples"][name]["effective"]),
                metrics=_read_metrics(content["results"][name]),
            )
            for name in configs
        }
        shots = {int(content["n-shot"][name]) for name in configs}
        if not configs or (num_few_shot is not None and shots != {num_few_shot}):
            raise ValueError(f"it showed {sorted(shots)} examples, and {num_few_shot} were asked for")
        if wrong := [name for name, part in parts.items() if part.num_examples != len(rows[name])]:
            raise ValueError(f"{wrong[0]} has {len(rows[wrong[0]])} logged examples")
        # None of a task that generates nothing.
        budgets = {
            name: int((config.get("generation_kwargs") or {}).get("max_gen_toks", DEFAULT_REPLY_TOKENS))
            if config.get("output_type") == _GENERATION
            else None
            for name, config in configs.items()
        }
        hashes = [sorted(str(row.get("doc_hash")) for row in of_task.values()) for of_task in rows.values()]
        budget = max((value for value in budgets.values() if value is not None), default=None)
        whole, is_group = content["results"].get(task, {}), len(configs) > 1
        result = HarnessResult(
            **facts,
            task_version=", ".join(sorted({str(content["versions"][name]) for name in configs})),
            num_examples=sum(map(len, rows.values())),
            data_digest=hashlib.sha256(json.dumps(hashes).encode()).hexdigest()[:16],
            num_fewshot=max(shots),
            max_reply_tokens=budget,
            stops=tuple((next(iter(configs.values())).get("generation_kwargs") or {}).get("until", ())),
            metrics=_read_metrics(whole) if is_group else next(iter(parts.values())).metrics,
            parts=parts if is_group else {},
            num_cut_prompts=sum(
                len(tokenizer.encode(str(row["arguments"]["gen_args_0"]["arg_0"])))
                > max_positions - (budgets[name] or 0)
                for name, of_task in rows.items()
                for row in of_task.values()
            ),
            truncated_frac=_share_cut(
                (row for name, of_task in rows.items() if budgets[name] for row in of_task.values()),
                ends_path,
            ),
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CorruptRecord(
            f"lm-eval's output on {task} is not what it should be ({type(error).__name__}: {error})",
            allowed="results and samples of all its tasks, with as many shots as asked for",
            next_step="correct the number of shots if the task allows no other; else remove lm-eval's"
            " environment and start the same command again",
        ) from error
    return result, b"".join(samples.values())


def _share_cut(rows: Iterator[Mapping[str, Any]], ends_path: Path) -> float | None:
    """Return the cut share of the replies to these rows; None if one is unknown, or there are none."""
    ends: dict[str, list[int]] = {}
    for line in ends_path.read_text(encoding="ascii").splitlines() if ends_path.exists() else ():
        key, _, is_cut = line.partition(" ")
        if is_cut in {"0", "1"}:
            ends.setdefault(key, []).append(int(is_cut))
    shares = []
    for row in rows:
        for _, words in sorted(row["arguments"].items()):
            # lm-eval's own key of a request.
            key = hashlib.sha256(json.dumps([_GENERATION, *words.values()]).encode()).hexdigest()
            if key not in ends:
                return None
            shares.append(fmean(ends[key]))
    return fmean(shares) if shares else None


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


def _find_one(out_dir: Path, pattern: str) -> Path:
    paths = list(out_dir.glob(pattern))
    if len(paths) != 1:
        raise ValueError(f"it has {len(paths)} files {pattern}, not 1")
    return paths[0]
