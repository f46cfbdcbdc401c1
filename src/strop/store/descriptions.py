"""The description of a model without its weights: config.json, tokenizer, chat template.

A plan needs no more. `fetch_description` fetches only these files from the store or the hub, in the policy's
order, into a separate folder of the user's cache: half a model in the hub client's cache would look like a
model.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from functools import partial
from pathlib import Path

from strop.errors import ConfigError, HubUnreachable, RemoteMissing, StoreError
from strop.io.variables import user_cache_dir
from strop.store.hub import ask_hub, find_cached_file, has_cached, offline_refusal, probe_hub
from strop.store.model_files import WEIGHTS_INDEX
from strop.store.models import HUB_PATTERN
from strop.store.opening import open_store
from strop.store.policy import is_offline, read_policy
from strop.store.uris import join_uri

CONFIG = "config.json"
_OTHERS = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")
DESCRIPTION_FILES = (CONFIG, *_OTHERS, "generation_config.json", WEIGHTS_INDEX)


def find_description(uri: str, cache_dir: Path | None = None) -> Path | None:
    """Return a local folder with a model's config.json, from an earlier fetch or the hub's client, or None.

    Uses no network.
    """
    path = _place(uri, cache_dir or user_cache_dir())
    if (path / CONFIG).is_file():
        return path
    match = HUB_PATTERN.match(uri)
    if match is None or not read_policy().asks_hub or not has_cached(match["repo"]):
        return None
    found = find_cached_file(match["repo"], CONFIG, match["revision"], is_dataset=False)
    return None if found is None else found.parent


def fetch_description(uri: str) -> Path:
    """Fetch the files that describe a model, without its weights, and return their folder.

    Raises: ConfigError for a name that neither a store nor a hub can have; RemoteMissing if no allowed source
        has config.json; HubUnreachable and other StoreErrors if one fails.
    """
    path = _place(uri, user_cache_dir())
    policy, match = read_policy(), HUB_PATTERN.match(uri)
    if uri.startswith("s3://"):
        return _fetch(path, partial(_from_store, uri))
    if match is None:
        raise ConfigError(
            f"{uri} is no model of a store or a hub, so there is nothing to fetch",
            allowed="a hub id org/name[@revision] or s3://bucket/path",
            next_step="leave --fetch out",
        )
    repo, revision = match["repo"], match["revision"]
    sources: list[Callable[[str, Path], None]] = [
        partial(_from_store, place) for place in policy.model_uris(repo, revision)
    ]
    if policy.asks_hub:
        sources.insert(
            len(sources) if policy.asks_store_first else 0,
            partial(_from_hub, repo, revision),
        )
    for fetch in sources[:-1]:
        try:
            return _fetch(path, fetch)
        except (RemoteMissing, HubUnreachable):
            continue
    return _fetch(path, sources[-1])


def _fetch(path: Path, fetch: Callable[[str, Path], None]) -> Path:
    """Put config.json in place last: a folder that has it is complete."""
    path.mkdir(parents=True, exist_ok=True)
    incoming = path / f"{CONFIG}.incoming"
    fetch(CONFIG, incoming)
    for name in DESCRIPTION_FILES[1:]:
        try:
            fetch(name, path / name)
        except RemoteMissing:
            continue
    incoming.replace(path / CONFIG)
    return path


def _from_store(uri: str, name: str, target: Path) -> None:
    store = open_store(uri)
    if store.find_manifest(uri) is not None:
        store.get_file(uri, name, target)
    else:
        store.get(join_uri(uri, name), target, replace=True)


def _from_hub(repo: str, revision: str | None, name: str, target: Path) -> None:
    if is_offline():
        raise offline_refusal(f"{repo}/{name}")
    from huggingface_hub import constants, hf_hub_download

    if name == CONFIG:
        probe_hub(constants.ENDPOINT, repo)
    with_client = target.parent / "hub"
    found = Path(
        ask_hub(
            f"{repo}/{name}", lambda: hf_hub_download(repo, name, revision=revision, local_dir=with_client)
        )
    )
    try:
        found.replace(target)
    except OSError as error:
        raise StoreError(
            f"{target} cannot be written ({error.strerror})",
            allowed="a cache directory that this user may write to",
            next_step="set STROP_CACHE to one",
        ) from error


def _place(uri: str, cache: Path) -> Path:
    """Return the folder of a model's files; sources with the same name have different folders."""
    match = HUB_PATTERN.match(uri)
    name = uri.rstrip("/").rpartition("/")[2].partition("@")[0]
    root = read_policy().root if match is not None else None
    key = hashlib.sha256(f"{root or ''} {uri.rstrip('/')}".encode()).hexdigest()[:8]
    return cache / "descriptions" / f"{name}-{key}"
