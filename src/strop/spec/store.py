"""Which store a run's models and data come from."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from strop.spec.base import Section


class StoreSpec(Section):
    """Where bytes are kept between machines. Not part of what was asked: not in the spec's digest."""

    uri: str | None = Field(
        default=None,
        min_length=1,
        description="Root of the store: s3://bucket/prefix, or a directory that starts with '/', '~' or '.'."
        " Models are looked for under models/ID in it, data sets under datasets/ID; `strop stage` puts them"
        " there. none = what STROP_STORE_URI says, else no store.",
    )
    order: Literal["store-first", "hub-first", "store-only"] = Field(
        default="store-first",
        description="Which source is asked first for hub ids. The other one is asked only for what the first"
        " one does not have; a store that fails is an error, and no reason to ask a hub. STROP_OFFLINE=1"
        " leaves the hub out, whatever the order.",
    )
