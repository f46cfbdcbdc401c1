"""Run lm-eval 0.4.13 by its command line in an environment of its own, for scores that others can repeat.

vLLM is served here, in its own environment, and asked like a running server. lm-eval's cache of replies is
beside the result until that exists: the same command resumes a killed run. Tested on a CPU.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import secrets
import shutil
import socket
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean
from types import MappingProxyType
from typing import Any, Literal

from strop.engine.openai import KEY_VARIABLE, require_server_part
from strop.engine.vllm.environment import CPU_KV_CACHE_BYTES, find_python
from strop.errors import ConfigError, CorruptRecord, EngineError
from strop.evaluate.result import Record
from strop.hardware.gpus import read_gpus
from strop.hardware.process import ChildProcess, spawn, terminate
from strop.io import write_bytes_atomically
from strop.spec.harness import HarnessSpec
from strop.store.data_files import locate_named
from strop.store.policy import is_offline
from strop.store.python_environment import KEEP_BYTECODE, PythonEnvironment
from strop.tokenizer import Tokenizer

# torch first and alone: this exact pin is offered as a CPU build where one is kept. math-verify, its parser's
# runtime and langdetect decide verdicts. Tested together with Python 3.11 on 2026-11-26.
LM_EVAL = PythonEnvironment(
    name="lm-eval-0.4.13",
    folder="harness",
    pip_steps=(
        ("torch==2.13.0",),
        (
            *("lm_eval[hf,math,ifeval]==0.4.13", "transformers==5.23.0", "accelerate==1.15.0"),
            *("datasets==5.2.0", "evaluate==0.4.6", "math-verify==0.9.0", "sympy==1.14.0"),
            # For servers.
            "tenacity==9.2.1",
            *("antlr4-python3-runtime==4.11.0", "langdetect==1.0.9", "nltk==3.10.4"),
        ),
        # Only for punkt_tab, which ifeval needs to split sentences and no package of nltk contains.
        ("--no-deps", "llama-index-core==0.14.25"),
    ),
    nltk_data="llama_index/core/_static/nltk_cache",
)
# lm-eval's default budget of 256 tokens truncated 13 % of the answers (EVA-2).
PROTOCOLS: Mapping[str, tuple[int, int | None]] = MappingProxyType(
    {
        "gsm8k": (5, 1024),
        "gsm8k_cot": (4, 1024),
        "minerva_math": (4, 2048),
        "hendrycks_math": (4, 2048),
        "mbpp": (3, 512),
        "humaneval": (0, 1024),
        "ifeval": (0, 4096),
        "mmlu": (5, None),
    }
)
"""Shots and reply budget of the published scores, by lm-eval's name of the task."""
NUM_CONCURRENT = 64
"""Concurrent requests to a server."""
_CHANGING = ("max_model_tokens", "model_args", "arguments", "include")
"""Settings that change the scores and are no field of a result."""
_KEYS = frozenset({"api_key", "auth_token", "header"})
"""Arguments of lm-eval's engines that hold a secret; other users can read a command line."""
_LOOK_LIMIT_S, _START_LIMIT_S, _GRACE_S = 60.0, 1800.0, 5.0
_POLL_S = 0.5
DEFAULT_REPLY_TOKENS = 256
"""Reply budget of lm-eval's engines if neither task nor user sets one."""


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
    num_examples: int
    data_digest: str
    """Hash over lm-eval's hashes of the evaluated rows."""
    num_fewshot: int
    max_reply_tokens: int | None
    """None if nothing is generated."""
    stops: tuple[str, ...]
    seed: int
    engine: str
    arguments: tuple[str, ...] = ()
    """Further settings that change the scores."""
    plan: str = ""
    """Hash over all inputs of lm-eval."""
    metrics: dict[str, HarnessMetric]
    """By metric and filter, such as 'exact_match,strict-match'; of a group if lm-eval computes any."""
    parts: dict[str, HarnessPart]
    """The tasks of a group by name; empty for one task."""
    truncated_frac: float | None
    """Of the replies that a budget cut; None if an end is unknown, or none is generated."""
    num_cut_prompts: int
    """Prompts longer than the model's context, which lm-eval silently cuts."""

    @property
    def scored_parts(self) -> dict[str, HarnessPart]:
        """The task or group itself, and the tasks of a group, by name."""
        return {self.task: HarnessPart(num_examples=self.num_examples, metrics=self.metrics), **self.parts}

    @property
    def notes(self) -> list[str]:
        """What a reader of the scores must know."""
        share = "an unknown share" if self.truncated_frac is None else f"{self.truncated_frac:.1%}"
        notes = [f"{share} of replies were cut"] if share != "0.0%" and self.max_reply_tokens else []
        notes += [f"{self.num_cut_prompts} prompts were cut"] if self.num_cut_prompts else []
        return [*notes, *self.arguments]


@dataclass(frozen=True, kw_only=True, slots=True)
class HarnessJob:
    """A task, group or tag of lm-eval for a model."""

    task: str
    model_path: Path
    model_digest: str
    step: int
    dtype: str
    max_positions: int
    num_examples: int | None = None
    settings: HarnessSpec = field(default_factory=HarnessSpec)
    engine: Literal["hf", "vllm", "server"] = "hf"
    vllm_python: Path | None = None
    url: str | None = None
    """Address of a running server, up to /v1."""
    served_name: str = ""
    """The server's name of the model."""
    may_run_code: bool = False
    threads: int | None = None
    file_name: str | None = None
    """Name of an evaluation file's evaluation: the names of its results begin with it."""

    @property
    def protocol(self) -> tuple[int | None, int | None]:
        """The shots and the budget that are asked for; None: as the task says."""
        shots, budget = PROTOCOLS.get(self.task, (None, None))
        own = self.settings.num_few_shot
        return shots if own is None else own, self.settings.max_reply_tokens or budget

    @property
    def arguments(self) -> tuple[str, ...]:
        """The settings that change the scores and are no field of a result."""
        values = {name: getattr(self.settings, name) for name in _CHANGING}
        return tuple(f"{name}={value}" for name, value in values.items() if value)


def find_engine(job: HarnessJob, python: str | None) -> HarnessJob:
    """Return the job with its engine. `python`: the interpreter that has vLLM, if the user named one.

    Raises: ConfigError for a setting without effect; EngineError if a running server does not answer.
    """
    settings = job.settings
    if job.url is not None:
        _refuse_ignored(settings, "a running server", "engine", "tensor_parallel", "gpu_memory_frac")
        models = _list_served(job.url, os.environ.get(KEY_VARIABLE))
        if job.served_name not in models and len(models) != 1:
            raise ConfigError(
                f"the server at {job.url} has no model {job.served_name}",
                allowed=f"one of {', '.join(sorted(models)) or 'none'}, or a server with one model",
                next_step="name it behind the # of the address",
            )
        name = job.served_name if job.served_name in models else next(iter(models))
        positions = min(job.max_positions, models[name] or job.max_positions)
        return replace(job, engine="server", served_name=name, max_positions=positions)
    if settings.engine != "hf":
        try:
            return replace(job, engine="vllm", vllm_python=find_python(python))
        except ConfigError:
            if settings.engine == "vllm" or python is not None:
                raise
    _refuse_ignored(settings, "transformers", "gpu_memory_frac")
    return replace(job, engine="hf")


def _refuse_ignored(settings: HarnessSpec, engine: str, *names: str) -> None:
    """Refuse settings, unless they have their defaults, that the engine would ignore."""
    fields = HarnessSpec.model_fields
    if ignored := [name for name in names if getattr(settings, name) != fields[name].default]:
        raise ConfigError(
            f"{', '.join(f'harness.{name}={getattr(settings, name)}' for name in ignored)} with {engine}",
            allowed="settings that take effect",
            next_step="leave them out, or choose another engine",
        )


def _list_served(url: str, key: str | None) -> dict[str, int | None]:
    """Return a server's models, with the token limit if it tells. Raises: EngineError."""
    require_server_part("httpx")
    import httpx

    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    try:
        answer = httpx.get(f"{url.rstrip('/')}/models", headers=headers, timeout=_LOOK_LIMIT_S)
        entries = answer.raise_for_status().json()["data"]
        return {str(entry["id"]): entry.get("max_model_len") for entry in entries}
    except (httpx.HTTPError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise EngineError(
            f"{url}/models does not answer ({type(error).__name__}: {error})",
            allowed=f"a running server of OpenAI's completions, and its key in the variable {KEY_VARIABLE}",
            next_step="start it, correct the address, or set the variable",
        ) from error


def run_harness(job: HarnessJob, out_dir: Path) -> HarnessResult:
    """Run lm-eval and write `lm-eval-<task>-step-N.json`, its log and its samples into a folder.

    An existing result of the same evaluation is returned; beside that of another, the name has its digest.
    Raises: ConfigError for arguments that repeat a setting or hold a key; EngineError if lm-eval or vLLM
        fails; CorruptRecord if its output is unexpected.
    """
    words = _list_words(job)
    content = [words, _vllm_words(job), job.model_digest, job.engine, LM_EVAL.stamp]
    digest = hashlib.sha256(json.dumps(content).encode()).hexdigest()[:16]
    before = "" if job.file_name is None else f"{job.file_name}."
    plain = f"{before}lm-eval-{job.task.replace('/', '_')}-step-{job.step:06d}"
    for name in (plain, f"{plain}-{digest[:8]}"):
        path = out_dir / f"{name}.json"
        if not path.exists():
            break
        stored = HarnessResult.model_validate_json(path.read_bytes())
        if stored.plan == digest:
            return stored
    replies = out_dir / f"{name}.replies-{digest[:8]}"
    replies.mkdir(parents=True, exist_ok=True)
    ends_path = replies / "ends.txt"
    with (
        tempfile.TemporaryDirectory(prefix="strop-lm-eval-") as output,
        _serving(job, name, out_dir) as served,
    ):
        words += ["--model_args", json.dumps(_model_arguments(served))]
        words += ["--output_path", output, "--log_samples", "--use_cache", str(replies / "cache")]
        cwd = None if job.settings.include is None else locate_named(job.settings.include)
        command = [str(LM_EVAL.python), str(Path(__file__).with_name("lm_eval_models.py")), "run", *words]
        variables = _list_variables(served) | {"STROP_HARNESS_ENDS": str(ends_path)}
        if cwd is not None:
            # `datasets` knows a data set in a folder by its name, and would give rows that it read before.
            variables["HF_DATASETS_CACHE"] = str(replies / "rows")
        child = spawn(command, out_dir / f"{name}.log", variables, cwd=cwd)
        _wait(child, job.task)
        result, samples = read_output(Path(output), job, digest, ends_path)
    write_bytes_atomically(out_dir / f"{name}.samples.jsonl", samples)
    text = json.dumps(result.model_dump(mode="json"), indent=1)
    write_bytes_atomically(out_dir / f"{name}.json", (text + "\n").encode())
    shutil.rmtree(replies, ignore_errors=True)
    return result


def _list_words(job: HarnessJob) -> list[str]:
    """Return the words of `lm_eval run` that are the same at each start."""
    settings, (shots, budget) = job.settings, job.protocol
    words = ["--model", "strop-hf" if job.engine == "hf" else "strop-server", "--tasks", job.task]
    words += ["--batch_size", "8" if job.engine == "hf" else "1"]
    words += [] if shots is None else ["--num_fewshot", str(shots)]
    words += [] if budget is None else ["--gen_kwargs", f"max_gen_toks={budget}"]
    words += [] if job.num_examples is None else ["--limit", str(job.num_examples)]
    words += [] if settings.include is None else ["--include_path", str(locate_named(settings.include))]
    words += ["--confirm_run_unsafe_code"] if job.may_run_code else []
    return [*words, *settings.arguments, "--seed", str(settings.seed)]


def _model_arguments(job: HarnessJob) -> dict[str, Any]:
    """Return the arguments of lm-eval's class for the engine."""
    settings = job.settings
    if job.engine == "hf":
        own: dict[str, Any] = {"pretrained": str(job.model_path), "dtype": job.dtype}
        own |= {"max_length": settings.max_model_tokens} if settings.max_model_tokens else {}
        own |= {"parallelize": True} if settings.tensor_parallel > 1 else {}
    else:
        own = {
            "model": job.served_name,
            "base_url": f"{(job.url or '').rstrip('/')}/completions",
            "tokenizer": str(job.model_path),
            "tokenizer_backend": "huggingface",
            # lm-eval leaves the last one to the generated token of a likelihood.
            "max_length": job.max_positions,
            "num_concurrent": NUM_CONCURRENT,
            "seed": settings.seed,
            # As lm-eval's `hf` does; a chat template begins the prompt itself.
            "add_bos_token": "--apply_chat_template" not in settings.arguments,
        }
    further = {} if job.engine == "vllm" else _further_arguments(job)
    if repeated := sorted((own.keys() - {"num_concurrent", "add_bos_token"}) & further.keys()):
        raise ConfigError(
            f"harness.model_args with {', '.join(repeated)}",
            allowed="names that no setting stands for",
            next_step="use the other settings of harness, and model.dtype",
        )
    return own | further


def _further_arguments(job: HarnessJob) -> dict[str, str]:
    """Parse `harness.model_args`. Raises: ConfigError for a key."""
    pairs = [pair.partition("=") for pair in filter(None, (job.settings.model_args or "").split(","))]
    names = {name.strip(): value.strip() for name, _, value in pairs}
    if secret := sorted(_KEYS & names.keys()):
        raise ConfigError(
            f"harness.model_args with {', '.join(secret)}",
            allowed=f"a key in the variable {KEY_VARIABLE}: others can read a command line",
            next_step="remove it, and set the variable",
        )
    return names


def _vllm_words(job: HarnessJob) -> list[str]:
    """Return the words of vLLM's server that are the same at each start; none for another engine."""
    if job.engine != "vllm":
        return []
    settings, gpus = job.settings, read_gpus()
    words = ["--model", str(job.model_path), "--dtype", job.dtype, "--seed", str(settings.seed)]
    # Not what a model's generation_config.json says of sampling.
    words += ["--generation-config", "vllm", "--max-model-len", str(job.max_positions)]
    if gpus:
        words += ["--tensor-parallel-size", str(settings.tensor_parallel)]
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        num_gpus = len(gpus) if visible is None else len([name for name in visible.split(",") if name])
        words += ["--data-parallel-size", str(max(1, num_gpus // settings.tensor_parallel))]
    else:
        # vLLM's own default on a CPU is nine tenths of the machine's memory.
        words += ["--kv-cache-memory-bytes", str(CPU_KV_CACHE_BYTES), "--enforce-eager"]
    if settings.gpu_memory_frac is not None:
        words += ["--gpu-memory-utilization", str(settings.gpu_memory_frac)]
    for name, value in _further_arguments(job).items():
        words += [f"--{name.replace('_', '-')}", *([] if value.lower() == "true" else [value])]
    return words


@contextmanager
def _serving(job: HarnessJob, name: str, out_dir: Path) -> Iterator[HarnessJob]:
    """Start vLLM's server if it is the engine; yield the job with its address. Raises: EngineError."""
    if job.engine != "vllm":
        yield job
        return
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    # A name that no server of another user answers to.
    served = replace(job, url=f"http://127.0.0.1:{port}/v1", served_name=secrets.token_hex(8))
    words = [str(job.vllm_python), "-m", "vllm.entrypoints.openai.api_server", *_vllm_words(job)]
    words += ["--host", "127.0.0.1", "--port", str(port), "--served-model-name", served.served_name]
    variables = _list_variables(job) | {"VLLM_API_KEY": served.served_name}
    child = spawn(words, out_dir / f"{name}.vllm.log", variables)
    try:
        deadline = time.monotonic() + _START_LIMIT_S
        while child.poll() is None and time.monotonic() < deadline:
            with suppress(EngineError):
                if served.served_name in _list_served(str(served.url), served.served_name):
                    break
            time.sleep(_POLL_S)
        else:
            raise EngineError(
                f"vLLM's server did not start on {job.model_path}: {child.tail(5)}",
                allowed="a model that vLLM loads, and memory for it",
                next_step=f"read {child.log_path}",
            )
        yield served
    finally:
        terminate(child, _GRACE_S)


def _list_variables(job: HarnessJob) -> dict[str, str]:
    """Return the environment variables of lm-eval and vLLM."""
    variables = {**os.environ, **KEEP_BYTECODE}
    if job.threads is not None:
        variables["OMP_NUM_THREADS"] = str(job.threads)
    # lm-eval sends this variable to any server; the user's value is for another one.
    variables.pop("OPENAI_API_KEY", None)
    key = job.served_name if job.engine == "vllm" else variables.get(KEY_VARIABLE)
    if key is not None:
        variables["OPENAI_API_KEY"] = key
    if is_offline():
        variables |= dict.fromkeys(("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "HF_EVALUATE_OFFLINE"), "1")
    return variables | ({"HF_ALLOW_CODE_EVAL": "1"} if job.may_run_code else {})


def _wait(child: ChildProcess, task: str) -> None:
    """Wait for lm-eval. Raises: EngineError if it fails."""
    try:
        while child.wait(_POLL_S) is None:
            pass
    finally:
        terminate(child, _GRACE_S)
    if exit_code := child.poll():
        raise EngineError(
            f"lm-eval ended with {exit_code} on {task}: {child.tail(5)}",
            allowed="a run that ends with 0",
            next_step=f"read {child.log_path}",
        )


def read_output(out_dir: Path, job: HarnessJob, digest: str, ends_path: Path) -> tuple[HarnessResult, bytes]:
    """Read what lm-eval wrote about one task, group or tag; return the result and all samples.

    `ends_path`: how replies ended, as `lm_eval_models` writes it.
    Raises: CorruptRecord if a file or a number is missing, or other shots were shown than asked for.
    """
    tokenizer = Tokenizer.load(job.model_path)
    samples, parts, hashes = [], {}, []
    budgets: list[int] = []
    keys: list[str] = []
    num_cut = 0
    try:
        (path,) = out_dir.glob("*/results_*.json")
        content = json.loads(path.read_bytes())
        for name, config in content["configs"].items():
            (path,) = out_dir.glob(f"*/samples_{name}_*.jsonl")
            samples.append(path.read_bytes())
            # Filters share the samples of a row.
            rows = {row["doc_id"]: row for row in map(json.loads, samples[-1].splitlines())}
            parts[name] = HarnessPart(num_examples=len(rows), metrics=_read_metrics(content["results"][name]))
            hashes.append(sorted(str(row.get("doc_hash")) for row in rows.values()))
            shots, num_rows = int(content["n-shot"][name]), int(content["n-samples"][name]["effective"])
            if job.protocol[0] not in {None, shots} or num_rows != len(rows):
                raise ValueError(f"{name} has {shots} shots and {len(rows)} of {num_rows} samples")
            budget, settings = 0, config.get("generation_kwargs") or {}
            if config.get("output_type") == "generate_until":
                budget = int(settings.get("max_gen_toks", DEFAULT_REPLY_TOKENS))
                budgets.append(budget)
                asked = [words.values() for row in rows.values() for words in row["arguments"].values()]
                # lm-eval's own key of a request.
                texts = [json.dumps(["generate_until", *one]) for one in asked]
                keys += [hashlib.sha256(text.encode()).hexdigest() for text in texts]
            elif all(float(answer[0][0]) == 0.0 for row in rows.values() for answer in row["resps"]):
                # A server without `echo`; lm-eval takes missing ones for certainty.
                raise ValueError(f"the engine gave no log-probabilities of the choices of {name}")
            room = job.max_positions - budget
            prompts = [str(row["arguments"]["gen_args_0"]["arg_0"]) for row in rows.values()]
            num_cut += sum(len(tokenizer.encode(prompt)) > room for prompt in prompts)
        told = ends_path.read_text("ascii") if ends_path.exists() else ""
        ends = {key: int(is_cut) for key, is_cut in re.findall("^([0-9a-f]{64}) ([01])$", told, re.M)}
        first = next(iter(content["configs"].values()))
        is_group = len(parts) > 1
        whole = content["results"].get(job.task, {}) if is_group else content["results"][next(iter(parts))]
        result = HarnessResult(
            harness=LM_EVAL.name,
            task=job.task,
            step=job.step,
            model_digest=job.model_digest,
            dtype=None if job.engine == "server" else job.dtype,
            seed=job.settings.seed,
            engine=job.engine,
            arguments=job.arguments,
            plan=digest,
            task_version=", ".join(sorted({str(content["versions"][name]) for name in parts})),
            num_examples=sum(part.num_examples for part in parts.values()),
            data_digest=hashlib.sha256(json.dumps(hashes).encode()).hexdigest()[:16],
            num_fewshot=max(int(content["n-shot"][name]) for name in parts),
            max_reply_tokens=max(budgets, default=None),
            stops=tuple((first.get("generation_kwargs") or {}).get("until", ())),
            metrics=_read_metrics(whole),
            parts=parts if is_group else {},
            truncated_frac=fmean(ends[key] for key in keys) if keys and ends.keys() >= set(keys) else None,
            num_cut_prompts=num_cut,
        )
    except (OSError, ValueError, KeyError, TypeError, IndexError, StopIteration) as error:
        raise CorruptRecord(
            f"lm-eval's output on {job.task} is not what it should be ({type(error).__name__}: {error})",
            allowed="results and samples of all its tasks, with as many shots as asked for",
            next_step="correct the number of shots if the task allows no other; else remove lm-eval's"
            " environment and start the same command again",
        ) from error
    return result, b"".join(samples)


def _read_metrics(numbers: Mapping[str, Any]) -> dict[str, HarnessMetric]:
    metrics = {}
    for key, value in numbers.items():
        if "," in key and "_stderr," not in key and isinstance(value, int | float):
            stderr = numbers.get(key.replace(",", "_stderr,", 1))
            known = float(stderr) if isinstance(stderr, int | float) else None
            metrics[key] = HarnessMetric(value=value, stderr=known)
    return metrics
