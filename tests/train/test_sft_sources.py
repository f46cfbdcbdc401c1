"""Demonstrations from a data file, or from recorded rollouts."""

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
from strop.rollout import FailureOwner, FinishReason, Message, Outcome, Rollout, Split, Turn, make_example
from strop.spec import load_spec
from strop.spec.offline import SftSpec
from strop.store.data_files import collect_data_files
from strop.tasks import build_task
from strop.tasks.generated import ArithmeticSpec
from strop.tasks.prompt import render_prompt
from strop.train.data.offline import (
    Demonstration,
    Demonstrations,
    Framing,
    find_source,
    read_demonstrations,
    read_framing,
)
from strop.train.data.sft_sources import read_run_demonstrations, refuse_held_out
from tests.fixtures.builders import rollout_of
from tests.fixtures.demonstrations import make_framing, read, spell, write_rows
from tests.fixtures.saved_data import save_split
from tests.fixtures.spell import SpellTask
from tests.fixtures.tiny_run import new_run
from tests.fixtures.tiny_tokenizer import tiny_tokenizer

TALK = [
    {"role": "system", "content": "S"},
    {"role": "user", "content": "A?"},
    {"role": "assistant", "content": "B"},
    {"role": "user", "content": "C?"},
    {"role": "assistant", "content": "D"},
]
OPENING = "<|start|>system\nS<|end|>\n<|start|>user\nA?<|end|>\n<|start|>assistant\n"
BETWEEN = "\n<|start|>user\nC?<|end|>\n<|start|>assistant\n"


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    return tiny_tokenizer(tmp_path / "model")


def read_one(model_dir: Path, tmp_path: Path, row: dict[str, Any], **settings: Any) -> Demonstration:
    (member,) = read(write_rows(tmp_path / "rows.jsonl", [row]), make_framing(model_dir), **settings).members
    return member


@pytest.mark.parametrize("completion", ["42", "42<|end|>", "42<|end|>\n", "42<|end|><|end|> "])
def test_tok_4_a_completion_is_ended_exactly_once(model_dir: Path, tmp_path: Path, completion: str) -> None:
    member = read_one(model_dir, tmp_path, {"prompt": "6 * 7?", "completion": completion})
    framing = make_framing(model_dir)
    assert spell(framing.tokenizer, member) == (
        "<|start|>user\n6 * 7?<|end|>\n<|start|>assistant\n",
        "{42<|end|>}",
    )
    # The same ids as a task that asks this gets from the run's own renderer.
    asked = [Message(role="user", content="6 * 7?")]
    _, prompt_ids = render_prompt(framing.tokenizer, asked, framing.prompt_format)
    assert member.prompt_ids.tolist() == member.asked_ids.tolist() == prompt_ids.tolist()
    assert (member.weight, len(member.prompt_id)) == (1.0, 16)


def test_a_chat_ends_as_its_template_ends_it_and_not_as_a_text_does(model_dir: Path, tmp_path: Path) -> None:
    """Incident: a base model's end of text was taught behind replies to chats, and ended none."""
    path = model_dir / "tokenizer_config.json"
    path.write_text(path.read_text().replace('"eos_token": "<|end|>"', '"eos_token": "the"'))
    member = read_one(model_dir, tmp_path, {"prompt": "6 * 7?", "completion": "42"})
    tokenizer = make_framing(model_dir).tokenizer
    assert tokenizer.token_text(tokenizer.eos_id) == "the"
    assert spell(tokenizer, member)[1] == "{42<|end|>}"
    assert tokenizer.token_id("<|end|>") in tokenizer.stop_token_ids


def test_a_base_model_is_asked_in_plain_text(tmp_path: Path) -> None:
    model_dir = tiny_tokenizer(tmp_path / "base", with_chat_template=False)
    member = read_one(model_dir, tmp_path, {"prompt": "6 * 7?", "completion": "42"})
    assert spell(make_framing(model_dir).tokenizer, member) == ("6 * 7?\n", "{42<|end|>}")


@pytest.mark.parametrize(
    ("train_on", "prompt", "text"),
    [
        ("assistant", OPENING, "{B<|end|>}" + BETWEEN + "{D<|end|>}"),
        ("last", OPENING, "B<|end|>" + BETWEEN + "{D<|end|>}"),
        # All but the first token, which nothing predicts.
        ("all", "<|start|>", "{" + OPENING.removeprefix("<|start|>") + "B<|end|>" + BETWEEN + "D<|end|>}"),
    ],
)
def test_what_of_a_conversation_is_trained(
    model_dir: Path, tmp_path: Path, train_on: str, prompt: str, text: str
) -> None:
    # Of other columns nothing is read.
    row = {"messages": TALK, "id": 7, "source": None, "tools": []}
    member = read_one(model_dir, tmp_path, row, train_on=train_on)
    tokenizer = make_framing(model_dir).tokenizer
    assert spell(tokenizer, member) == (prompt, text)
    assert member.asked_ids.tolist() == tokenizer.encode(OPENING).tolist()


def test_a_completion_answers_messages_without_one(model_dir: Path, tmp_path: Path) -> None:
    row = {"messages": [{**said, "tool_calls": None} for said in TALK[:2]], "completion": "B"}
    assert spell(make_framing(model_dir).tokenizer, read_one(model_dir, tmp_path, row)) == (
        OPENING,
        "{B<|end|>}",
    )


def test_where_the_template_rewrites_what_was_said_a_new_demonstration_begins(
    model_dir: Path, tmp_path: Path
) -> None:
    # Replies of earlier turns are written in brackets, so ids cannot be extended.
    (model_dir / "chat_template.jinja").write_text(
        "{% for m in messages %}{{ '[' + m['content'] + ']' if m['role'] == 'assistant' else m['content'] }}"
        "{% endfor %}{% if add_generation_prompt %}>{% endif %}"
    )
    framing = make_framing(model_dir)
    path = write_rows(tmp_path / "rows.jsonl", [{"messages": TALK[1:]}])
    found = [spell(framing.tokenizer, member) for member in read(path, framing).members]
    assert found == [("A?>", "{B<|end|>}"), ("A?[B]C?>", "{D<|end|>}")]
    (last,) = read(path, framing, train_on="last").members
    assert spell(framing.tokenizer, last) == ("A?[B]C?>", "{D<|end|>}")
    with pytest.raises(DataError, match="row 1 is trained on in full"):
        read(path, framing, train_on="all")


ASKED = {"prompt": "A?", "completion": "B"}


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"completion": "B"}, "prompt=''"),
        ({"prompt": "A?"}, r"roles=\['user'\]"),
        ({"prompt": "A?", "completion": " "}, "assistant.*' '"),
        ({"prompt": 7, "completion": "B"}, "prompt=7"),
        ({"messages": "A?"}, "is no demonstration"),
        ({"messages": [{"role": "user", "content": "A", "name": "x"}]}, "name='x'"),
        ({"messages": [*TALK[:4], {"role": "assistant", "content": None}]}, "messages"),
        ({"messages": TALK[:4]}, "roles"),
        ({"messages": TALK[2:]}, "roles"),
        ({"messages": TALK, "completion": "B"}, "roles"),
        (ASKED | {"weight": 0}, "weight=0"),
        ({"prompt": "A?", "completion": "<|end|>"}, "goes on behind a terminator, or is one"),
        ({"prompt": "A?", "completion": "B<|end|>C"}, "goes on behind a terminator"),
        (["A?", "B"], "line 2: list"),
    ],
)
def test_a_bad_row_is_refused_with_its_place(model_dir: Path, tmp_path: Path, row: Any, words: str) -> None:
    path = write_rows(tmp_path / "rows.jsonl", [ASKED, row])
    with pytest.raises(DataError, match=words) as caught:
        read(path, make_framing(model_dir))
    assert f"{path}" in str(caught.value)
    assert "row 2" in str(caught.value) or "line 2" in str(caught.value)


def test_messages_that_the_template_refuses_name_the_row(model_dir: Path, tmp_path: Path) -> None:
    (model_dir / "chat_template.jinja").write_text(
        "{{ raise_exception('no system here') if messages | length == 1 }}{{ messages[-1].content }}"
    )
    path = write_rows(tmp_path / "rows.jsonl", [ASKED])
    with pytest.raises(DataError, match=r"row 1 cannot be rendered: .*no system here"):
        read(path, make_framing(model_dir))


@pytest.mark.parametrize(("text", "words"), [('{"prompt": "A"', "line 1"), ("", "it has no row")])
def test_a_torn_or_empty_file_is_refused(model_dir: Path, tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(text)
    with pytest.raises(DataError, match=words):
        read(path, make_framing(model_dir))


def test_the_same_row_twice_is_kept_once_and_counted(model_dir: Path, tmp_path: Path) -> None:
    path = write_rows(tmp_path / "rows.jsonl", [ASKED, ASKED | {"completion": "B<|end|>"}])
    assert read(path, make_framing(model_dir)).describe() == f"1 demonstrations from {path} (1 repeated)"


def test_what_does_not_fit_is_dropped_counted_and_bounded(model_dir: Path, tmp_path: Path) -> None:
    rows = [{"prompt": f"{n}?", "completion": "B"} for n in range(17)]
    # 15 letters and a terminator are the 16 tokens of the limit; one more is over it.
    rows += [{"prompt": "fits", "completion": "X" * 15}, {"prompt": "long", "completion": "X" * 16}]
    rows += [{"prompt": "P" * 100, "completion": "B"}, {"prompt": "stop", "completion": "B Q: C"}]
    path = write_rows(tmp_path / "rows.jsonl", rows)
    framing = make_framing(model_dir, max_positions=60)
    found = read(path, framing, max_dropped_frac=3 / 21)
    assert len(found.members) == 18
    assert found.describe().endswith(
        "(1 with a reply over task.max_reply_tokens; 1 longer than the model's positions; 1 with a stop"
        " string of the task)"
    )
    with pytest.raises(DataError, match=r"3 of 21 demonstrations .*more than sft.max_dropped_frac=0.14"):
        read(path, framing, max_dropped_frac=0.14)
    write_rows(path, rows[-2:-1] * 2)
    with pytest.raises(DataError, match="2 of 2 demonstrations"):
        read(path, framing, max_dropped_frac=0.99)


def test_the_digest_names_ids_marks_and_weights(model_dir: Path, tmp_path: Path) -> None:
    framing = make_framing(model_dir, SpellTask())
    variants: list[dict[str, Any]] = [
        {},
        {"weight": 2.0},
        {"completion": "C"},
        {"prompt": "C?"},
    ]
    paths = [write_rows(tmp_path / f"{n}.jsonl", [{**ASKED, **v}]) for n, v in enumerate([*variants, {}])]
    digests = [read(path, framing).digest for path in paths]
    assert digests[0] == digests[-1]
    assert len(set(digests)) == len(variants)


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
    return rollout_of(example, turns, scored, step=step)


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


@pytest.mark.parametrize(
    ("settings", "texts", "counts"),
    [
        ({}, "BG", {"rollouts below sft.min_reward": 4}),
        ({"min_reward": 0.5}, "BGAH", {"rollouts below sft.min_reward": 1, "repeated rollouts": 1}),
        # Example 0 has B, G, A and C.
        ({"min_reward": 0.0, "max_per_example": 1}, "BH", {"rollouts over sft.max_per_example": 3}),
        ({"min_reward": 0.0, "max_per_example": 2}, "BGH", {"rollouts over sft.max_per_example": 2}),
    ],
)
def test_exactly_the_rollouts_that_earned_enough_are_taken(
    tmp_path: Path, framing: Framing, settings: dict[str, Any], texts: str, counts: dict[str, int]
) -> None:
    path = write_run(tmp_path, *record(framing))
    # The run stays as it was: it is read, never locked.
    with RunDir.open(path):
        found = choose(path, framing, **settings)
    assert replies(found, framing) == [f"{{{text}<|end|>}}" for text in texts]
    assert [one.prompt_id for one in found.members] == [EXAMPLES[text == "H"].example_id for text in texts]
    counts |= {"rollouts without a whole reply": 2, "rollouts without a score": 2}
    assert counts.items() <= found.counts.items()


def test_nothing_left_is_refused_and_says_why(tmp_path: Path, framing: Framing) -> None:
    path = write_run(tmp_path, *record(framing))
    with pytest.raises(DataError, match=r"10 rollouts are recorded, .*6 rollouts below sft.min_reward"):
        choose(path, framing, min_reward=2.0)
    with pytest.raises(DataError, match="0 rollouts are recorded"):
        choose(write_run(tmp_path / "empty"), framing)


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


# What the datasets library saved, and tables.


@pytest.mark.parametrize("kind", ["split", "csv"])
def test_demonstrations_that_users_already_have(tiny_model_dir: Path, tmp_path: Path, kind: str) -> None:
    rows = [{"prompt": f"{n} * 7?", "completion": str(n * 7)} for n in range(20)]
    source = tmp_path / ("rows.csv" if kind == "csv" else "saved")
    if kind == "split":
        save_split(rows, source, num_files=2)
    else:
        source.write_text("prompt,completion\n" + "".join(f"{r['prompt']},{r['completion']}\n" for r in rows))
    words = ["name=x", "task.name=arithmetic", "train.terms=sft", f"sft.source={source}"]
    spec = load_spec(None, words).spec
    with collect_data_files() as files:
        framing = read_framing(tiny_model_dir, build_task(spec.task), spec.model.prompt_format)
        found = read_demonstrations(spec.sft, framing)
    assert len(found.members) == 20
    assert {file.source for file in files} == {str(source)}
