"""Which held-out examples a run came to solve, by two evaluations and the replies that they kept."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from strop.evaluate import EvalResult
from strop.record.files import list_shards
from strop.rollout import Example
from strop.tasks import Task


@dataclass(frozen=True, kw_only=True, slots=True)
class ChangedExample:
    """One example, and the greedy replies to it before and after."""

    question: str
    """The last message that poses it."""
    before: str
    after: str
    """The first 200 characters of the last reply; empty where there was none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Changes:
    """Examples that are solved in one evaluation and not in the other."""

    num_examples: int
    num_gained: int
    """Wrong before and right after."""
    num_lost: int
    """The other way round."""
    examples: tuple[ChangedExample, ...]
    """The first of those that were gained."""


def find_changes(
    task: Task, before: EvalResult, after: EvalResult, folders: tuple[Path, Path], *, num_shown: int = 3
) -> Changes | None:
    """Compare greedy verdicts of two evaluations example by example; None if they are not of the same ones.

    `folders`: where each kept its replies. Without these nothing is shown of the examples.
    Raises: CorruptRecord if kept replies are damaged.
    """
    olds, news = before.greedy.by_example, after.greedy.by_example
    if before.protocol_digest != after.protocol_digest or not (before.is_valid and after.is_valid):
        return None
    pairs = {name: (old.solved_frac, news[name].solved_frac) for name, old in olds.items() if name in news}
    gained = [name for name, pair in pairs.items() if pair == (0.0, 1.0)]
    results = zip(folders, (before, after), strict=True)
    replies = [_read_replies(folder, result, gained[:num_shown]) for folder, result in results]
    return Changes(
        num_examples=len(pairs),
        num_gained=len(gained),
        num_lost=sum(pair == (1.0, 0.0) for pair in pairs.values()),
        examples=tuple(
            ChangedExample(
                question=task.render(replies[0][name][0])[-1].text,
                before=replies[0][name][1],
                after=replies[1][name][1],
            )
            for name in gained[:num_shown]
            if name in replies[0] and name in replies[1]
        ),
    )


def _read_replies(folder: Path, result: EvalResult, wanted: Sequence[str]) -> dict[str, tuple[Example, str]]:
    """Return example and greedy reply of some examples, as far as they are kept."""
    from strop.record.rows import list_rows, read_row

    found: dict[str, tuple[Example, str]] = {}
    per_example = 1 + (result.num_samples or 0)
    for path in list_shards(folder) if wanted else ():
        data = path.read_bytes()
        for row in list_rows(data, str(path)):
            if row.example_id in wanted and row.index % per_example == 0:
                found[row.example_id] = (read_row(data, str(path), row.index).rollout.example, row.reply)
    return found
