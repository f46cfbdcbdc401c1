"""Run lm-eval 0.4.13 in its own process, for scores that others can repeat.

A task with a protocol has defaults for all settings: lm-eval's own prompt, few-shot examples, stops and
filters; greedy, seed 42, and a sufficient budget. The rows are those of a strop task, so lm-eval's scores can
be matched by example id, and nothing is fetched: the process is offline. Any other task runs as lm-eval
defines it, on the data that it finds or fetches.

Replies are stored next to the result until that exists: the same command resumes a killed run.

Tested: lm_eval 0.4.13 on CPU with `hf`, `vllm` and `local-completions`.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from urllib.parse import urlsplit

from strop.engine.openai import KEY_VARIABLE
from strop.errors import CheckRefused, ConfigError, DataError, EngineError, StoreError
from strop.evaluate.harness.driver import VARIABLE
from strop.evaluate.harness.engine import LM_EVAL, engine_words, parse_pairs
from strop.evaluate.harness.jobs import FreeJob, HarnessJob
from strop.evaluate.harness.protocols import HarnessProtocol
from strop.evaluate.harness.result import (
    LOCAL_PREFIX,
    HarnessResult,
    read_free_output,
    read_output,
)
from strop.hardware.process import spawn, terminate
from strop.io import write_bytes_atomically
from strop.rollout import Example, Split
from strop.spec.harness import HarnessSpec
from strop.store.policy import is_offline
from strop.store.python_environment import KEEP_BYTECODE
from strop.tasks.mmlu import Mmlu

_BUDGETS = frozenset({"max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens"})
_CLOSED_PORT = "http://127.0.0.1:9"
_GRACE_S = 5.0
_TELL_EVERY_S = 10.0
Say = Callable[[str], None]
# The metric `code_eval` of the package evaluate is fetched from a hub, unless the current folder has a folder
# of that name. Relative imports of such a module are resolved in that folder.
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


def split_parts(protocol: HarnessProtocol, examples: Sequence[Example]) -> dict[str, list[Example]]:
    """Group examples by lm-eval's tasks; tasks without examples are left out.

    Raises: DataError if an example belongs to no task.
    """
    parts: dict[str, list[Example]] = {name: [] for name in protocol.files}
    for example in examples:
        parts[protocol.part_of(example) if protocol.part_of else protocol.task].append(example)
    return {name: members for name, members in parts.items() if members}


def stage_rows(job: HarnessJob, work_dir: Path) -> str:
    """Write the examples as lm-eval's rows, one folder for each of its tasks; return a hash over them.

    Raises: DataError if lm-eval cannot pose an example, or there are too few few-shot examples.
    """
    protocol = job.protocol
    held_out = split_parts(protocol, job.examples)
    shown_split = "dev" if protocol.shows_own_split else "train"
    # Few-shot examples from strop's data; none if lm-eval's task file has them.
    solved = job.task.examples(Split.TRAIN) if protocol.draws_shown else ()
    if protocol.shows_own_split:
        assert isinstance(job.task, Mmlu)
        solved = job.task.shots
    shown = split_parts(protocol, solved)
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


def write_task_files(protocol: HarnessProtocol, work_dir: Path, environment_dir: Path) -> list[str]:
    """Write lm-eval's tasks with the staged rows as their data, as JSON, which is YAML; return their names.

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
        data_files = {path.stem: str(path) for path in sorted((work_dir / "rows" / part).glob("*.jsonl"))}
        content = {
            "include": str(packages[0] / "tasks" / protocol.files[part]),
            "task": LOCAL_PREFIX + part,
            "tag": None,
            "dataset_path": "json",
            "dataset_name": None,
            "dataset_kwargs": {"data_files": data_files},
            "test_split": "test",
        }
        if not protocol.draws_shown:
            content |= {"training_split": None}
            content |= {"fewshot_split": "dev" if protocol.shows_own_split else None}
        (tasks_dir / f"{part}.yaml").write_text(json.dumps(content, indent=1))
    return [LOCAL_PREFIX + part for part in parts]


def write_code_metric(work_dir: Path) -> None:
    """Write the metric that runs programs into the folder that `evaluate` searches before a hub."""
    folder = work_dir / "code_eval"
    folder.mkdir(exist_ok=True)
    (folder / "code_eval.py").write_text(_CODE_EVAL.lstrip())
    program = files("strop.evaluate.harness").joinpath("program.py").read_text(encoding="utf-8")
    (folder / "program.py").write_text(program)


def harness_command(job: HarnessJob | FreeJob, work_dir: Path) -> list[str]:
    """Return the command line: for a pinned protocol all staged tasks, else the task itself.

    Raises: ConfigError if two settings have the same effect.
    """
    words = engine_words(
        job.engine,
        job.settings,
        model_path=job.model_path,
        dtype=job.dtype,
        max_positions=job.max_positions,
    )
    settings: HarnessSpec = job.settings
    generation = parse_pairs(settings.gen_kwargs or "", "harness.gen_kwargs", _BUDGETS)
    if isinstance(job, HarnessJob):
        protocol = job.protocol
        tasks = sorted(LOCAL_PREFIX + path.name for path in (work_dir / "rows").iterdir())
        words += ["--tasks", ",".join(tasks), "--include_path", str(work_dir / "tasks")]
        words += ["--num_fewshot", str(protocol.num_fewshot)]
        if not protocol.chooses:
            generation = {"temperature": 0, **generation, "max_gen_toks": protocol.max_reply_tokens}
        runs_code = protocol.runs_code
    else:
        words += ["--tasks", job.name]
        words += [] if settings.include is None else ["--include_path", settings.include]
        shots, budget = settings.num_few_shot, settings.max_reply_tokens
        words += [] if shots is None else ["--num_fewshot", str(shots)]
        words += [] if job.num_examples is None else ["--limit", str(job.num_examples)]
        generation = dict(generation) | ({} if budget is None else {"max_gen_toks": budget})
        runs_code = job.may_run_code
    words += ["--gen_kwargs", json.dumps(dict(generation))] if generation else []
    words += ["--system_instruction", settings.system_prompt] if settings.system_prompt else []
    words += ["--apply_chat_template"] if settings.chat_template else []
    words += ["--confirm_run_unsafe_code"] if runs_code else []
    words += [*settings.arguments, "--seed", str(settings.seed)]
    words += ["--output_path", str(work_dir / "out"), "--log_samples"]
    driver = files("strop.evaluate.harness").joinpath("driver.py")
    return [str(job.engine.python), str(driver), "run", *words]


def harness_variables(job: HarnessJob | FreeJob, work_dir: Path) -> Mapping[str, str]:
    """Return the environment variables of a run. A pinned protocol, and offline mode, fetch nothing."""
    variables = {**os.environ, **KEEP_BYTECODE}
    if job.threads is not None:
        variables["OMP_NUM_THREADS"] = str(job.threads)
    if job.engine.kind == "server":
        # lm-eval sends this variable to any server; the user's value is for another one.
        variables.pop("OPENAI_API_KEY", None)
        variables |= {"OPENAI_API_KEY": variables[KEY_VARIABLE]} if KEY_VARIABLE in variables else {}
    if isinstance(job, FreeJob) and not is_offline():
        return variables
    variables |= dict.fromkeys(("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "HF_EVALUATE_OFFLINE"), "1")
    if isinstance(job, HarnessJob):
        variables["HF_HOME"] = str(work_dir / "hf")
    # nltk has no offline mode: it would fetch missing data when lm-eval's ifeval is imported.
    variables |= dict.fromkeys(("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"), _CLOSED_PORT)
    if job.engine.url is not None:
        variables |= dict.fromkeys(("no_proxy", "NO_PROXY"), urlsplit(job.engine.url).hostname or "")
    return variables


def refuse_small_model(job: HarnessJob) -> None:
    """Refuse a model without room for a complete reply.

    Raises: CheckRefused.
    """
    if job.protocol.max_reply_tokens >= job.max_positions:
        raise too_few_positions(job, "and any prompt")


def refuse_unconfirmed_code(protocol: HarnessProtocol, *, is_confirmed: bool) -> None:
    """Refuse to let lm-eval run code that a model wrote, unless the user confirmed it.

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
    """Return the error for a model whose context cannot hold prompt and reply together."""
    return CheckRefused(
        f"{job.protocol.task} asks for {job.protocol.max_reply_tokens} tokens, {prompt} beside them, of a"
        f" model with {job.max_positions} positions; the harness would cut the prompt",
        allowed="a model with room for prompt and reply",
        next_step="evaluate with strop's own task, which counts such prompts as not solved",
    )


def run_harness(
    job: HarnessJob | FreeJob,
    out_dir: Path,
    *,
    part: int = 0,
    num_parts: int = 1,
    is_shared: bool = False,
    say: Say = lambda line: None,
) -> HarnessResult | None:
    """Run lm-eval and write `lm-eval-<task>-step-N.json`, its log and its samples into a folder.

    Each of several parts sends its share of the requests, on any machine with the folder; part 0 returns the
    result, the others None. An existing result is returned unchanged. `is_shared`: if the folder has the
    result of another evaluation, this one's name contains its digest. `say` is called with progress lines.
    Raises: DataError if lm-eval cannot pose an example; EngineError if it fails; CorruptRecord if its output
        is unexpected; CheckRefused if prompts were cut, or the folder has the result of another evaluation;
        StoreError if the disk fails.
    """
    stem = result_stem(job, out_dir)
    out_dir.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="strop-lm-eval-") as name:
        work_dir, names, data_digest = Path(name), [], ""
        if isinstance(job, HarnessJob):
            data_digest = stage_rows(job, work_dir)
            names = write_task_files(job.protocol, work_dir, LM_EVAL.path)
            if job.protocol.runs_code:
                write_code_metric(work_dir)
        command = harness_command(job, work_dir)
        digest = job.digest([word.replace(name, "") for word in command[1:]], data_digest)
        replies = _with_suffix(stem, f".replies-{digest[:8]}")
        stored = read_kept_result(_with_suffix(stem, ".json"))
        if stored is not None and stored.plan != digest:
            if not is_shared:
                raise _belongs_to_another(job, _with_suffix(stem, ".json"), stored)
            stem = _with_suffix(stem, f"-{digest[:8]}")
            stored = read_kept_result(_with_suffix(stem, ".json"))
        if stored is not None:
            return stored
        replies.mkdir(exist_ok=True)
        _run(job, command, work_dir, stem, replies=replies, part=part, num_parts=num_parts, say=say)
        if part:
            return None
        if isinstance(job, HarnessJob):
            output = read_output(job, work_dir / "out", names, data_digest)
        else:
            output = read_free_output(job, work_dir / "out")
    longest = output.longest_prompt_tokens
    if isinstance(job, HarnessJob) and longest + job.protocol.max_reply_tokens > job.max_positions:
        raise too_few_positions(job, f"and a prompt of {longest} tokens")
    write_bytes_atomically(_with_suffix(stem, ".samples.jsonl"), output.samples)
    result = output.result.model_copy(update={"plan": digest})
    text = json.dumps(result.model_dump(mode="json"), indent=1)
    write_bytes_atomically(_with_suffix(stem, ".json"), (text + "\n").encode())
    shutil.rmtree(replies, ignore_errors=True)
    return result


def result_stem(job: HarnessJob | FreeJob, out_dir: Path) -> Path:
    """Return the path of a job's files without their suffix."""
    before = "" if job.file_name is None else f"{job.file_name}."
    return out_dir / f"{before}lm-eval-{job.name.replace('/', '_')}-step-{job.step:06d}"


def _with_suffix(stem: Path, suffix: str) -> Path:
    """Append a suffix to a path. Not `Path.with_suffix`: names of tasks and files have dots."""
    return stem.with_name(stem.name + suffix)


def read_kept_result(path: Path) -> HarnessResult | None:
    """Return the result in a file, or None if it has none."""
    try:
        return HarnessResult.read(path.read_bytes())
    except (OSError, ValueError, AttributeError):
        return None


def _belongs_to_another(job: HarnessJob | FreeJob, path: Path, stored: HarnessResult) -> CheckRefused:
    """Return the refusal to overwrite the result of another evaluation."""
    settings = job.settings
    now: dict[str, object] = {
        "model_digest": job.model_digest,
        "dtype": job.dtype,
        "engine": job.engine.kind,
        "seed": settings.seed,
        "arguments": job.arguments,
    }
    now |= {} if settings.num_few_shot is None else {"num_fewshot": settings.num_few_shot}
    now |= {} if settings.max_reply_tokens is None else {"max_reply_tokens": settings.max_reply_tokens}
    now |= {} if job.num_examples is None else {"num_examples": job.num_examples}
    differences = [
        f"{name} {getattr(stored, name)!r} there and {value!r} now"
        for name, value in now.items()
        if getattr(stored, name) != value
    ]
    return CheckRefused(
        f"{path} is of another evaluation: {'; '.join(differences) or 'lm-eval was given something else'}",
        allowed="an empty folder, or the evaluation that was begun in it",
        next_step="repeat the command that began it, or name another folder with --out",
    )


def _run(
    job: HarnessJob | FreeJob,
    command: list[str],
    work_dir: Path,
    stem: Path,
    *,
    replies: Path,
    part: int,
    num_parts: int,
    say: Say,
) -> None:
    shots = job.protocol.num_fewshot if isinstance(job, HarnessJob) else job.settings.num_few_shot
    options = {"paths": job.engine.paths, "shots": shots, "replies": str(replies)}
    variables = {
        **harness_variables(job, work_dir),
        VARIABLE: json.dumps(options | {"part": part, "num_parts": num_parts}),
    }
    log_path = _with_suffix(stem, f".part-{part}.log" if part else ".log")
    words = [*command, "--use_cache", str(replies / f"part-{part}")]
    child = spawn(words, log_path, variables, cwd=work_dir)
    try:
        last = ""
        # lm-eval writes to its own log. A job without output may be killed as hanging.
        while (exit_code := child.wait(_TELL_EVERY_S)) is None:
            line = "".join(filter(str.isprintable, child.tail(1))).strip()
            if line not in {"", last}:
                last = line
                say(f"{job.name}: {line}")
    finally:
        terminate(child, _GRACE_S)
    if exit_code:
        raise EngineError(
            f"lm-eval ended with {exit_code} on {job.name}: {child.tail(5)}",
            allowed="a run that ends with 0",
            next_step=f"read {log_path}",
        )
