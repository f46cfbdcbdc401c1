"""Scores that others can repeat: lm-eval 0.4.13 in its own process, on the examples of one of our tasks.

The protocol is pinned: the harness's own prompt, few-shot examples, stops and filters; greedy, seed 42,
and a budget that cuts no solution. The rows are those of our task, so the harness's scores can be
matched by example id. Nothing is fetched: the process is offline.

Tried: lm_eval 0.4.13 with the `hf` model on CPU. Not covered: other engines.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path

from strop.errors import CheckRefused, ConfigError, DataError, EngineError, StoreError
from strop.evaluate.harness.protocols import HarnessProtocol
from strop.evaluate.harness.result import LM_EVAL, LOCAL_PREFIX, SEED, HarnessJob, HarnessResult, read_output
from strop.hardware.process import spawn, terminate
from strop.io import write_bytes_atomically
from strop.rollout import Example, Split
from strop.tasks.mmlu import Mmlu

_CLOSED_PORT = "http://127.0.0.1:9"
# The metric `code_eval` of the package evaluate is fetched from a hub; a folder of its name in the current
# folder comes first. Relative imports of such a module are found beside it.
_CODE_EVAL = """
import datasets
import evaluate

from .program import count_passes


class ProgramsPass(evaluate.Metric):
    def _info(self):
        texts = datasets.Value("string")
        features = datasets.Features({"predictions": datasets.Sequence(texts), "references": texts})
        return evaluate.MetricInfo(
            description="Share of programs that pass their tests.",
            citation="",
            inputs_description="",
            features=features,
        )

    def _compute(self, predictions, references, k):
        if list(k) != [1]:
            raise ValueError("pass@1 only")
        counts = [count_passes(programs, test) for programs, test in zip(predictions, references)]
        fractions = [count / len(programs) for count, programs in zip(counts, predictions)]
        return {"pass@1": sum(fractions) / len(fractions)}, {}
"""


def local_name(part: str) -> str:
    """Return the name that a task of the harness has with our data."""
    return LOCAL_PREFIX + part


def split_parts(protocol: HarnessProtocol, examples: list[Example]) -> dict[str, list[Example]]:
    """Sort examples by the harness's tasks; those without any are left out.

    Raises: DataError if an example belongs to none.
    """
    parts: dict[str, list[Example]] = {name: [] for name in protocol.files}
    for example in examples:
        parts[protocol.part_of(example) if protocol.part_of else protocol.task].append(example)
    return {name: members for name, members in parts.items() if members}


def stage_rows(job: HarnessJob, work_dir: Path) -> str:
    """Write the examples as the harness's rows, one folder for each of its tasks; return a hash over them.

    Raises: DataError if an example cannot be asked by the harness, or there are too few to show.
    """
    protocol = job.protocol
    held_out = split_parts(protocol, job.examples)
    shown_split = "dev" if protocol.shows_own_split else "train"
    shown = split_parts(protocol, _list_shown(job))
    digest = hashlib.sha256()
    for part, examples in held_out.items():
        folder = work_dir / "rows" / part
        folder.mkdir(parents=True, exist_ok=True)
        for name, members in ((shown_split, shown.get(part, [])), ("test", examples)):
            rows = [{**protocol.row(example), "example_id": example.example_id} for example in members]
            data = "".join(json.dumps(row) + "\n" for row in rows).encode()
            digest.update(data + b"\0")
            if name == shown_split and protocol.stages_shown and len(rows) < protocol.num_fewshot:
                raise DataError(
                    f"{part} shows {protocol.num_fewshot} solved examples, and the"
                    f" {'dev' if protocol.shows_own_split else 'training'} split has {len(rows)}",
                    allowed=f"{protocol.num_fewshot} or more",
                    next_step="name the whole data set in task.source, and leave task.num_train out",
                )
            if rows:
                (folder / f"{name}.jsonl").write_bytes(data)
    return digest.hexdigest()[:16]


def _list_shown(job: HarnessJob) -> list[Example]:
    """Return the solved examples that the harness takes from our data; none where its task file has them."""
    if job.protocol.shows_own_split:
        assert isinstance(job.task, Mmlu)
        return list(job.task.shots)
    return list(job.task.examples(Split.TRAIN)) if job.protocol.draws_shown else []


def write_task_files(protocol: HarnessProtocol, work_dir: Path, environment_dir: Path) -> list[str]:
    """Write the harness's tasks with their data replaced by staged rows; return their names.

    As JSON, which is YAML.
    Raises: StoreError if the environment has no lm-eval.
    """
    packages = list(environment_dir.glob("lib/python3*/site-packages/lm_eval"))
    if len(packages) != 1:
        raise StoreError(
            f"the environment in {environment_dir} has {len(packages)} packages lm_eval",
            allowed="one, where pip put it",
            next_step="remove that folder and start the same command again, where pip may fetch packages",
        )
    tasks_dir = work_dir / "tasks"
    tasks_dir.mkdir(exist_ok=True)
    parts = sorted(path.name for path in (work_dir / "rows").iterdir())
    for part in parts:
        found = {path.stem: str(path) for path in sorted((work_dir / "rows" / part).glob("*.jsonl"))}
        content = {
            "include": str(packages[0] / "tasks" / protocol.files[part]),
            "task": local_name(part),
            "tag": None,
            "dataset_path": "json",
            "dataset_name": None,
            "dataset_kwargs": {"data_files": found},
            "test_split": "test",
        }
        if not protocol.draws_shown:
            content |= {"training_split": None}
            content |= {"fewshot_split": "dev" if protocol.shows_own_split else None}
        (tasks_dir / f"{part}.yaml").write_text(json.dumps(content, indent=1))
    return [local_name(part) for part in parts]


def write_code_metric(work_dir: Path) -> None:
    """Write the metric that runs programs, where `evaluate` looks before it asks a hub."""
    folder = work_dir / "code_eval"
    folder.mkdir(exist_ok=True)
    (folder / "code_eval.py").write_text(_CODE_EVAL.lstrip())
    program = files("strop.evaluate.harness").joinpath("program.py").read_text(encoding="utf-8")
    (folder / "program.py").write_text(program)


def harness_command(job: HarnessJob, work_dir: Path, python: Path) -> list[str]:
    """Return the command line of the pinned protocol, for all tasks that are staged."""
    protocol = job.protocol
    model = {"pretrained": str(job.model_path), "dtype": job.dtype}
    tasks = sorted(local_name(path.name) for path in (work_dir / "rows").iterdir())
    words = ["--model", "hf", "--model_args", json.dumps(model)]
    words += ["--tasks", ",".join(tasks), "--include_path", str(work_dir / "tasks")]
    words += ["--num_fewshot", str(protocol.num_fewshot), "--seed", str(SEED)]
    if not protocol.chooses:
        words += ["--gen_kwargs", f"temperature=0,max_gen_toks={protocol.max_reply_tokens}"]
    words += ["--output_path", str(work_dir / "out"), "--log_samples", "--batch_size", "8"]
    if protocol.runs_code:
        words += ["--confirm_run_unsafe_code"]
    return [str(python), "-m", "lm_eval", "run", *words]


def harness_variables(work_dir: Path) -> Mapping[str, str]:
    """Return the environment of a run that fetches nothing."""
    return {
        **os.environ,
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_OFFLINE": "1",
        "HF_EVALUATE_OFFLINE": "1",
        "HF_HOME": str(work_dir / "hf"),
        # nltk knows no offline mode: it would fetch what is missing when lm-eval's ifeval is imported.
        **dict.fromkeys(("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"), _CLOSED_PORT),
    }


def refuse_small_model(job: HarnessJob) -> None:
    """Refuse a model that has no room for a whole reply.

    Raises: CheckRefused.
    """
    if job.protocol.max_reply_tokens >= job.max_positions:
        raise too_few_positions(job, "and any prompt")


def refuse_unconfirmed_code(protocol: HarnessProtocol, *, is_confirmed: bool) -> None:
    """Refuse to let the harness run what a model wrote, unless the user said so.

    Raises: ConfigError.
    """
    if protocol.runs_code and not is_confirmed:
        raise ConfigError(
            f"--harness lm-eval with task {protocol.task}, which runs what the model wrote in no sandbox,"
            " as this user",
            allowed="such a task with --confirm-run-unsafe-code",
            next_step=f"leave --harness out: strop's own {protocol.own_task} runs it in a sandbox; or add"
            " the option on a machine that may be damaged",
        )


def too_few_positions(job: HarnessJob, prompt: str) -> CheckRefused:
    """Return the refusal of a model in which prompt and reply have no room beside each other."""
    return CheckRefused(
        f"{job.protocol.task} asks for {job.protocol.max_reply_tokens} tokens, {prompt} beside them, of a"
        f" model with {job.max_positions} positions; the harness would cut the prompt",
        allowed="a model with room for prompt and reply",
        next_step="evaluate with strop's own task, which counts such prompts as not solved",
    )


_GRACE_S = 5.0
_POLL_S = 3600.0


def run_harness(job: HarnessJob, out_dir: Path, *, python: Path) -> HarnessResult:
    """Run the harness and write `lm-eval-<task>-step-N.json`, its log and its samples into a folder.

    `python` is the interpreter of the harness's environment.
    Raises: DataError if the harness cannot ask an example; EngineError if it fails; CorruptRecord if it
        says something else than expected; CheckRefused if prompts were cut; StoreError if the disk fails.
    """
    stem = out_dir / f"lm-eval-{job.protocol.task}-step-{job.step:06d}"
    out_dir.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="strop-lm-eval-") as name:
        work_dir = Path(name)
        data_digest = stage_rows(job, work_dir)
        names = write_task_files(job.protocol, work_dir, LM_EVAL.path)
        if job.protocol.runs_code:
            write_code_metric(work_dir)
        _run(job, work_dir, stem.with_suffix(".log"), python)
        output = read_output(job, work_dir / "out", names, data_digest)
    if output.longest_prompt_tokens + job.protocol.max_reply_tokens > job.max_positions:
        raise too_few_positions(job, f"and a prompt of {output.longest_prompt_tokens} tokens")
    write_bytes_atomically(stem.with_suffix(".samples.jsonl"), output.samples)
    text = json.dumps(output.result.model_dump(mode="json"), indent=1)
    write_bytes_atomically(stem.with_suffix(".json"), (text + "\n").encode())
    return output.result


def _run(job: HarnessJob, work_dir: Path, log_path: Path, python: Path) -> None:
    child = spawn(harness_command(job, work_dir, python), log_path, harness_variables(work_dir), cwd=work_dir)
    try:
        while (exit_code := child.wait(_POLL_S)) is None:
            pass
    finally:
        terminate(child, _GRACE_S)
    if exit_code:
        raise EngineError(
            f"lm-eval ended with {exit_code} on {job.protocol.task}: {child.tail(5)}",
            allowed="a run that ends with 0",
            next_step=f"read {log_path}",
        )
