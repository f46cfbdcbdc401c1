"""Rollouts of a run as demonstrations: which are taken, and with exactly which ids."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from strop.errors import DataError, StoreError
from strop.record import RunDir
from strop.record.rollouts import write_rollouts
from strop.rollout import (
    FailureOwner,
    FinishReason,
    Message,
    Outcome,
    Rollout,
    Sampling,
    Split,
    Turn,
    make_example,
)
from strop.spec import ArithmeticSpec
from strop.spec.sft import SftSpec
from strop.tasks import build_task
from strop.tasks.prompt import render_prompt
from strop.train.demonstrations import Demonstrations, Framing
from strop.train.rejection import read_run_demonstrations, refuse_held_out
from strop.train.sft_source import find_source
from tests.fixtures.demonstrations import make_framing, spell
from tests.fixtures.tiny_run import SpellTask, new_run
from tests.fixtures.tiny_tokenizer import tiny_tokenizer

TASK = SpellTask(max_reply_tokens=16, stop_strings=("Q:",))
EXAMPLES = TASK.examples(Split.TRAIN)


@pytest.fixture
def framing(tmp_path: Path) -> Framing:
    return make_framing(tiny_tokenizer(tmp_path / "model"), TASK)


def roll(
    framing: Framing,
    index: int,
    text: str,
    reward: float | None,
    *,
    end: FinishReason = FinishReason.EOS,
    step: int = 0,
    **outcome: Any,
) -> Rollout:
    """Attempt example `index` with a reply, as the rollout path records it; a stop string stands behind |."""
    tokenizer, example = framing.tokenizer, EXAMPLES[index]
    asked, prompt_ids = render_prompt(tokenizer, TASK.render(example), framing.prompt_format)
    text, _, stop = text.partition("|")
    said_ids = tokenizer.encode(text + stop)
    said_ids = np.append(said_ids, np.int32(tokenizer.eos_id)) if end is FinishReason.EOS else said_ids
    logprobs = np.full(len(said_ids), -1.0, dtype=np.float32)
    turns = [Turn(role="prompt", text=asked, token_ids=prompt_ids)]
    turns.append(Turn(role="assistant", text=text, token_ids=said_ids, logprobs=logprobs, finish_reason=end))
    scored = Outcome(parts={"spelled": reward}, truncated=end is FinishReason.LENGTH, **outcome)
    return Rollout(
        example=example, step=step, sample_index=0, turns=tuple(turns), outcome=scored, sampling=Sampling()
    )


def write_run(root: Path, *steps: Sequence[Rollout]) -> Path:
    run = new_run(root)
    for number, rollouts in enumerate(steps, start=1):
        write_rollouts(run.rollouts_path(number), rollouts)
    run.release()
    return run.path


def choose(run_path: Path, framing: Framing, **settings: Any) -> Demonstrations:
    return read_run_demonstrations(SftSpec(source=str(run_path), **settings), run_path, framing)


def replies(found: Demonstrations, framing: Framing) -> list[str]:
    return [spell(framing.tokenizer, member)[1] for member in found.members]


def record(framing: Framing) -> list[list[Rollout]]:
    """Return two steps of three examples; beside each what becomes of it at reward 0.5."""
    lost = replace(
        roll(framing, 2, "L", None), outcome=Outcome.lost(FailureOwner.INFRA, "ConnectionError", "gone")
    )
    first = [
        roll(framing, 0, "A", 0.5),  # taken, third of its example
        roll(framing, 0, "B", 1.0),  # taken, first
        roll(framing, 0, "C", 0.4),  # below
        roll(framing, 1, "D", 0.6, end=FinishReason.LENGTH),  # cut
        roll(framing, 1, "E", None),  # not scored
        lost,
        roll(framing, 2, "so t|he", 0.9, end=FinishReason.STOP_STRING),  # no token ends where the text does
    ]
    second = [
        roll(framing, 0, "A", 0.5, step=1),  # said before
        roll(framing, 0, "G", 1.0, step=1),  # taken, second: as good as B, and later
        roll(framing, 1, "H|Q:", 0.7, step=1, end=FinishReason.STOP_STRING),  # taken
    ]
    return [first, second]


def test_the_replies_of_an_evaluation_are_taken_as_those_of_a_run(tmp_path: Path, framing: Framing) -> None:
    run_path = write_run(tmp_path / "run", *record(framing))
    folder = tmp_path / "kept"
    folder.mkdir()
    for number, rollouts in enumerate(record(framing)):
        write_rollouts(folder / f"examples-{number:06d}-{number:06d}.parquet", rollouts)
    as_run, as_kept = (choose(path, framing, min_reward=0.5) for path in (run_path, folder))
    assert replies(as_kept, framing) == replies(as_run, framing)
    assert find_source(str(folder)) == folder
    with pytest.raises(StoreError, match="run"):
        choose(tmp_path, framing)


def test_replies_to_what_the_run_holds_out_are_refused(tmp_path: Path, framing: Framing) -> None:
    (held_out,) = framing.task.examples(Split.HELD_OUT)[:1]
    seen = replace(roll(framing, 0, "A", 1.0), example=held_out)
    path = write_run(tmp_path, [seen, roll(framing, 1, "B", 1.0)])
    with pytest.raises(DataError, match=f"are held out here, the first is {held_out.example_id}"):
        choose(path, framing)


def test_replies_to_a_form_of_what_the_run_holds_out_are_refused(tmp_path: Path) -> None:
    sums = build_task(ArithmeticSpec())
    framing = make_framing(tiny_tokenizer(tmp_path / "model"), sums)
    (held_out,) = sums.examples(Split.HELD_OUT)[:1]
    a, b = held_out.fields["a"], held_out.fields["b"]
    mirrored = make_example("arithmetic", {"a": b, "b": a}, held_out.answer)
    told = replace(roll(framing, 0, "A", 1.0), example=mirrored)
    with pytest.raises(DataError, match=f"are held out here, the first is {mirrored.example_id}"):
        refuse_held_out("sft.source", "run", [told], framing)
    # An example of another task may have any fields.
    other = replace(told, example=make_example("spell", {}, None))
    refuse_held_out("sft.source", "run", [other], framing)


def test_exactly_the_rollouts_that_earned_enough_are_taken(tmp_path: Path, framing: Framing) -> None:
    path = write_run(tmp_path, *record(framing))
    found = choose(path, framing, min_reward=0.5)
    assert replies(found, framing) == ["{B<|end|>}", "{G<|end|>}", "{A<|end|>}", "{H<|end|>}"]
    assert [member.prompt_id for member in found.members] == [
        *[EXAMPLES[0].example_id] * 3,
        EXAMPLES[1].example_id,
    ]
    assert found.describe() == (
        f"4 demonstrations from {path} (1 rollouts below sft.min_reward; 2 rollouts without a whole reply;"
        " 2 rollouts without a score; 1 repeated rollouts)"
    )


def test_by_default_only_full_marks_are_imitated(tmp_path: Path, framing: Framing) -> None:
    path = write_run(tmp_path, *record(framing))
    assert replies(choose(path, framing), framing) == ["{B<|end|>}", "{G<|end|>}"]


def test_at_most_so_many_of_an_example_and_one_is_best_of_k(tmp_path: Path, framing: Framing) -> None:
    path = write_run(tmp_path, *record(framing))
    best = choose(path, framing, min_reward=0.0, max_per_example=1)
    assert replies(best, framing) == ["{B<|end|>}", "{H<|end|>}"]
    # Example 0 has B, G, A and C.
    assert best.counts["rollouts over sft.max_per_example"] == 3
    two = choose(path, framing, min_reward=0.0, max_per_example=2)
    assert replies(two, framing) == ["{B<|end|>}", "{G<|end|>}", "{H<|end|>}"]


def test_nothing_left_is_refused_and_says_why(tmp_path: Path, framing: Framing) -> None:
    path = write_run(tmp_path, *record(framing))
    with pytest.raises(DataError, match=r"10 rollouts are recorded, .*6 rollouts below sft.min_reward"):
        choose(path, framing, min_reward=2.0)
    with pytest.raises(DataError, match="0 rollouts are recorded"):
        choose(write_run(tmp_path / "empty"), framing)


def test_a_folder_that_is_no_run_is_refused(tmp_path: Path, framing: Framing) -> None:
    (tmp_path / "folder").mkdir()
    with pytest.raises(StoreError):
        choose(tmp_path / "folder", framing)


def test_rollouts_of_another_tokenizer_are_refused(tmp_path: Path, framing: Framing) -> None:
    foreign = roll(framing, 0, "B", 1.0)
    shifted = replace(foreign.turns[0], token_ids=foreign.turns[0].token_ids + 1)
    path = write_run(tmp_path, [replace(foreign, turns=(shifted, *foreign.turns[1:]))])
    with pytest.raises(DataError, match="tokenizer, prompt format or task"):
        choose(path, framing)
    misread = replace(foreign.turns[1], text="X")
    other = write_run(tmp_path / "misread", [replace(foreign, turns=(foreign.turns[0], misread))])
    with pytest.raises(DataError, match="tokenizer, prompt format or task"):
        choose(other, framing)


def test_rollouts_asked_otherwise_than_the_run_asks_are_refused(tmp_path: Path, framing: Framing) -> None:
    class Reworded(SpellTask):
        def render(self, example: Any) -> tuple[Message, ...]:
            return (Message(role="user", content=f"Number {example.fields['n']}"),)

    path = write_run(tmp_path, [roll(framing, 0, "B", 1.0)])
    with pytest.raises(DataError, match=r"asked with '<.start.>user.n#0<.end.>"):
        choose(path, replace(framing, task=Reworded()))


def test_a_record_that_holds_a_terminator_in_place_of_the_stop_string_teaches_the_same(
    tmp_path: Path, framing: Framing
) -> None:
    # So they were recorded once.
    tokenizer, now = framing.tokenizer, roll(framing, 0, "H|Q:", 1.0, end=FinishReason.STOP_STRING)
    spoken = roll(framing, 0, "H", 1.0, end=FinishReason.STOP_STRING)
    end = Turn(role="terminator", text="<|end|>", token_ids=np.array([tokenizer.eos_id], dtype=np.int32))
    before = replace(spoken, turns=(*spoken.turns, end))
    found = [
        choose(write_run(tmp_path / name, [one]), framing).members
        for name, one in (("now", now), ("before", before))
    ]
    assert [member.content for (member,) in found] == [found[0][0].content] * 2
    assert found[0][0].is_trained.all()


def test_a_conversation_is_cut_where_it_was_rendered_anew(tmp_path: Path, framing: Framing) -> None:
    tokenizer, start = framing.tokenizer, roll(framing, 0, "B", 1.0)
    anew = Turn(role="restart", text="anew", token_ids=tokenizer.encode("anew"))
    told = Turn(role="prompt", text="told", token_ids=tokenizer.encode("told"))
    second, third = (roll(framing, 0, text, 1.0).turns[1] for text in "CD")
    path = write_run(tmp_path, [replace(start, turns=(*start.turns, told, second, anew, third))])
    found = choose(path, framing)
    assert replies(found, framing) == ["{B<|end|>}told{C<|end|>}", "{D<|end|>}"]
    assert tokenizer.decode(found.members[1].prompt_ids) == "anew"


def test_what_is_recorded_is_what_an_attempt_left(tmp_path: Path, framing: Framing) -> None:
    # The run stays as it was: it is read, never locked.
    path = write_run(tmp_path, *record(framing))
    with RunDir.open(path):
        assert len(choose(path, framing, min_reward=0.5).members) == 4
