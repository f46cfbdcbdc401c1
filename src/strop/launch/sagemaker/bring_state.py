"""Where a start goes on from: the checkpoint directory or the run's mirror, whichever is newer.

The platform copies the checkpoint directory when it likes; the mirror is the run's own. After a reclaim
without a warning either may be ahead.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from strop.errors import ConfigError, StoreError
from strop.launch.sagemaker.state_keeper import Restored, find_newest_step, restore_state
from strop.store.policy import URI_VARIABLE
from strop.store.uris import join_uri


def bring_state(
    checkpoint_path: Path, home: Path, job_name: str, *, reaches_store: bool, parent: str = ""
) -> Restored:
    """Bring the newest state into a run's directory, and say from where, or why there is none.

    `parent`: the job that this one goes on after; its mirror may be ahead of what the platform had copied.

    Raises: OSError if the disk fails.
    """
    if not reaches_store:
        return restore_state(checkpoint_path, home)
    newest = find_newest_step(checkpoint_path)
    places = {_mirror_uri(home, name): name == job_name for name in (parent, job_name) if name}
    try:
        # Its own first: it is ahead of the other one as soon as it has anything.
        for uri, is_own in reversed(places.items()):
            if uri is not None and (found := _bring_mirror(uri, home, newest, is_own=is_own)) is not None:
                return found
    except StoreError as error:
        # What is in the checkpoint directory is enough; a store that fails now may answer later.
        kept = restore_state(checkpoint_path, home)
        return Restored(step=kept.step, reason=f"{kept.reason}; the mirror was not asked: {error}")
    return restore_state(checkpoint_path, home)


def _bring_mirror(uri: str, home: Path, newest: int | None, *, is_own: bool) -> Restored | None:
    from strop.record.mirror.claim import LATEST_NAME
    from strop.record.mirror.restore import find_remote_run, restore_run
    from strop.store.s3_objects import S3Objects

    remote = find_remote_run(uri)
    if remote is None:
        return None
    if remote.step is None:
        if newest is None and is_own:
            # An earlier start claimed it and was lost before its first checkpoint. The run begins anew, as
            # another one, which the claim would refuse; there is nothing that it protects.
            S3Objects().remove(join_uri(uri, LATEST_NAME))
        return None
    if newest is not None and newest >= remote.step:
        return None
    incoming = home.with_name(f"{home.name}.mirror")
    shutil.rmtree(incoming, ignore_errors=True)
    restored = restore_run(uri, incoming.parent, name=incoming.name)
    # What earlier starts wrote of themselves stays in the store: here it could be taken for this one's.
    shutil.rmtree(restored / "attempts", ignore_errors=True)
    shutil.copytree(restored, home, dirs_exist_ok=True, symlinks=True)
    shutil.rmtree(restored)
    known = "no state" if newest is None else f"step {newest}"
    return Restored(
        step=remote.step, reason=f"the mirror {uri} has step {remote.step}; the checkpoint directory {known}"
    )


def _mirror_uri(home: Path, job_name: str) -> str | None:
    """Return where the trainer will mirror the run to; None: nowhere."""
    from strop.spec import load_spec

    try:
        store = load_spec(home / "job" / "spec.toml").spec.store
    except ConfigError:
        return None  # The trainer says it better.
    root = store.uri or os.environ.get(URI_VARIABLE, "")
    if store.mirror is False or not root.startswith("s3://"):
        return None
    return join_uri(root, "checkpoints", store.mirror_as or job_name)
