"""Which source of models and data is asked first, for this process and every process it starts.

The choice is in two environment variables, because tasks are built again in worker processes that never see
the run file: STROP_STORE_URI, the root of the store, and STROP_STORE_ORDER.
`follow_store` sets them from a run file for the length of a block.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import get_args

from strop.errors import ConfigError
from strop.io.variables import set_variables
from strop.spec import StoreSpec
from strop.store.uris import join_uri, require_known_scheme

URI_VARIABLE = "STROP_STORE_URI"
ORDER_VARIABLE = "STROP_STORE_ORDER"
OFFLINE_VARIABLES = ("STROP_OFFLINE", "HF_HUB_OFFLINE")
_TRUE_WORDS = frozenset({"1", "ON", "YES", "TRUE"})
ORDERS: tuple[str, ...] = get_args(StoreSpec.model_fields["order"].annotation)


@dataclass(frozen=True, kw_only=True, slots=True)
class SourcePolicy:
    """Where hub ids are looked for."""

    root: str | None
    """URI of the store; None: there is none."""
    order: str = "store-first"

    @property
    def asks_hub(self) -> bool:
        """Whether a hub may be asked at all."""
        return self.root is None or self.order != "store-only"

    @property
    def asks_store_first(self) -> bool:
        """Whether the store is asked before the hub."""
        return self.root is not None and self.order != "hub-first"

    def model_uri(self, name: str, revision: str | None = None) -> str | None:
        """Return where the store keeps a model of a hub, or None without a store."""
        return self._place("models", name if revision is None else f"{name}@{revision.replace('/', '--')}")

    def model_uris(self, name: str, revision: str | None = None) -> tuple[str, ...]:
        """Return all places where the store may keep a model of a hub: strop's own first, then models/NAME.

        Other launchers leave out the organisation and the revision, so a given revision is not there.
        """
        short = self._place("models", name.rpartition("/")[2]) if revision is None else None
        return tuple(filter(None, (self.model_uri(name, revision), short)))

    def dataset_uri(self, name: str) -> str | None:
        """Return where the store keeps a data set of a hub, or None without a store."""
        return self._place("datasets", name)

    def _place(self, kind: str, name: str) -> str | None:
        return None if self.root is None else join_uri(self.root, kind, name)


def is_offline(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether STROP_OFFLINE or HF_HUB_OFFLINE forbids every connection to a hub."""
    return any(environ.get(name, "").upper() in _TRUE_WORDS for name in OFFLINE_VARIABLES)


def read_policy() -> SourcePolicy:
    """Return the policy of this process.

    Raises: ConfigError if a variable has an invalid value.
    """
    root, order = os.environ.get(URI_VARIABLE) or None, os.environ.get(ORDER_VARIABLE) or ORDERS[0]
    if order not in ORDERS:
        raise ConfigError(
            f"{ORDER_VARIABLE}={order}", allowed=", ".join(ORDERS), next_step="correct the variable"
        )
    if root is not None:
        require_root(root)
    return SourcePolicy(root=root, order=order)


def require_root(root: str) -> None:
    """Refuse a root to which nothing can be sent.

    Raises: ConfigError.
    """
    require_known_scheme(root)
    if not root.startswith(("s3://", "/")):
        raise ConfigError(
            f"store.uri={root} is no root of a store",
            allowed="a place such as s3://bucket/prefix, or a directory that starts with '/', '~' or '.'",
            next_step=f"correct store.uri or {URI_VARIABLE}",
        )


def find_mirror_root(spec: StoreSpec) -> str | None:
    """Return the root of the store to which runs are mirrored, or None.

    Call it inside `follow_store`, so that STROP_STORE_URI counts too.
    Raises: ConfigError if store.mirror is true and there is no store.
    """
    root = read_policy().root
    if spec.mirror is False or (root is None and spec.mirror == "auto"):
        return None
    if root is None:
        raise ConfigError(
            "store.mirror=true, and there is no store",
            allowed="store.uri, or STROP_STORE_URI",
            next_step="name the store, or leave store.mirror out",
        )
    return root if spec.mirror is True or root.startswith("s3://") else None


@contextmanager
def follow_store(spec: StoreSpec) -> Iterator[SourcePolicy]:
    """Use a run file's store in this process and its children; without `uri`, the environment's.

    Raises: ConfigError if the root is invalid.
    """
    if spec.uri is None:
        yield read_policy()
        return
    require_root(spec.uri)
    with set_variables({URI_VARIABLE: spec.uri, ORDER_VARIABLE: spec.order}):
        yield read_policy()
