"""The files that make a directory a model, and a cheap stable digest of their bytes.

The digest is over names and SHA-256 of the files that determine the model's output: weights,
configuration, tokenizer, template. A README beside them does not change it.
"""

from __future__ import annotations

import hashlib
import json
from contextlib import suppress
from pathlib import Path

from strop.errors import ConfigError, CorruptRecord, StoreError
from strop.io.atomic import (
    digest_of_files,
    hash_files,
    is_complete,
    make_directory,
    verify_directory,
    write_bytes_atomically,
)

MODEL_SUFFIXES = frozenset({".safetensors", ".json", ".jinja", ".model", ".txt"})
WEIGHTS_INDEX = "model.safetensors.index.json"
_PARTS = {
    "configuration": ("config.json", "generation_config.json"),
    "chat template": ("chat_template.jinja", "chat_template.json"),
}
_OTHER_PART = "tokenizer"
"""All other files; `tokenizer_config.json` may hold the chat template as well."""
NEEDED_FILES = "config.json, tokenizer.json or tokenizer.model, and weights as *.safetensors"


def check_model_dir(path: Path) -> None:
    """Refuse a directory that transformers and vLLM could not load as it stands.

    Raises: ConfigError naming what is missing, such as a shard of the index; CorruptRecord for weights that
        are not as long as they say.
    """
    missing = []
    if not (path / "config.json").is_file():
        missing.append("config.json")
    if not (path / "tokenizer.json").is_file() and not (path / "tokenizer.model").is_file():
        missing.append("tokenizer.json")
    index_path = path / WEIGHTS_INDEX
    if index_path.is_file():
        shards = sorted(set(read_weights_index(index_path.read_bytes(), str(index_path)).values()))
        missing += [name for name in shards if not (path / name).is_file()]
    elif not any(path.glob("*.safetensors")):
        missing.append("weights (*.safetensors)")
    for weights in path.glob("*.safetensors"):
        _require_whole(weights)
    if missing:
        names = ", ".join(sorted(entry.name for entry in path.iterdir())[:8]) or "nothing"
        raise ConfigError(
            f"{path} is not a model directory: {', '.join(missing)} missing; found {names}",
            allowed=f"a Hugging Face model directory with {NEEDED_FILES}",
            next_step="point to the directory that holds config.json, or export the model again",
        )


def _require_whole(path: Path) -> None:
    """Refuse a safetensors file that is shorter or longer than its header says.

    Raises: CorruptRecord.
    """
    size_bytes = path.stat().st_size
    try:
        with path.open("rb") as file:
            # Eight bytes with the length of the header, then the header. Source: the format's README.
            num_bytes = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(min(num_bytes, size_bytes)))
        ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
        fault = "" if 8 + num_bytes + max(ends, default=0) == size_bytes else f"it has {size_bytes} bytes"
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        fault = f"its header cannot be read: {error}"
    if fault:
        raise CorruptRecord(
            f"{path} was cut short or damaged ({fault})",
            allowed="a safetensors file of the length that its header says",
            next_step="fetch or export the model again",
        )


def read_weights_index(data: bytes, place: str) -> dict[str, str]:
    """Return the file of each tensor. Raises: CorruptRecord naming `place` if it is no index."""
    try:
        return {str(tensor): str(file) for tensor, file in json.loads(data)["weight_map"].items()}
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise CorruptRecord(
            f"{place} is not an index of weights ({error})",
            allowed='a JSON object whose "weight_map" names the file of each tensor',
            next_step="fetch or export the model again",
        ) from error


def digest_model(path: Path, digest_dir: Path) -> str:
    """Return the digest of a model directory. Raises: like `hash_model`."""
    return digest_of_files(hash_model(path, digest_dir))


def digest_parts(path: Path, digest_dir: Path) -> dict[str, str]:
    """Return the digests of a model directory's parts, by part name. Raises: like `hash_model`."""
    parts: dict[str, dict[str, str]] = {part: {} for part in ("weights", *_PARTS, _OTHER_PART)}
    for name, sha256 in hash_model(path, digest_dir).items():
        is_weights = name.endswith(".safetensors") or name == WEIGHTS_INDEX
        other = next((part for part, names in _PARTS.items() if name in names), _OTHER_PART)
        parts["weights" if is_weights else other][name] = sha256
    return {part: digest_of_files(files) for part, files in parts.items()}


def hash_model(path: Path, digest_dir: Path) -> dict[str, str]:
    """Return the SHA-256 of a model directory's files by name; unchanged ones are not read a second time.

    File digests are remembered by size and times: in the directory's own manifest, else in `digest_dir`.

    Raises: CorruptRecord if the directory has a manifest and its bytes differ from it.
    """
    if is_complete(path):
        manifest = verify_directory(path, can_trust_mtime=True)
        # Folders are no part of the model, such as the adapters that were merged into it.
        return {
            name: record.sha256
            for name, record in manifest.files.items()
            if "/" not in name and _is_model_file(path / name)
        }
    memory_path = digest_dir / f"{hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:24]}.json"
    files = {entry.name: entry.stat() for entry in path.iterdir() if _is_model_file(entry)}
    # ctime too, because a copy may preserve the mtime.
    marks = {name: [stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns] for name, stat in files.items()}
    try:
        remembered = json.loads(memory_path.read_bytes())
        known = {
            name: remembered[name]["sha256"] for name in marks if remembered[name]["mark"] == marks[name]
        }
    except (OSError, ValueError, LookupError, TypeError):
        known = {}
    changed = hash_files(path, sorted(marks.keys() - known.keys()))
    digests = known | changed
    if changed:
        content = {name: {"mark": marks[name], "sha256": digests[name]} for name in marks}
        # With a read-only home the next start hashes again; that is no reason to stop this one.
        with suppress(StoreError):
            make_directory(memory_path.parent)
            write_bytes_atomically(memory_path, json.dumps(content).encode())
    return digests


def _is_model_file(path: Path) -> bool:
    return path.suffix in MODEL_SUFFIXES and path.is_file()
