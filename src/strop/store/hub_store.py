"""A model hub as a store that is only read: `hf://org/name`, `hf://datasets/org/name`.

A snapshot is one commit of a repository, so it is whole by itself and needs no COMPLETE there; the
local copy gets one. All files of a repository come; `get_model` is choosier. Offline, what is in the
hub client's cache can still be had.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

from strop.errors import ConfigError, HubUnreachable, RemoteMissing, StoreError, explain_refusal
from strop.io.atomic import AtomicDirectory, FileRecord, Manifest, hash_files
from strop.io.leftovers import partial_path_of
from strop.store.contract import StoredObject, Transfer
from strop.store.hub import find_cached_file
from strop.store.policy import is_offline
from strop.store.uris import HubUri, parse_hub

T = TypeVar("T")


class HubStore:
    """Repositories of the hub that HF_ENDPOINT names."""

    def get(self, uri: str, path: Path, *, replace: bool = False) -> Transfer:
        """Download a snapshot or one file into the client's cache, and copy it to the path."""
        place = parse_hub(uri)
        found = _find_or_download(uri, place)
        if place.file is not None:
            return _copy_file(uri, found, path, replace=replace)
        writer = AtomicDirectory(path, facts={"uri": uri, "revision": found.name}, replace=replace)
        with writer as partial:
            shutil.copytree(found, partial, dirs_exist_ok=True)
        assert writer.manifest is not None
        return Transfer(uri=uri, manifest=writer.manifest, moved=tuple(writer.manifest.files))

    def put(self, path: Path, uri: str, *, facts: Mapping[str, Any] | None = None) -> Transfer:
        """Refuse: strop publishes nothing."""
        raise _read_only(uri)

    def sync(self, path: Path, uri: str, *, facts: Mapping[str, Any] | None = None) -> Transfer:
        """Refuse: strop publishes nothing."""
        raise _read_only(uri)

    def list(self, uri: str) -> Iterator[StoredObject]:
        """Yield the files of a repository."""
        place = parse_hub(uri)
        if is_offline():
            raise offline_refusal(uri)
        from huggingface_hub import HfApi
        from huggingface_hub.hf_api import RepoFile

        def ask() -> list[Any]:
            tree = HfApi().list_repo_tree(
                place.repo, recursive=True, repo_type=_kind(place), revision=place.revision
            )
            return sorted((entry for entry in tree if isinstance(entry, RepoFile)), key=lambda one: one.path)

        for entry in ask_hub(uri, ask):
            yield StoredObject(
                uri=f"{uri.rstrip('/')}/{entry.path}", size_bytes=entry.size, version=entry.blob_id
            )

    def exists(self, uri: str) -> bool:
        """Whether the hub has the repository, or the file, and lets us read it."""
        place = parse_hub(uri)
        whole = uri if place.file is None else uri.removesuffix(f"/{place.file}")
        try:
            names = {stored.uri for stored in self.list(whole)}
        except RemoteMissing:
            return False
        return place.file is None or uri in names


def ask_hub(uri: str, action: Callable[[], T]) -> T:
    """Ask the hub's client, with its failures in strop's words.

    Raises: RemoteMissing if the hub answers that there is no such thing for us; HubUnreachable if it
        does not answer, or may not be asked.
    """
    from huggingface_hub import errors

    # Transport errors of its HTTP client, which need not be OSErrors.
    transport_error: type[Exception] = getattr(errors, "HTTPError", OSError)
    missing = (errors.RepositoryNotFoundError, errors.RevisionNotFoundError, errors.RemoteEntryNotFoundError)
    try:
        return action()
    except errors.LocalEntryNotFoundError as error:
        raise offline_refusal(uri) if is_offline() else _unreachable(uri, error) from error
    except missing as error:
        raise RemoteMissing(
            explain_refusal(
                f"{uri} cannot be had: the hub has no such repository, revision or file for us",
                allowed="an existing id and file",
                next_step="check the spelling, or set HF_TOKEN if it is private or gated",
            )
        ) from error
    except errors.HFValidationError as error:
        raise ConfigError(
            explain_refusal(
                f"{uri} is no name on a hub ({error})", allowed="org/name", next_step="correct the name"
            )
        ) from error
    except (transport_error, OSError) as error:
        raise _unreachable(uri, error) from error


def offline_refusal(uri: str) -> HubUnreachable:
    """Build the error for what is not here while no hub may be asked."""
    return HubUnreachable(
        explain_refusal(
            f"{uri} is not in the hub client's cache, and offline mode forbids to ask the hub",
            allowed="what is in that cache, in the store, or on this disk",
            next_step="run `strop stage RUN.toml` where the hub can be reached, or unset STROP_OFFLINE"
            " and HF_HUB_OFFLINE",
        )
    )


def _unreachable(uri: str, error: Exception) -> HubUnreachable:
    cause = " ".join(str(error).split())[:200]
    return HubUnreachable(
        explain_refusal(
            f"{uri} cannot be had: the hub did not give it ({type(error).__name__}: {cause})",
            allowed="a hub that answers, or a copy in its client's cache, the store or on this disk",
            next_step="connect, set HF_ENDPOINT to a mirror, or name a local copy",
        )
    )


def _find_or_download(uri: str, place: HubUri) -> Path:
    from huggingface_hub import hf_hub_download, snapshot_download

    file, kind = place.file, _kind(place)
    if file is None:
        return Path(
            ask_hub(
                uri,
                lambda: snapshot_download(
                    place.repo, repo_type=kind, revision=place.revision, local_files_only=is_offline()
                ),
            )
        )
    cached = find_cached_file(place.repo, file, place.revision, is_dataset=place.is_dataset)
    if cached is not None:
        return cached
    if is_offline():
        raise offline_refusal(uri)
    return Path(
        ask_hub(uri, lambda: hf_hub_download(place.repo, file, repo_type=kind, revision=place.revision))
    )


def _kind(place: HubUri) -> str:
    return "dataset" if place.is_dataset else "model"


def _copy_file(uri: str, found: Path, path: Path, *, replace: bool) -> Transfer:
    if path.exists() and not replace:
        raise StoreError(
            explain_refusal(
                f"{path} exists already", allowed="a name that is free", next_step="choose another name"
            )
        )
    partial_path = partial_path_of(path)
    shutil.copyfile(found, partial_path)
    os.replace(partial_path, path)
    stat = path.stat()
    sha256 = hash_files(path.parent, [path.name])[path.name]
    record = FileRecord(size_bytes=stat.st_size, sha256=sha256, mtime_ns=stat.st_mtime_ns)
    return Transfer(uri=uri, manifest=Manifest(files={path.name: record}), moved=(path.name,))


def _read_only(uri: str) -> StoreError:
    return StoreError(
        explain_refusal(
            f"{uri} cannot be written: strop publishes nothing on a hub",
            allowed="a place such as s3://bucket/prefix, or a directory",
            next_step="send it there; `huggingface-cli upload` publishes",
        )
    )
