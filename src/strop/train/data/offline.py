"""Offline data of a run as its run file names it: demonstrations, or pairs of replies.

Nothing here imports torch, so a plan can read it to predict memory and time.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np

from strop.errors import DataError
from strop.policy.footprint import DEFAULT_MICRO_BATCH_POSITIONS, read_model_size
from strop.record.run_dir import STATE_NAME
from strop.rollout import Rollout
from strop.spec.offline import DpoSpec
from strop.spec.run import RunSpec
from strop.store.data_files import DataFile, locate_named, note_data_file
from strop.tasks import Task
from strop.tasks.prompt import resolve_prompt_format
from strop.tokenizer import Tokenizer
from strop.train.data.demonstrations import Demonstrations, Framing, require_enough


class OfflineData(Protocol):
    """Rows that a run trains on and does not sample: demonstrations or preference pairs."""

    @property
    def lengths(self) -> Sequence[int]:
        """Tokens of each row, its prompt included."""
        ...

    @property
    def num_scored(self) -> int:
        """Tokens of all rows that the loss counts."""
        ...

    def describe(self) -> str:
        """Return how many rows there are, and what became of the others."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class OfflineSource:
    """The offline data that a run file names."""

    kind: str
    """'demonstrations' or 'pairs'."""
    setting: str
    """The setting that names the source."""
    source: str | None
    per_step: int
    """Rows that a step takes."""


def find_offline_source(spec: RunSpec) -> OfflineSource | None:
    """Return the source of a run's offline data, None where it has none."""
    if spec.train.terms == "dpo":
        return OfflineSource(
            kind="pairs", setting="dpo.source", source=spec.dpo.source, per_step=spec.dpo.pairs_per_step
        )
    if spec.has_demonstrations:
        return OfflineSource(
            kind="demonstrations",
            setting="sft.source",
            source=spec.sft.source,
            per_step=spec.sft.rows_per_step,
        )
    return None


def read_offline_data(spec: RunSpec, task: Task, model_dir: Path) -> OfflineData | None:
    """Read a run's offline data; None without any. Raises: as `read_pairs` and `read_demonstrations`."""
    return read_pairs(spec, task, model_dir) or read_demonstrations(spec, task, model_dir)


def count_offline_positions(spec: RunSpec, found: OfflineData | None) -> int:
    """Return the positions of the largest micro-batch of offline rows; 0 where a run has none.

    A full micro-batch where the data is not read yet: `found` is None.
    """
    wanted = find_offline_source(spec)
    if wanted is None:
        return 0
    budget = spec.train.micro_batch_tokens or DEFAULT_MICRO_BATCH_POSITIONS
    if found is None:
        return budget
    longest = max(found.lengths)
    # One that alone exceeds the budget is a micro-batch of its own.
    return max(longest, min(budget, wanted.per_step * longest))


@dataclass(frozen=True, kw_only=True, slots=True)
class Pairs:
    """All pairs of a run, in the order of the source."""

    source: str
    members: tuple[tuple[Rollout, Rollout], ...]
    """The better one first."""
    counts: Mapping[str, int]
    """What became of the rollouts that were read, in words."""

    @property
    def lengths(self) -> tuple[int, ...]:
        """Tokens of each pair: the prompt once, and both replies."""
        return tuple(map(_count_tokens, self.members))

    @property
    def num_scored(self) -> int:
        """Tokens of all replies that were sampled."""
        turns = (turn for pair in self.members for one in pair for turn in one.turns)
        return sum(len(turn.token_ids) for turn in turns if turn.is_sampled)

    def describe(self) -> str:
        """Return how many there are, and what became of the others."""
        found = "; ".join(f"{number} {what}" for what, number in self.counts.items() if number)
        return f"{len(self.members)} pairs from {self.source}" + (f" ({found})" if found else "")


def read_pairs(spec: RunSpec, task: Task, model_dir: Path) -> Pairs | None:
    """Read the preference pairs of a run (`dpo.source`); None where it has none.

    Raises: StoreError if dpo.source is no folder of rollouts; CorruptRecord if a file is damaged;
        DataError if fewer pairs are left than a step takes, they were written with another tokenizer or
        prompt, or they answer what this run holds out.
    """
    dpo = spec.dpo
    if spec.train.terms != "dpo" or dpo.source is None:
        return None
    # Imported here: pyarrow and the environments, which a run without pairs does not need.
    from strop.record.rollouts import read_rollouts
    from strop.train.data.sft_sources import find_rollouts_files, refuse_held_out, require_same_asking

    framing = read_framing(spec, task, model_dir)
    folder = find_source(dpo.source, setting="dpo.source")
    rollouts = itertools.chain.from_iterable(map(read_rollouts, find_rollouts_files(folder)))
    counts: Counter[str] = Counter()
    found = list(pair_rollouts(dpo, rollouts, framing.max_positions, counts))
    paired = {id(one): one for pair in found for one in pair}.values()
    refuse_held_out("dpo.source", dpo.source, list(paired), framing)
    for rollout in paired:
        require_same_asking("dpo.source", rollout, framing)
    pairs = Pairs(source=dpo.source, members=tuple(found), counts=counts)
    if len(found) < dpo.pairs_per_step:
        raise DataError(
            f"a step takes dpo.pairs_per_step={dpo.pairs_per_step} and there are {pairs.describe()}",
            allowed="at least as many pairs as a step takes",
            next_step="lower dpo.pairs_per_step, or name a run whose rollouts differ more in reward",
        )
    return pairs


def pair_rollouts(
    spec: DpoSpec, rollouts: Iterable[Rollout], max_positions: int, counts: Counter[str]
) -> Iterator[tuple[Rollout, Rollout]]:
    """Yield (better, worse) of every group: rollouts of one example and step, to one prompt.

    Equal rewards give no pair; of equals the earlier one is taken.
    """
    groups: dict[tuple[int, str, bytes], list[Rollout]] = {}
    for rollout in rollouts:
        cause = _find_flaw(rollout, max_positions)
        if cause is not None:
            counts[cause] += 1
            continue
        key = (rollout.step, rollout.example.example_id, rollout.turns[0].token_ids.tobytes())
        groups.setdefault(key, []).append(rollout)
    for members in groups.values():
        ranked = sorted(members, key=lambda one: -_reward(one))
        pairs = list(itertools.combinations(ranked, 2))
        if spec.pairs == "best_worst":
            worst = next(one for one in members if _reward(one) == _reward(ranked[-1]))
            pairs = [(ranked[0], worst)]
        kept = [
            (better, worse)
            for better, worse in pairs
            if _reward(better) - _reward(worse) >= max(spec.min_margin, np.finfo(float).tiny)
        ]
        counts["groups without a pair"] += not kept
        yield from kept


def _reward(rollout: Rollout) -> float:
    return rollout.outcome.reward or 0.0


def _find_flaw(rollout: Rollout, max_positions: int) -> str | None:
    """Say why a rollout cannot be half of a pair."""
    if rollout.outcome.reward is None:
        return "rollouts without a score"
    if not rollout.num_sampled_tokens:
        return "rollouts without a reply"
    if len(rollout.samples) > 1:
        return "rollouts whose prompt was written anew"
    is_long = sum(len(turn.token_ids) for turn in rollout.turns) > max_positions
    return "rollouts longer than the model's positions" if is_long else None


def _count_tokens(pair: tuple[Rollout, Rollout]) -> int:
    replies = (turn for one in pair for turn in one.turns[1:])
    return len(pair[0].turns[0].token_ids) + sum(len(turn.token_ids) for turn in replies)


def read_demonstrations(spec: RunSpec, task: Task, model_dir: Path) -> Demonstrations | None:
    """Read the demonstrations of a run, in its prompt format; None where it has none.

    Raises: DataError or StoreError for a source that is missing, malformed or left with fewer than a
        step takes; ConfigError if the model cannot be asked in the run's prompt format.
    """
    if not spec.has_demonstrations:
        return None
    # Imported here: they bring the environments, which a plan without demonstrations does not need.
    from strop.train.data.sft_sources import read_file_demonstrations, read_run_demonstrations

    source = spec.sft.source
    assert source is not None
    path = find_source(source)
    read = read_file_demonstrations if spec.sft.is_from_file else read_run_demonstrations
    found = read(spec.sft, path, read_framing(spec, task, model_dir))
    require_enough(found, spec.sft.rows_per_step)
    return found


def read_framing(spec: RunSpec, task: Task, model_dir: Path) -> Framing:
    """Return the prompt format, tokenizer and limits of a run.

    Raises: ConfigError if its tokenizer is missing, or it cannot be asked in the run's prompt format;
        StoreError if a file cannot be read.
    """
    tokenizer = Tokenizer.load(model_dir)
    return Framing(
        tokenizer=tokenizer,
        prompt_format=resolve_prompt_format(tokenizer, spec.model.prompt_format),
        task=task,
        max_positions=read_model_size(model_dir).max_positions,
    )


def find_source(source: str, *, setting: str = "sft.source") -> Path:
    """Return the file or the folder of a run that a setting names, fetched where it lies in a store.

    The files that are read from it are noted as data files of the run (`note_data_file`).
    Raises: DataError if there is none; StoreErrors as `Store.get`.
    """
    path = locate_named(source)
    if not path.exists():
        raise DataError(
            f"{setting}={source} does not exist",
            allowed="a file of JSONL or Parquet, or a folder of rollouts; a path, or a URI of a store",
            next_step=f"correct the path in {setting}",
        )
    if path.is_dir():
        from strop.train.data.sft_sources import find_rollouts_files

        state = path / STATE_NAME
        for file in (*([state] if state.exists() else []), *find_rollouts_files(path)):
            name = file.relative_to(path).as_posix()
            note_data_file(DataFile(source=source, name=name, path=file, origin="disk"))
    return path
