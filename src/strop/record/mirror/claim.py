"""`latest.json`: the owner of a run's mirror, which alone may write to it, and the newest checkpoint.

Every change of this object is conditional on its last version. An attempt that starts claims the mirror with
a higher fence than the last, and an attempt that sees another owner stops. So an attempt that was suspended,
taken for dead and wakes up cannot point back to its older checkpoint. No clock is used.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from typing import Any

from strop.errors import CheckRefused, CorruptRecord, MirrorFenced, StoreError
from strop.record.run_dir import RunState
from strop.store.record_store import RecordStore
from strop.store.uris import join_uri

LATEST_NAME = "latest.json"
NUM_CLAIM_ATTEMPTS = 5
"""Attempts to claim a mirror that others claim at the same moment."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunIdentity:
    """Distinguishes runs of the same name."""

    name: str
    spec_digest: str
    created_at: float

    @classmethod
    def of(cls, state: RunState) -> RunIdentity:
        """Return the identity of a run."""
        return cls(name=state.name, spec_digest=state.spec_digest, created_at=state.created_at)


@dataclass(frozen=True, kw_only=True, slots=True)
class Latest:
    """The content of latest.json."""

    run: RunIdentity
    fence: int
    """Larger with every claim, and never smaller than the owner's attempt number."""
    owner: str
    """Random id of one attempt of one process."""
    attempt: int
    """The owner's attempt number in its run directory."""
    step: int | None = None
    """Step of the newest checkpoint that was sent completely, with its URI; None: none yet."""
    uri: str | None = None
    digest: str | None = None
    """Digest of that record's manifest."""

    def to_bytes(self) -> bytes:
        """Return the JSON of latest.json."""
        return json.dumps(asdict(self), indent=1).encode()


def read_latest(store: RecordStore, uri: str) -> tuple[Latest, str] | None:
    """Return a mirror's latest.json with its version; None: nothing was ever mirrored there.

    Raises: CorruptRecord if it cannot be read.
    """
    place = join_uri(uri, LATEST_NAME)
    found = store.objects.read_versioned(place)
    if found is None:
        return None
    data, version = found
    try:
        content: dict[str, Any] = json.loads(data)
        return Latest(**{**content, "run": RunIdentity(**content["run"])}), version
    except (ValueError, KeyError, TypeError) as error:
        raise CorruptRecord(
            f"{place} cannot be read ({error})",
            allowed="the JSON that strop wrote",
            next_step="remove it if no run is mirrored there any more, or choose another store.mirror_as",
        ) from error


def claim_mirror(
    store: RecordStore, uri: str, run: RunIdentity, *, owner: str, attempt: int, is_late: bool = False
) -> Latest:
    """Make an attempt the owner of the run's mirror.

    `is_late`: the attempt began a while ago, so it does not replace an owner with its number or a later one.
    Raises: CheckRefused if another run is mirrored there; MirrorFenced; StoreErrors.
    """
    for _ in range(NUM_CLAIM_ATTEMPTS):
        found = read_latest(store, uri)
        if found is None:
            mine, version = Latest(run=run, fence=attempt, owner=owner, attempt=attempt), None
        else:
            latest, version = found
            if latest.run != run:
                raise CheckRefused(
                    f"{uri} is the mirror of another run: {latest.run.name}, spec"
                    f" {latest.run.spec_digest[:12]}, begun at {latest.run.created_at:.0f}",
                    allowed="a place of its own for each run",
                    next_step="set store.mirror_as to another name, or store.mirror=false",
                )
            if latest.owner == owner:
                return latest
            if is_late and latest.attempt >= attempt:
                raise _fenced(uri, latest)
            fence = max(attempt, latest.fence + 1)
            mine = replace(latest, fence=fence, owner=owner, attempt=attempt)
        if store.objects.write_if(join_uri(uri, LATEST_NAME), mine.to_bytes(), version):
            return mine
    raise StoreError(
        f"{uri} was claimed by others {NUM_CLAIM_ATTEMPTS} times in a row",
        allowed="one attempt of a run at a time",
        next_step="see who else trains this run, and end all attempts but one",
    )


def require_claim(store: RecordStore, uri: str, owner: str) -> tuple[Latest, str]:
    """Return the mirror's latest.json and its version if this attempt still owns it.

    Raises: MirrorFenced naming the newer attempt.
    """
    found = read_latest(store, uri)
    if found is not None and found[0].owner == owner:
        return found
    raise _fenced(uri, None if found is None else found[0])


def point_to(store: RecordStore, uri: str, owner: str, *, step: int, record_uri: str, digest: str) -> Latest:
    """Record the newest checkpoint in latest.json.

    Raises: MirrorFenced if another attempt has claimed the mirror in the meantime.
    """
    latest, version = require_claim(store, uri, owner)
    mine = replace(latest, step=step, uri=record_uri, digest=digest)
    if mine != latest and not store.objects.write_if(join_uri(uri, LATEST_NAME), mine.to_bytes(), version):
        require_claim(store, uri, owner)
        raise StoreError(
            f"{uri}/{LATEST_NAME} changed while it was written, and its owner did not",
            allowed="one uploader for an attempt",
            next_step="see whether two of them run; the next look repeats it",
        )
    return mine


def _fenced(uri: str, latest: Latest | None) -> MirrorFenced:
    if latest is None:
        state = "has no owner any more"
    else:
        state = f"belongs to attempt {latest.attempt}, fence {latest.fence}"
    return MirrorFenced(
        f"{uri} {state}: this attempt sends nothing more",
        allowed="the attempt that started last",
        next_step="end this attempt if the newer one is meant to live",
    )
