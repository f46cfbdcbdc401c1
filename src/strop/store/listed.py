"""Directories in S3 that another tool filled, such as `aws s3 sync`: read if a listing proves them complete.

They have no COMPLETE. Instead, the index of the weights names every shard, each shard's header gives its
length, the names of numbered files give their count, and the state of an Arrow directory names its files.
The bytes are those of the listing: files are fetched under its ETags, compared with ETags that are made of
MD5s, and listed again at the end. A notice tells the user of it, because nothing can show that a file which
no other file mentions was left out. The local copy is a record like any other.
Not here: unfinished records of strop itself, whose objects carry digests. They are refused.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from strop.errors import CorruptRecord, RemoteMissing, StoreError
from strop.io.atomic import (
    explain_write_failure,
    fsync_directory,
    is_complete,
    publish_directory,
    read_manifest,
    seal_directory,
    verify_directory,
)
from strop.io.leftovers import partial_path_of, remove_leftovers
from strop.io.lock import FileLock
from strop.io.notices import tell
from strop.store.contract import StoredObject
from strop.store.model_files import MODEL_SUFFIXES, WEIGHTS_INDEX, read_weights_index
from strop.store.record_store import INCOMING_SUFFIX, side_by_side
from strop.store.s3_objects import S3Objects
from strop.store.uris import join_uri, normalize_uri

Files = Mapping[str, StoredObject]
"""The listed objects of the wanted files, by name."""
_VERSIONS = "versions"
"""The fact of a local copy with the ETags that it was fetched under."""
_NUMBERED = re.compile(r"(?P<stem>.*?)\d{5}-of-(?P<total>\d{5})(?P<end>\.[\w.]+)")
"""Shards of a data set, counted from 0."""
_LENGTH_BYTES = 8
"""A safetensors file begins with the length of its header. Source: the format's README."""
_METADATA = "__metadata__"
_MAX_HEADER_BYTES = 100 << 20
ARROW_END = b"\x00\x00\x00\x00"
"""An Arrow stream ends in an empty message. Source: 'Encapsulated message format' of Arrow."""
_PARQUET_END = b"PAR1"


def fetch_listed_model(uri: str, path: Path) -> None:
    """Fetch a model without COMPLETE if its listing proves it complete, and give a notice.

    Raises: RemoteMissing naming the missing files; CorruptRecord as `_fetch`; StoreErrors as `Store.get`.
    """
    objects = S3Objects()
    files = list_files(objects, uri, lambda name: "/" not in name and Path(name).suffix in MODEL_SUFFIXES)
    if not files:
        raise _not_proven(uri, ["config.json"], files)
    if not _has_copy(path, files):
        _refuse_unfinished(objects, uri, files)
        _require_model(objects, uri, files)
        _fetch(objects, uri, path, files)
    tell(_describe(uri, files))


def fetch_listed_data(uri: str, path: Path, *, name: str | None = None, is_checked: bool = True) -> None:
    """Fetch data without COMPLETE, one file of a directory or all of it, and give a notice.

    `is_checked`: refuse a record that strop began to send and did not finish.
    Raises: like `fetch_listed_model`.
    """
    objects = S3Objects()
    files = list_files(objects, uri, lambda _: True)
    if not files or (name is not None and name not in files):
        raise _not_proven(uri, [name or "a file"], files)
    missing = _missing_numbers(files if name is None else [*_siblings(name, files)])
    if name is None:
        missing += _missing_of_arrow(objects, uri, files)
    if missing:
        raise _not_proven(uri, missing, files)
    files = files if name is None else {name: files[name]}
    if not _has_copy(path, files):
        if is_checked:
            _refuse_unfinished(objects, uri, files)
        _fetch(objects, uri, path, files)
    tell(_describe(uri, files))


def list_files(objects: S3Objects, uri: str, is_wanted: Callable[[str], bool]) -> dict[str, StoredObject]:
    """Return the objects below a URI by their names there."""
    root = normalize_uri(uri)
    listing = {stored.uri.removeprefix(f"{root}/"): stored for stored in objects.list(uri)}
    return {name: stored for name, stored in sorted(listing.items()) if is_wanted(name)}


def _require_model(objects: S3Objects, uri: str, files: Files) -> None:
    """Refuse a listing that lacks a file of a model, or has a shard whose length its header contradicts."""
    missing = [] if "config.json" in files else ["config.json"]
    if "tokenizer.json" not in files and "tokenizer.model" not in files:
        missing.append("tokenizer.json")
    tensors: dict[str, str] = {}
    weights = [name for name in files if name.endswith(".safetensors")]
    if WEIGHTS_INDEX in files:
        place = join_uri(uri, WEIGHTS_INDEX)
        tensors = read_weights_index(objects.read(place), place)
        weights = sorted(set(tensors.values()))
        missing += [name for name in weights if name not in files]
    elif not weights:
        missing.append("weights (*.safetensors)")
    elif any(_NUMBERED.fullmatch(name) for name in weights):
        missing.append(f"{WEIGHTS_INDEX}, which names the shards")
    if missing:
        raise _not_proven(uri, missing, files)
    headers = dict(
        zip(weights, side_by_side(lambda name: _read_header(objects, files[name]), weights), strict=True)
    )
    absent = sorted({shard for tensor, shard in tensors.items() if tensor not in headers[shard]})
    if absent:
        raise _not_proven(uri, [f"tensors in {', '.join(absent)} that {WEIGHTS_INDEX} names"], files)


def _read_header(objects: S3Objects, stored: StoredObject) -> frozenset[str]:
    """Return the names of the tensors of a safetensors file.

    Raises: CorruptRecord if there is none, or the file is not as long as its header says.
    """
    try:
        num_bytes = int.from_bytes(objects.read_part(stored, 0, _LENGTH_BYTES), "little")
        if num_bytes > min(stored.size_bytes, _MAX_HEADER_BYTES):
            raise ValueError(f"a header of {num_bytes} bytes")
        header = json.loads(objects.read_part(stored, _LENGTH_BYTES, num_bytes))
        ends = {name: int(entry["data_offsets"][1]) for name, entry in header.items() if name != _METADATA}
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise _damaged(stored, f"its header cannot be read ({error})") from error
    promised = _LENGTH_BYTES + num_bytes + max(ends.values(), default=0)
    if promised != stored.size_bytes:
        raise _damaged(stored, f"its header promises {promised} bytes, and {stored.size_bytes} are there")
    return frozenset(ends)


def _siblings(name: str, names: Iterable[str]) -> Iterable[str]:
    """Return the files of the same numbered series as `name`, itself included."""
    match = _NUMBERED.fullmatch(name)
    if match is None:
        return [name]
    others = ((one, _NUMBERED.fullmatch(one)) for one in names)
    return [one for one, other in others if other is not None and other["stem"] == match["stem"]]


def _missing_numbers(names: Iterable[str]) -> list[str]:
    """Return the missing files of numbered series such as train-00000-of-00002.parquet."""
    known = set(names)
    missing = set()
    for match in filter(None, map(_NUMBERED.fullmatch, known)):
        begin, end = match["stem"], match["end"]
        numbers = (f"{index:05d}-of-{match['total']}" for index in range(int(match["total"])))
        missing |= {f"{begin}{number}{end}" for number in numbers} - known
    return sorted(missing)


def _missing_of_arrow(objects: S3Objects, uri: str, files: Files) -> list[str]:
    """Return the missing files that `state.json` and `dataset_dict.json` of Arrow directories name."""
    missing = []
    for name in files:
        folder, slash, file = name.rpartition("/")
        if file not in ("state.json", "dataset_dict.json"):
            continue
        try:
            content = json.loads(objects.read(join_uri(uri, name)))
            if file == "state.json":
                entries = [entry["filename"] for entry in content.get("_data_files", ())]
            else:
                entries = [f"{split}/state.json" for split in content["splits"]]
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise _damaged(files[name], f"it cannot be read ({error})") from error
        missing += [path for entry in entries if (path := f"{folder}{slash}{entry}") not in files]
    return missing


def _refuse_unfinished(objects: S3Objects, uri: str, files: Files) -> None:
    """Refuse a record that strop began to send: its COMPLETE is still to come."""
    heads = side_by_side(lambda name: objects.digest(files[name].uri), files)
    if any(digest is not None for digest in heads):
        raise RemoteMissing(
            f"{uri} is no complete record: it has objects that strop sent, and no COMPLETE",
            allowed="a record that was sent whole, whose COMPLETE came last",
            next_step="go on sending it with `strop stage RUN.toml`",
        )


def _has_copy(path: Path, files: Files) -> bool:
    """Whether the local copy has exactly these files, undamaged."""
    if not is_complete(path) or read_manifest(path).facts.get(_VERSIONS) != _versions_of(files):
        return False
    try:
        verify_directory(path, can_trust_mtime=True)
    except StoreError:
        return False  # Damaged since; fetched again.
    return True


def _versions_of(files: Files) -> dict[str, str]:
    return {name: stored.version for name, stored in files.items()}


def _fetch(objects: S3Objects, uri: str, path: Path, files: Files) -> None:
    """Fetch files under the ETags of a listing, list once more, and seal them.

    Raises: CorruptRecord if a file differs between two fetches, or is cut; StoreError if one changes
        meanwhile.
    """
    versions = _versions_of(files)
    path.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(path.with_name(f"{path.name}.lock")):
        remove_leftovers(path.parent)
        if _has_copy(path, files):
            return  # Another process was faster.
        key = hashlib.sha256(json.dumps(versions, sort_keys=True).encode()).hexdigest()[:8]
        incoming = path.with_name(f"{path.name}-{key}{INCOMING_SUFFIX}")
        for left in path.parent.glob(f"{path.name}-????????{INCOMING_SUFFIX}"):
            if left != incoming:
                # Left by a fetch of earlier content.
                shutil.rmtree(left, ignore_errors=True)
        # A file appears when it is complete, so those of an interrupted call are kept.
        names = [
            name
            for name, stored in files.items()
            if not ((copy := incoming / name).is_file() and copy.stat().st_size == stored.size_bytes)
        ]
        side_by_side(lambda name: _fetch_file(objects, files[name], incoming / name), names)
        for name in files:
            _require_end(incoming / name, files[name])
        if _versions_of(list_files(objects, uri, versions.__contains__)) != versions:
            raise StoreError(
                f"{uri} changed while it was read: somebody still sends to it",
                allowed="a directory that nobody writes to meanwhile",
                next_step="start the same command again when the sender is done",
            )
        try:
            seal_directory(incoming, facts={"uri": uri, _VERSIONS: versions})
            publish_directory(incoming, path, replace=True)
            fsync_directory(path.parent)
        except OSError as error:
            raise explain_write_failure(error, path) from error


def _fetch_file(objects: S3Objects, stored: StoredObject, path: Path) -> None:
    """Fetch one file; if its ETag does not prove the content, fetch it twice and require equal digests."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial_path = partial_path_of(path)
    try:
        sha256 = objects.download(stored, partial_path, None)
        if not objects.is_proven(stored, partial_path):
            objects.download(stored, partial_path, sha256)
        partial_path.replace(path)
    except OSError as error:
        raise explain_write_failure(error, path) from error
    finally:
        partial_path.unlink(missing_ok=True)


def _require_end(path: Path, stored: StoredObject) -> None:
    """Refuse an Arrow or Parquet file that was cut before it was sent."""
    end = {".arrow": ARROW_END, ".parquet": _PARQUET_END}.get(path.suffix)
    if end is None:
        return
    with path.open("rb") as file:
        file.seek(max(0, stored.size_bytes - len(end)))
        if file.read() != end:
            raise _damaged(stored, "it ends before its last row")


def _describe(uri: str, files: Files) -> str:
    size = sum(stored.size_bytes for stored in files.values())
    return (
        f"{uri} has no COMPLETE: another tool filled it. Its listing names all {len(files)} files that are"
        f" needed ({size / 1e6:.1f} MB), and they were fetched as listed"
    )


def _not_proven(uri: str, missing: list[str], files: Files) -> RemoteMissing:
    shown = ", ".join(missing[:5]) + (f" and {len(missing) - 5} more" if len(missing) > 5 else "")
    cause = (
        f"{uri} is no complete record and cannot be proven whole: {shown} missing"
        if files
        else f"{uri} is not in the store"
    )
    return RemoteMissing(
        cause,
        allowed="a record that was sent whole, whose COMPLETE came last; or a directory whose listing names"
        " all that belongs to it",
        next_step="send what is missing, for example with `aws s3 sync`, or all with `strop stage RUN.toml`",
    )


def _damaged(stored: StoredObject, cause: str) -> CorruptRecord:
    return CorruptRecord(
        f"{stored.uri} was cut or damaged before it was sent: {cause}",
        allowed="a whole file",
        next_step="send it again from where it is whole",
    )
