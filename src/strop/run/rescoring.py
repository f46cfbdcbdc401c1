"""Judging what `strop eval` kept with a task as it is now."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from strop.errors import StoreError, explain_refusal
from strop.evaluate import Rescored, read_result, rescore, write_result
from strop.evaluate.shards import read_all_shards, read_plan, read_task_settings
from strop.record.shards import list_shards
from strop.rollout import Split
from strop.run.inference import Asking, hold_judge, read_asking
from strop.spec.display import dotted, format_value, walk_values
from strop.spec.overrides import parse_override
from strop.tasks import build_task


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredRescored:
    """Replies judged anew, and the file of the new result."""

    rescored: Rescored
    path: Path


def find_kept(place: Path) -> list[Path]:
    """Return the folders of replies that a path means: a result, a shard, or a folder around them.

    Raises: StoreError if there is none.
    """
    if place.is_file():
        folder = place.with_suffix("") if place.suffix == ".json" else place.parent
        folders = [folder] if list_shards(folder) else []
    elif place.is_dir():
        candidates = [place, *(path for path in place.rglob("*") if path.is_dir())]
        folders = sorted(path for path in candidates if list_shards(path))
    else:
        folders = []
    if not folders:
        raise StoreError(
            explain_refusal(
                f"{place} holds no replies of an evaluation",
                allowed="a result that `strop eval` wrote with its folder beside it, or a folder of such",
                next_step="evaluate a model with `strop eval`, whose replies are kept",
            )
        )
    return folders


def rescore_kept(folder: Path, words: Sequence[str]) -> StoredRescored:
    """Judge the replies in a folder with the task that they answer, some of its settings changed.

    The result is written beside the old one, under a name with the new version of the task.
    Raises: StoreError if replies are missing; CorruptRecord if they are damaged; ConfigError for
        settings that the task lacks; CheckRefused if the examples are not the task's any more.
    """
    plan, rollouts = read_all_shards(folder)
    asking = read_kept_asking(folder, words)
    task = build_task(asking.spec.task)
    old_path = folder.with_name(f"{folder.name}.json")
    pass_at = tuple(read_result(old_path).pass_at_k) if old_path.exists() else ()

    async def judge_all() -> Rescored:
        async with hold_judge(asking.spec, task) as judge:
            return await rescore(plan, rollouts, task, judge=judge, pass_at=pass_at)

    rescored = asyncio.run(judge_all())
    path = folder.with_name(f"{folder.name}-rescored-{task.version[:8]}.json")
    write_result(rescored.result, path)
    return StoredRescored(rescored=rescored, path=path)


def read_kept_asking(folder: Path, words: Sequence[str] = ()) -> Asking:
    """Return how the replies in a folder were asked for, some settings of the task changed.

    Raises: CorruptRecord if the first shard is damaged; ConfigError for settings that the task lacks.
    """
    shard = list_shards(folder)[0]
    plan = read_plan(shard)
    settings = read_task_settings(shard)
    # Of a task of the user's the settings say where it is; the plan has the name of its class.
    name = str(settings.get("name", plan.task))
    return read_asking(name, _merge(settings, words), Split(plan.split))


def _merge(stored: Mapping[str, Any], words: Sequence[str]) -> list[str]:
    """Return the stored settings of a task as `key=value` words, without those that new words replace."""
    given = [word if word.startswith("task.") else f"task.{word}" for word in words]
    replaced = [parse_override(word)[0] for word in given]
    kept = [
        f"{dotted(path)}={format_value(value)}"
        for path, value in walk_values(stored, ("task",))
        if path != ("task", "name") and not any(path[: len(new)] == new for new in replaced)
    ]
    return kept + given
