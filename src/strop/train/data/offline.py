"""Offline data of a run as its run file names it: demonstrations (SFT rows), or pairs of replies.

Demonstrations are prompts and replies to imitate, framed as the run's own rollouts are. They come from a
data file or from recorded rollouts (`sft_sources`). Rows that do not fit are dropped and counted, and refused
above a share. Nothing here imports torch, so a plan can read it to predict memory and time.
"""

from __future__ import annotations

import hashlib
import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import numpy as np

from strop.errors import DataError
from strop.policy.footprint import DEFAULT_MICRO_BATCH_POSITIONS, read_model_size
from strop.record.run_dir import STATE_NAME
from strop.rollout import BoolArray, IntArray, Rollout
from strop.spec.offline import DpoSpec, SftSpec
from strop.spec.run import RunSpec
from strop.store.data_files import DataFile, locate_named, note_data_file
from strop.tasks import Task
from strop.tasks.prompt import PromptFormat, resolve_prompt_format
from strop.tasks.rows.layout import is_saved, note_files
from strop.tokenizer import Tokenizer

OVERLONG = "longer than the model's positions"
LONG_REPLY = "with a reply over task.max_reply_tokens"
STOP_STRING = "with a stop string of the task"
_DROPPED = (OVERLONG, LONG_REPLY, STOP_STRING)


@dataclass(frozen=True, kw_only=True, slots=True)
class Framing:
    """Prompt format and limits of a run, the same for its rollouts and its demonstrations."""

    tokenizer: Tokenizer
    prompt_format: PromptFormat
    """Resolved: chat or base."""
    task: Task
    """Its limits hold for demonstrated replies too: the run would never see a longer one."""
    max_positions: int
    """Tokens that the model can look at."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Demonstration:
    """One prompt and the reply to imitate. Shapes: reply_ids and is_trained (T,)."""

    prompt_ids: IntArray
    num_asked: int
    """Tokens before the first reply: the prompt's, or more where the prompt is trained too."""
    reply_ids: IntArray
    """Everything after the prompt; where replies are trained, each ends in its terminator."""
    is_trained: BoolArray
    """True where the loss is computed; by place, never by token value."""
    weight: float
    prompt_id: str
    """Names the prompt, not the reply: several demonstrations may share it."""

    @property
    def num_tokens(self) -> int:
        """Tokens of prompt and reply."""
        return len(self.prompt_ids) + len(self.reply_ids)

    @property
    def asked_ids(self) -> IntArray:
        """The ids before the first reply."""
        asked: IntArray = np.concatenate([self.prompt_ids, self.reply_ids])[: self.num_asked]
        return asked

    @property
    def content(self) -> bytes:
        """The bytes that are equal in equal demonstrations."""
        lengths = np.array([len(self.prompt_ids), len(self.reply_ids)], dtype=np.int64)
        parts = (lengths, self.prompt_ids, self.reply_ids, self.is_trained)
        return b"".join(part.tobytes() for part in parts)


@dataclass(frozen=True, kw_only=True, slots=True)
class Candidate:
    """A demonstration before it is known to fit."""

    demonstration: Demonstration
    replies: tuple[tuple[str, int], ...]
    """Text and number of tokens, terminator included, of each reply that is trained."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Demonstrations:
    """All demonstrations of a run, in the order of the source."""

    source: str
    members: tuple[Demonstration, ...]
    problems: frozenset[str]
    """Problems that the rows name, with single spaces: none of them may be evaluated on."""
    counts: Mapping[str, int]
    """Rows or rollouts that were left out, by reason."""

    @property
    def digest(self) -> str:
        """Hash over all trained ids and weights, in order."""
        total = hashlib.sha256()
        for member in self.members:
            total.update(member.content + np.float64(member.weight).tobytes())
        return total.hexdigest()

    @property
    def lengths(self) -> tuple[int, ...]:
        """Tokens of each one, prompt and reply."""
        return tuple(member.num_tokens for member in self.members)

    @property
    def num_scored(self) -> int:
        """Tokens that are trained."""
        return sum(int(member.is_trained.sum()) for member in self.members)

    def describe(self) -> str:
        """Return how many demonstrations there are, and why others were left out."""
        left_out = _list_counts(self.counts)
        return f"{len(self.members)} demonstrations from {self.source}" + (
            f" ({left_out})" if left_out else ""
        )


def _list_counts(counts: Mapping[str, int]) -> str:
    return "; ".join(f"{number} {reason}" for reason, number in counts.items() if number)


@dataclass(kw_only=True, slots=True)
class Sieve:
    """Keeps the candidates that fit, once each, and counts the others by reason."""

    framing: Framing
    kept: dict[bytes, Demonstration] = field(default_factory=dict)
    counts: Counter[str] = field(default_factory=Counter)
    num_seen: int = 0

    def add(self, candidate: Candidate) -> None:
        """Keep a candidate, or count the reason to drop it."""
        self.num_seen += 1
        max_reply_tokens, demonstration = self.framing.task.limits.max_reply_tokens, candidate.demonstration
        if demonstration.num_tokens > self.framing.max_positions:
            self.counts[OVERLONG] += 1
        elif any(num_tokens > max_reply_tokens for _, num_tokens in candidate.replies):
            self.counts[LONG_REPLY] += 1
        elif any(stop in text for text, _ in candidate.replies for stop in self._stops()):
            self.counts[STOP_STRING] += 1
        elif demonstration.content in self.kept:
            self.counts["repeated"] += 1
        else:
            self.kept[demonstration.content] = demonstration

    def _stops(self) -> tuple[str, ...]:
        framing = self.framing
        return framing.task.limits.stops(is_base=framing.prompt_format is PromptFormat.BASE)

    def finish(self, source: str, max_dropped_frac: float) -> tuple[Demonstration, ...]:
        """Return the kept demonstrations.

        Raises: DataError if there is none, or more than `max_dropped_frac` of the candidates were dropped.
        """
        num_dropped = sum(self.counts[cause] for cause in _DROPPED)
        causes = ", ".join(f"{self.counts[cause]} {cause}" for cause in _DROPPED if self.counts[cause])
        if num_dropped > max_dropped_frac * self.num_seen:
            limits = self.framing.task.limits
            raise DataError(
                f"{num_dropped} of {self.num_seen} demonstrations of sft.source={source} were dropped"
                f" ({causes}), more than sft.max_dropped_frac={max_dropped_frac:g}; the model has"
                f" {self.framing.max_positions} positions, task.max_reply_tokens is"
                f" {limits.max_reply_tokens}, and the stop strings are {list(self._stops())}",
                allowed="demonstrations that the model could have given as replies in this run",
                next_step="mend the rows, or raise sft.max_dropped_frac to train without them",
            )
        require_some(source, self.kept, f"{self.num_seen} were looked at")
        return tuple(self.kept.values())


def require_some(source: str, rows: Mapping[bytes, Demonstration] | Sequence[object], seen: str) -> None:
    """Raises: DataError if there are no rows; `seen` describes the source's content."""
    if rows:
        return
    raise DataError(
        f"sft.source={source} gives no demonstration: {seen}",
        allowed="a source of which at least one demonstration is left",
        next_step="correct the source, or the settings of sft that choose from it",
    )


def require_enough(demonstrations: Demonstrations, rows_per_step: int) -> None:
    """Refuse steps that would hold a demonstration twice. Raises: DataError with both numbers."""
    if len(demonstrations.members) >= rows_per_step:
        return
    raise DataError(
        f"a step takes sft.rows_per_step={rows_per_step} and there are {demonstrations.describe()}",
        allowed=f"sft.rows_per_step from 1 to {len(demonstrations.members)}",
        next_step="lower sft.rows_per_step or give the run more demonstrations",
    )


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
        """Return how many rows there are, and why others were left out."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class OfflineSource:
    """The offline data that a run file names."""

    kind: str
    """'demonstrations' or 'pairs'."""
    setting: str
    """The setting that names the source."""
    source: str
    per_step: int
    """Rows that a step takes."""


def find_offline_source(spec: RunSpec) -> OfflineSource | None:
    """Return the source of a run's offline data, None where it has none."""
    sft, dpo = spec.sft, spec.dpo
    if spec.train.terms == "dpo" and dpo.source is not None:
        return OfflineSource(
            kind="pairs", setting="dpo.source", source=dpo.source, per_step=dpo.pairs_per_step
        )
    if spec.has_demonstrations and sft.source is not None:
        return OfflineSource(
            kind="demonstrations", setting="sft.source", source=sft.source, per_step=sft.rows_per_step
        )
    return None


def count_offline_positions(spec: RunSpec, data: OfflineData | None) -> int:
    """Return the positions of the largest micro-batch of offline rows; 0 where a run has none.

    A full micro-batch where the data is not read yet: `data` is None.
    """
    source = find_offline_source(spec)
    if source is None:
        return 0
    budget = spec.train.micro_batch_tokens or DEFAULT_MICRO_BATCH_POSITIONS
    if data is None:
        return budget
    longest = max(data.lengths)
    # A row longer than the budget is a micro-batch alone.
    return max(longest, min(budget, source.per_step * longest))


@dataclass(frozen=True, kw_only=True, slots=True)
class Pairs:
    """All pairs of a run, in the order of the source."""

    source: str
    members: tuple[tuple[Rollout, Rollout], ...]
    """The better one first."""
    counts: Mapping[str, int]
    """Rollouts and groups that were left out, by reason."""

    @property
    def lengths(self) -> tuple[int, ...]:
        """Tokens of each pair: the prompt once, and both replies."""
        return tuple(
            len(pair[0].turns[0].token_ids)
            + sum(len(turn.token_ids) for rollout in pair for turn in rollout.turns[1:])
            for pair in self.members
        )

    @property
    def num_scored(self) -> int:
        """Tokens of all replies that were sampled."""
        turns = (turn for pair in self.members for rollout in pair for turn in rollout.turns)
        return sum(len(turn.token_ids) for turn in turns if turn.is_sampled)

    def describe(self) -> str:
        """Return how many pairs there are, and why others were left out."""
        left_out = _list_counts(self.counts)
        return f"{len(self.members)} pairs from {self.source}" + (f" ({left_out})" if left_out else "")


def read_pairs(dpo: DpoSpec, framing: Framing) -> Pairs:
    """Read the preference pairs of a run (`dpo.source`).

    Raises: StoreError if dpo.source is no folder of rollouts; CorruptRecord if a file is damaged;
        DataError if fewer pairs are left than a step takes, they were written with another tokenizer or
        prompt, or they answer what this run holds out.
    """
    assert dpo.source is not None
    # Imported here: pyarrow and the environments, which a run without pairs does not need.
    from strop.record.rollouts import read_rollouts
    from strop.train.data.sft_sources import find_rollouts_files, refuse_held_out, require_same_asking

    folder = find_source(dpo.source, setting="dpo.source")
    rollouts = itertools.chain.from_iterable(map(read_rollouts, find_rollouts_files(folder)))
    counts: Counter[str] = Counter()
    members = tuple(pair_rollouts(rollouts, framing.max_positions, counts))
    paired = {id(rollout): rollout for pair in members for rollout in pair}.values()
    refuse_held_out("dpo.source", dpo.source, list(paired), framing)
    for rollout in paired:
        require_same_asking("dpo.source", rollout, framing)
    pairs = Pairs(source=dpo.source, members=members, counts=counts)
    if len(members) < dpo.pairs_per_step:
        raise DataError(
            f"a step takes dpo.pairs_per_step={dpo.pairs_per_step} and there are {pairs.describe()}",
            allowed="at least as many pairs as a step takes",
            next_step="lower dpo.pairs_per_step, or name a run whose rollouts differ more in reward",
        )
    return pairs


def pair_rollouts(
    rollouts: Iterable[Rollout], max_positions: int, counts: Counter[str]
) -> Iterator[tuple[Rollout, Rollout]]:
    """Yield the best and the worst of every group: rollouts of one example and step, to one prompt.

    Equal rewards give no pair; among rollouts of equal reward the earlier one is taken.
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
        ranked = sorted(members, key=lambda rollout: -_reward(rollout))
        worst = next(rollout for rollout in members if _reward(rollout) == _reward(ranked[-1]))
        if _reward(ranked[0]) > _reward(worst):
            yield ranked[0], worst
        else:
            counts["groups without a pair"] += 1


def _reward(rollout: Rollout) -> float:
    return rollout.outcome.reward or 0.0


def _find_flaw(rollout: Rollout, max_positions: int) -> str | None:
    """Return why a rollout cannot be half of a pair, None where it can."""
    if rollout.outcome.reward is None:
        return "rollouts without a score"
    if not rollout.num_sampled_tokens:
        return "rollouts without a reply"
    if len(rollout.samples) > 1:
        return "rollouts whose prompt was written anew"
    is_long = sum(len(turn.token_ids) for turn in rollout.turns) > max_positions
    return "rollouts longer than the model's positions" if is_long else None


def read_demonstrations(sft: SftSpec, framing: Framing) -> Demonstrations:
    """Read the demonstrations of a run (`sft.source`), in its prompt format.

    Raises: DataError or StoreError for a source that is missing, malformed or left with fewer than a
        step takes.
    """
    assert sft.source is not None
    # Imported here: they bring the environments, which a plan without demonstrations does not need.
    from strop.train.data.sft_sources import read_file_demonstrations, read_run_demonstrations

    path = find_source(sft.source)
    is_from_file = sft.is_from_file or is_saved(path)
    read = read_file_demonstrations if is_from_file else read_run_demonstrations
    demonstrations = read(sft, path, framing)
    require_enough(demonstrations, sft.rows_per_step)
    return demonstrations


def read_framing(model_dir: Path, task: Task, prompt_format: str) -> Framing:
    """Return the prompt format, tokenizer and limits of a run. `prompt_format` is that of its run file.

    Raises: ConfigError if its tokenizer is missing, or it cannot be asked in the run's prompt format;
        StoreError if a file cannot be read.
    """
    tokenizer = Tokenizer.load(model_dir)
    return Framing(
        tokenizer=tokenizer,
        prompt_format=resolve_prompt_format(tokenizer, prompt_format),
        task=task,
        max_positions=read_model_size(model_dir).max_positions,
    )


def find_source(source: str, *, setting: str = "sft.source") -> Path:
    """Return the file or the folder of a run that a setting names, fetched if it is in a store.

    Its files are noted as data files of the run (`note_data_file`).
    Raises: DataError if there is none; StoreErrors as `Store.get`.
    """
    path = locate_named(source)
    if not path.exists():
        raise DataError(
            f"{setting}={source} does not exist",
            allowed="a file of JSONL, Parquet or CSV, a folder of save_to_disk, or one of rollouts; a path"
            " or a URI of a store",
            next_step=f"correct the path in {setting}",
        )
    if (saved := next(filter(is_saved, (path / "train", path)), None)) is not None:
        return note_files(source, saved)
    if path.is_dir():
        from strop.train.data.sft_sources import find_rollouts_files

        state = path / STATE_NAME
        for file in (*([state] if state.exists() else []), *find_rollouts_files(path)):
            name = file.relative_to(path).as_posix()
            note_data_file(DataFile(source=source, name=name, path=file))
    return path
