"""Scores that others can repeat: lm-eval 0.4.13 in its own process, on the examples of one of our tasks.

The protocol is pinned: the harness's own prompt, few-shot examples, stops and filters; greedy, seed 42,
and a budget that cuts no solution. The rows are those of our task, so what the harness scores can be
told apart by example id. Nothing is fetched: the process is offline.

Tried: lm_eval 0.4.13 with the `hf` model on CPU. Not covered: tasks that run code or fetch more than
their rows, log-likelihood tasks, other engines.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from pydantic import computed_field

from strop.errors import CheckRefused, ConfigError, CorruptRecord, EngineError, explain_refusal
from strop.evaluate.harness_environment import LM_EVAL
from strop.evaluate.result import SUSPECT_TRUNCATED_FRAC, Record
from strop.hardware.process import spawn, terminate
from strop.rollout import Example, Split
from strop.store import write_bytes_atomically
from strop.tasks import Task
from strop.tokenizer import Tokenizer

SEED = 42
_GRACE_S = 5.0
_POLL_S = 3600.0
_LOCAL = "strop_"
"""Before the harness's name of a task, whose data is then ours."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HarnessProtocol:
    """How the harness is asked for a task."""

    task: str
    """The harness's name, and that of its file."""
    file: str
    """The task's file in the harness."""
    own_task: str
    """The task of ours that has the examples."""
    num_fewshot: int
    max_reply_tokens: int
    row: Callable[[Example], Mapping[str, Any]]
    """A row as the harness's task reads it."""


def _gsm8k_row(example: Example) -> Mapping[str, Any]:
    return {"question": example.fields["question"], "answer": example.fields["solution"]}


# Few-shot numbers are the harness's default for gsm8k and the published baselines' for gsm8k_cot; the
# harness's default of 256 tokens cut 13 % of the answers (EVA-2).
PROTOCOLS: Mapping[str, HarnessProtocol] = MappingProxyType(
    {
        protocol.task: protocol
        for protocol in (
            HarnessProtocol(
                task="gsm8k",
                file="gsm8k/gsm8k.yaml",
                own_task="gsm8k",
                num_fewshot=5,
                max_reply_tokens=1024,
                row=_gsm8k_row,
            ),
            HarnessProtocol(
                task="gsm8k_cot",
                file="gsm8k/gsm8k-cot.yaml",
                own_task="gsm8k",
                num_fewshot=4,
                max_reply_tokens=1024,
                row=_gsm8k_row,
            ),
        )
    }
)


class HarnessMetric(Record):
    """One number of the harness."""

    value: float
    stderr: float | None


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
    dtype: str
    num_examples: int
    data_digest: str
    """Hash over the rows that were asked and that few-shot examples were drawn from."""
    num_fewshot: int
    max_reply_tokens: int
    seed: int
    metrics: dict[str, HarnessMetric]
    """By metric and filter, for example 'exact_match,strict-match'."""
    truncated_frac: float
    """Share of replies that are as long as the budget when they are encoded again."""

    @computed_field  # type: ignore[prop-decorator]
    @property
    def truncation_suspect(self) -> bool:
        """Whether so many replies were cut that the score may say more about the budget than the model."""
        return self.truncated_frac > SUSPECT_TRUNCATED_FRAC


@dataclass(frozen=True, kw_only=True, slots=True)
class HarnessJob:
    """One run of the harness."""

    protocol: HarnessProtocol
    task: Task
    model_path: Path
    model_digest: str
    step: int
    dtype: str
    max_positions: int
    """Tokens that the model can look at; the harness cuts longer prompts from the left without a word."""
    num_examples: int | None
    """From the first. None: all."""


def find_protocol(name: str) -> HarnessProtocol:
    """Return how the harness is asked for a task.

    Raises: ConfigError for a task that is not pinned.
    """
    if name not in PROTOCOLS:
        raise ConfigError(
            explain_refusal(
                f"--harness lm-eval with task {name}",
                allowed=", ".join(PROTOCOLS),
                next_step="name one of these, or leave --harness out for strop's own tasks",
            )
        )
    return PROTOCOLS[name]


def run_harness(job: HarnessJob, out_dir: Path, *, python: Path) -> HarnessResult:
    """Run the harness and write `lm-eval-<task>-step-N.json`, its log and its samples into a folder.

    `python` is the interpreter of the harness's environment.
    Raises: EngineError if the harness fails; CorruptRecord if it says something else than expected;
        StoreError if the disk fails.
    """
    stem = out_dir / f"lm-eval-{job.protocol.task}-step-{job.step:06d}"
    out_dir.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="strop-lm-eval-") as name:
        work_dir = Path(name)
        data_digest = stage_rows(job, work_dir)
        write_task_file(job.protocol, work_dir, LM_EVAL.path)
        log_path = stem.with_suffix(".log")
        env = {
            **os.environ,
            "HF_HUB_OFFLINE": "1",
            "HF_DATASETS_OFFLINE": "1",
            "HF_HOME": str(work_dir / "hf"),
        }
        child = spawn(harness_command(job, work_dir, python), log_path, env, cwd=work_dir)
        try:
            while (exit_code := child.wait(_POLL_S)) is None:
                pass
        finally:
            terminate(child, _GRACE_S)
        if exit_code:
            raise EngineError(
                explain_refusal(
                    f"lm-eval ended with {exit_code} on {job.protocol.task}: {child.tail(5)}",
                    allowed="a run that ends with 0",
                    next_step=f"read {log_path}",
                )
            )
        result, samples = read_output(job, work_dir / "out", data_digest)
    write_bytes_atomically(stem.with_suffix(".samples.jsonl"), samples)
    text = json.dumps(result.model_dump(mode="json"), indent=1)
    write_bytes_atomically(stem.with_suffix(".json"), (text + "\n").encode())
    return result


def stage_rows(job: HarnessJob, work_dir: Path) -> str:
    """Write the examples of the task as the harness's rows; return a hash over them."""
    digest = hashlib.sha256()
    for name, split in (("train", Split.TRAIN), ("test", Split.HELD_OUT)):
        examples = job.task.examples(split)
        if split is Split.HELD_OUT:
            examples = examples[: job.num_examples]
        rows = [{**job.protocol.row(example), "example_id": example.example_id} for example in examples]
        data = "".join(json.dumps(row) + "\n" for row in rows).encode()
        digest.update(data + b"\0")
        (work_dir / f"{name}.jsonl").write_bytes(data)
    return digest.hexdigest()[:16]


def write_task_file(protocol: HarnessProtocol, work_dir: Path, environment_dir: Path) -> Path:
    """Write the harness's task with its data replaced by ours, as JSON, which is YAML."""
    (package_dir,) = environment_dir.glob("lib/python3*/site-packages/lm_eval")
    content = {
        "include": str(package_dir / "tasks" / protocol.file),
        "task": _LOCAL + protocol.task,
        "tag": None,
        "dataset_path": "json",
        "dataset_name": None,
        "dataset_kwargs": {
            "data_files": {name: str(work_dir / f"{name}.jsonl") for name in ("train", "test")}
        },
    }
    path = work_dir / "tasks" / f"{protocol.task}.yaml"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(content, indent=1))
    return path


def harness_command(job: HarnessJob, work_dir: Path, python: Path) -> list[str]:
    """Return the command line of the pinned protocol."""
    protocol = job.protocol
    model = {"pretrained": str(job.model_path), "dtype": job.dtype}
    words = ["--model", "hf", "--model_args", json.dumps(model)]
    words += ["--tasks", _LOCAL + protocol.task, "--include_path", str(work_dir / "tasks")]
    words += ["--num_fewshot", str(protocol.num_fewshot), "--seed", str(SEED)]
    words += ["--gen_kwargs", f"temperature=0,max_gen_toks={protocol.max_reply_tokens}"]
    words += ["--output_path", str(work_dir / "out"), "--log_samples", "--batch_size", "8"]
    return [str(python), "-m", "lm_eval", "run", *words]


def read_output(job: HarnessJob, out_dir: Path, data_digest: str) -> tuple[HarnessResult, bytes]:
    """Read what the harness wrote: the result, and its samples as they are.

    Raises: CorruptRecord if a file or a number is missing.
    """
    name = _LOCAL + job.protocol.task
    try:
        (results_path,) = out_dir.glob("*/results_*.json")
        (samples_path,) = out_dir.glob(f"*/samples_{name}_*.jsonl")
        said = json.loads(results_path.read_bytes())
        numbers = said["results"][name]
        samples = samples_path.read_bytes()
        # One line for each filter, with the same reply.
        rows = {row["doc"]["example_id"]: row for row in map(json.loads, samples.splitlines())}
        replies = [row["resps"][0][0] for row in rows.values()]
        prompts = [row["arguments"]["gen_args_0"]["arg_0"] for row in rows.values()]
        metrics = {
            key: HarnessMetric(value=value, stderr=_read_stderr(numbers, key))
            for key, value in numbers.items()
            if "," in key and "_stderr," not in key
        }
        result = HarnessResult(
            harness=LM_EVAL.name,
            task=job.protocol.task,
            task_version=str(said["versions"][name]),
            split=Split.HELD_OUT,
            step=job.step,
            model_digest=job.model_digest,
            dtype=job.dtype,
            num_examples=int(said["n-samples"][name]["effective"]),
            data_digest=data_digest,
            num_fewshot=int(said["n-shot"][name]),
            max_reply_tokens=int(said["configs"][name]["generation_kwargs"]["max_gen_toks"]),
            seed=int(said["config"]["fewshot_seed"]),
            metrics=metrics,
            truncated_frac=sum(n >= job.protocol.max_reply_tokens for n in _count_tokens(job, replies))
            / len(replies),
        )
    except (ValueError, KeyError, TypeError, IndexError) as error:
        raise _unexpected(f"{type(error).__name__}: {error}") from error
    pinned = (job.protocol.num_fewshot, job.protocol.max_reply_tokens, SEED, len(replies))
    found = (result.num_fewshot, result.max_reply_tokens, result.seed, result.num_examples)
    if found != pinned or not metrics:
        raise _unexpected(f"shots, budget, seed and examples are {found}, pinned are {pinned}")
    longest = max(_count_tokens(job, prompts))
    if longest + job.protocol.max_reply_tokens > job.max_positions:
        raise _too_few_positions(job, f"and a prompt of {longest} tokens")
    return result, samples


def refuse_small_model(job: HarnessJob) -> None:
    """Refuse a model that has no room for a whole reply.

    Raises: CheckRefused.
    """
    if job.protocol.max_reply_tokens >= job.max_positions:
        raise _too_few_positions(job, "and any prompt")


def _too_few_positions(job: HarnessJob, prompt: str) -> CheckRefused:
    return CheckRefused(
        explain_refusal(
            f"{job.protocol.task} asks for {job.protocol.max_reply_tokens} tokens, {prompt} beside them, of a"
            f" model with {job.max_positions} positions; the harness would cut the prompt",
            allowed="a model with room for prompt and reply",
            next_step="evaluate with strop's own task, which counts such prompts as not solved",
        )
    )


def _read_stderr(numbers: Mapping[str, Any], key: str) -> float | None:
    metric, _, filter_name = key.partition(",")
    stderr = numbers.get(f"{metric}_stderr,{filter_name}")
    return float(stderr) if isinstance(stderr, int | float) else None


def _count_tokens(job: HarnessJob, texts: list[str]) -> list[int]:
    tokenizer = Tokenizer.load(job.model_path)
    return [len(tokenizer.encode(text)) for text in texts]


def _unexpected(cause: str) -> CorruptRecord:
    return CorruptRecord(
        explain_refusal(
            f"lm-eval's output is not what {LM_EVAL.name} writes ({cause})",
            allowed="results and samples of the pinned protocol",
            next_step="remove its environment and start the same command again",
        )
    )
