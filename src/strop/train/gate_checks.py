"""The input of the gate, and its checks that use no model: overlap with the test split, memory, disk."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TypeVar

from strop.cluster import Roles
from strop.hardware import free_disk_bytes, free_memory_bytes, rss_bytes
from strop.policy.footprint import (
    DEFAULT_MICRO_BATCH_POSITIONS,
    activation_bytes,
    cache_bytes,
    checkpoint_bytes,
    count_trained,
    frozen_bytes,
    micro_batch_positions,
    packed_bytes,
    read_model_size,
    state_bytes,
    terms_bytes,
)
from strop.rollout import Example, Split
from strop.spec.run import RunSpec
from strop.store.policy import find_mirror_root
from strop.tasks import Task, render_prompt
from strop.tasks.failures import FailureCause
from strop.tasks.judging import Judge
from strop.tasks.overlap import find_overlap, normal_text
from strop.train.data.offline import Demonstrations, count_offline_positions
from strop.train.data.preferences import Preferences
from strop.train.watch.process import LOW_DISK_FACTOR, directory_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class GateInput:
    """The parts of a run that the gate checks."""

    spec: RunSpec
    task: Task
    roles: Roles
    model_dir: Path
    run_path: Path
    weights_dir: Path | None = None
    """Where the policy's weights were loaded from; None: from `model_dir`."""
    judge: Judge | None = None
    """None: replies are judged in this process."""
    demonstrations: Demonstrations | None = None
    preferences: Preferences | None = None
    dtype_reason: str | None = None
    """Why the run computes in its number format, where a reason is known."""
    on_causes: Callable[[Sequence[FailureCause]], None] = lambda causes: None
    """Called with the causes of failures of a verifier or a probe."""

    @property
    def asked(self) -> Sequence[Example]:
        """The examples that the model answers: those trained on, or those evaluated on if none are."""
        return self.task.examples(Split.TRAIN if self.spec.train.has_rl else Split.HELD_OUT)

    @property
    def max_positions(self) -> int:
        """Tokens that the model can look at, prompt and reply together."""
        return self.roles.learner.shape.max_positions


@dataclass(frozen=True, kw_only=True, slots=True)
class GateCheck:
    """The verdict of one check."""

    name: str
    is_passed: bool
    detail: str
    """The measurement; for a failure also its cause and advice."""
    notice: str | None = None
    """A warning for every reader of the run's results; shown when the run begins and when it ends."""


# Overlap: the run must not train on the examples that it is evaluated on. An example is recognised by its id;
# by its problem, where the task can name it (`problem_of`); by its words; and by most of its words
# (`tasks.overlap`). Where the task names problems, that decides: questions of one form look alike, and only
# their author knows which are the same. Of very many examples an evenly spaced sample is compared, and the
# check's detail says so.

MAX_SIMILAR_FRAC = 0.01
"""Share of the held-out examples that may have nearly the words of something learned: published data sets
have some, and they cannot move a score by more than a point."""
_MAX_EXAMPLES = 250_000
"""Examples of a split compared at most. A hundred thousand prompts of a hundred words take some ten
seconds."""
_SHOWN_CHARS = 100
_SAME = ("as they are", "as the same problem", "in the same words")
_SIMILAR = "in nearly the same words"
_Learned = TypeVar("_Learned")


@dataclass(frozen=True, kw_only=True, slots=True)
class Match:
    """A training prompt that is the same as, or similar to, a held-out example."""

    how: str
    """One of `_SAME`, or `_SIMILAR`."""
    learned: str
    """The training prompt."""


@dataclass(kw_only=True, slots=True)
class _Search:
    """Compares held-out examples with the training data, source by source; the first match counts."""

    task: Task
    held_out: Sequence[Example]
    matches: dict[int, Match] = field(default_factory=dict)
    """By index of the held-out example."""

    def by_name(self, trained: Sequence[Example]) -> None:
        """Compare ids and names of problems."""
        names: dict[str, Example] = {}
        for example in trained:
            names.setdefault(example.example_id, example)
            names.setdefault(self.task.problem_of(example) or example.example_id, example)
        for index, example in enumerate(self.held_out):
            name = self.task.problem_of(example) or example.example_id
            for how, known in zip(_SAME, (names.get(example.example_id), names.get(name)), strict=False):
                if known is not None:
                    self._note(index, how, ask(self.task, known))

    def by_problem(self, problems: Sequence[str]) -> None:
        """Compare the texts of an example with those that name the problems of demonstrations."""
        named = {normal_text(problem): problem for problem in problems}
        for index, example in enumerate(self.held_out):
            texts = [value for value in example.fields.values() if isinstance(value, str)]
            for text in map(normal_text, [ask(self.task, example), *texts] if named else ()):
                if text in named:
                    self._note(index, _SAME[2], named[text])

    def by_text(
        self, texts: Mapping[int, str], learned: Sequence[_Learned], text_of: Callable[[_Learned], str]
    ) -> None:
        """Compare texts of held-out examples, by their indices, with training texts."""
        if not texts or not learned:
            return
        indices = list(texts)
        overlap = find_overlap(list(texts.values()), learned, text_of)
        for row, place in overlap.equal.items():
            self._note(indices[row], _SAME[2], text_of(learned[place]))
        for row, place in overlap.similar.items():
            # Where the task names problems, nearly the same words are another problem.
            if not self.is_named(self.held_out[indices[row]]):
                self._note(indices[row], _SIMILAR, text_of(learned[place]))

    def is_named(self, example: Example) -> bool:
        """Whether the task can say what problem an example poses."""
        return self.task.problem_of(example) is not None

    def _note(self, index: int, how: str, learned: str) -> None:
        self.matches.setdefault(index, Match(how=how, learned=learned))


def check_overlap(gate: GateInput) -> GateCheck:
    """Refuse a run that is evaluated on what it learns from, word for word or nearly."""
    held_out, notes = _choose(gate.task.examples(Split.HELD_OUT), "held-out")
    matches = find_matches(gate, held_out, notes)
    counts = Counter(match.how for match in matches.values())
    num_similar = counts.pop(_SIMILAR, 0)
    is_passed = not counts and num_similar <= MAX_SIMILAR_FRAC * len(held_out)
    detail = f"none of {len(held_out)} held-out examples is learned from"
    notice = None
    if matches:
        shown = [f"{counts[how]} {how}" for how in _SAME if counts[how]]
        shown += [f"{num_similar} {_SIMILAR}"] if num_similar else []
        index = min(matches, key=lambda index: (matches[index].how == _SIMILAR, index))
        first, learned = held_out[index], matches[index].learned
        detail = (
            f"{len(matches)} of {len(held_out)} held-out examples are learned from: {', '.join(shown)}; the"
            f" first is {first.example_id}, {_clip(ask(gate.task, first))!r}, there {_clip(learned)!r}"
        )
        notice = f"{detail}: the score may be memory in part" if is_passed else None
    if not is_passed:
        detail += "; remove them from one of the two: their score would measure memory"
    return GateCheck(name="overlap", is_passed=is_passed, detail="; ".join([detail, *notes]), notice=notice)


def find_matches(gate: GateInput, held_out: Sequence[Example], notes: list[str]) -> Mapping[int, Match]:
    """Return the held-out examples that are trained on, by index; note where only a sample was compared."""
    task, search = gate.task, _Search(task=gate.task, held_out=held_out)
    if gate.spec.train.has_rl:
        trained, more = _choose(task.examples(Split.TRAIN), "training")
        notes += more
        search.by_name(trained)
        # Two examples whose problems the task can name were compared by name.
        asked = {index: ask(task, example) for index, example in enumerate(held_out)}
        named = {index: text for index, text in asked.items() if search.is_named(held_out[index])}
        unnamed = {index: text for index, text in asked.items() if index not in named}
        search.by_text(unnamed, trained, partial(ask, task))
        search.by_text(named, [other for other in trained if not search.is_named(other)], partial(ask, task))
    demonstrations, preferences = gate.demonstrations, gate.preferences
    prompts = [member.asked_ids for member in demonstrations.members] if demonstrations is not None else []
    prompts += [pair.prompt_ids for pair in preferences.members] if preferences is not None else []
    if demonstrations is not None:
        search.by_problem(sorted(demonstrations.problems))
    if prompts:
        tokenizer, prompt_format = gate.roles.tokenizer, gate.spec.model.prompt_format
        rendered = [render_prompt(tokenizer, task.render(example), prompt_format)[1] for example in held_out]
        search.by_text(dict(enumerate(map(tokenizer.decode, rendered))), prompts, tokenizer.decode)
    return search.matches


def ask(task: Task, example: Example) -> str:
    """Return the prompt of an example as text, without the marks of a chat."""
    return "\n".join(message.text for message in task.render(example))


def _choose(examples: Sequence[Example], what: str) -> tuple[Sequence[Example], list[str]]:
    """Return the examples to compare, and a note where these are not all."""
    stride = max(1, -(-len(examples) // _MAX_EXAMPLES))
    chosen = list(examples[::stride])
    if stride == 1:
        return chosen, []
    return chosen, [f"of {len(examples)} {what} examples one in {stride} was compared"]


def _clip(text: str) -> str:
    return text if len(text) <= _SHOWN_CHARS else f"{text[:_SHOWN_CHARS]}..."


_NUM_RENDERED = 8
"""Prompts that are rendered to estimate the longest."""


def check_room(gate: GateInput) -> GateCheck:
    """Refuse a run whose estimated memory or disk is not free now.

    Memory that this process holds already (weights, masters) and checkpoints already written are part of the
    estimate, so they count as free.
    """
    spec, size = gate.spec, read_model_size(gate.model_dir)
    dtype = spec.model.dtype
    task, answered = gate.task, _answered_positions(gate)
    offline = count_offline_positions(spec, gate.demonstrations or gate.preferences)
    positions = max(answered if spec.train.has_rl else 0, offline)
    rows = spec.train.prompts_per_step * spec.train.group_size
    num_terms, num_trained = spec.train.has_rl + spec.train.has_sft, count_trained(size, spec.lora)
    memory_bytes = state_bytes(size, dtype, num_trained) + terms_bytes(size, num_terms, num_trained)
    memory_bytes += cache_bytes(size, dtype, rows, task.limits.max_reply_tokens + answered // rows)
    if not (is_elsewhere := gate.roles.learner.facts.device != "cpu"):
        memory_bytes += packed_bytes(size, dtype)
    # A mirror keeps the checkpoint that it is sending, even after it was pruned.
    num_checkpoints = spec.train.keep_checkpoints + bool(find_mirror_root(spec.store)) + LOW_DISK_FACTOR
    disk_bytes = int(num_checkpoints * checkpoint_bytes(size, dtype, num_trained))
    written_bytes = directory_bytes(gate.run_path / "checkpoints")
    free_bytes, have_disk = free_memory_bytes(), free_disk_bytes(gate.run_path) + written_bytes
    have_memory = None if free_bytes is None else free_bytes + (rss_bytes() or 0)
    activations = activation_bytes(size, dtype, positions, is_recomputed=gate.roles.learner.facts.recomputes)
    # Frozen models are loaded already, so their memory is part of this process's.
    memory_bytes += activations + sum(
        frozen_bytes(read_model_size(path), dtype, num_positions=positions, beside_bytes=activations)
        for path in gate.roles.frozen_dirs.values()
    )
    has_memory = is_elsewhere or have_memory is None or memory_bytes <= have_memory
    known = "an unknown amount" if have_memory is None else f"{have_memory / 2**30:.1f} GiB"
    detail = (
        f"memory about {memory_bytes / 2**30:.1f} GiB of {known} free, checkpoints"
        f" {disk_bytes / 2**30:.1f} of {have_disk / 2**30:.1f} GiB free at {gate.run_path}"
    )
    return GateCheck(name="room", is_passed=disk_bytes <= have_disk and has_memory, detail=detail)


def _answered_positions(gate: GateInput) -> int:
    """Return the positions of the largest micro-batch of rollouts."""
    tokenizer, spec = gate.roles.tokenizer, gate.spec
    prompts = [gate.task.render(example) for example in gate.asked[:_NUM_RENDERED]]
    longest = max(len(render_prompt(tokenizer, prompt, spec.model.prompt_format)[1]) for prompt in prompts)
    return micro_batch_positions(
        budget=spec.train.micro_batch_tokens or DEFAULT_MICRO_BATCH_POSITIONS,
        num_prompts=spec.train.prompts_per_step,
        num_rollouts=spec.train.group_size,
        prompt_tokens=min(longest, gate.max_positions),
        reply_tokens=gate.task.limits.max_reply_tokens,
    )
