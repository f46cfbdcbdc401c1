"""Rows of a data file: what each key means, and what is refused with the row's place."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from strop.errors import DataError
from strop.rollout import Message
from strop.tasks.prompt import render_prompt
from strop.train.demonstrations import Demonstration
from tests.fixtures.demonstrations import make_framing, read, spell, write_rows
from tests.fixtures.tiny_run import SpellTask
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
def test_a_completion_is_ended_exactly_once(model_dir: Path, tmp_path: Path, completion: str) -> None:
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
@pytest.mark.parametrize("is_in_row", [True, False])
def test_what_of_a_conversation_is_trained(
    model_dir: Path, tmp_path: Path, train_on: str, prompt: str, text: str, is_in_row: bool
) -> None:
    row = {"messages": TALK} | ({"train_on": train_on} if is_in_row else {})
    settings = {} if is_in_row else {"train_on": train_on}
    member = read_one(model_dir, tmp_path, row, **settings)
    tokenizer = make_framing(model_dir).tokenizer
    assert spell(tokenizer, member) == (prompt, text)
    assert member.asked_ids.tolist() == tokenizer.encode(OPENING).tolist()


def test_the_row_has_the_last_word_on_what_is_trained(model_dir: Path, tmp_path: Path) -> None:
    member = read_one(model_dir, tmp_path, {"messages": TALK, "train_on": "last"}, train_on="all")
    # D and its terminator.
    assert int(member.is_trained.sum()) == 2


def test_a_completion_answers_messages_without_one(model_dir: Path, tmp_path: Path) -> None:
    row = {"messages": TALK[:2], "completion": "B"}
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
    with pytest.raises(DataError, match="row 1 is trained on in full, and the chat template rewrites"):
        read(path, framing, train_on="all")


ASKED = {"prompt": "A?", "completion": "B"}


@pytest.mark.parametrize(
    ("row", "words"),
    [
        (ASKED | {"promt_id": "x"}, r"unknown keys \['promt_id'\]\. Allowed: prompt, messages"),
        ({"completion": "B"}, "both prompt and messages, or neither"),
        (ASKED | {"messages": TALK}, "both prompt and messages, or neither"),
        ({"prompt": "A?"}, "a prompt and no completion"),
        ({"prompt": "A?", "completion": " "}, "completion=' '"),
        ({"prompt": 7, "completion": "B"}, "prompt='7'"),
        ({"messages": "A?"}, "messages that are no list"),
        ({"messages": []}, "no list, or an empty one"),
        ({"messages": [{"role": "user"}]}, "has the message {'role': 'user'}"),
        ({"messages": [{"role": "user", "content": "A", "name": "x"}]}, "has the message"),
        ({"messages": [*TALK[:4], {"role": "assistant", "content": None}]}, "has the message"),
        ({"messages": TALK[:4]}, "a reply of the assistant last"),
        ({"messages": TALK[2:]}, "a question first"),
        ({"messages": TALK, "completion": "B"}, "something between two replies"),
        (ASKED | {"prompt_id": 7}, "prompt_id='7'"),
        (ASKED | {"problem": ""}, "problem=''"),
        (ASKED | {"source": ["x"]}, "source="),
        (ASKED | {"train_on": "none"}, "train_on='none'. Allowed: assistant, last, all"),
        (ASKED | {"weight": 0}, "weight=0"),
        (ASKED | {"weight": True}, "weight=True"),
        (ASKED | {"weight": "1"}, "weight='1'"),
        (ASKED | {"weight": float("nan")}, "weight=nan"),
        (ASKED | {"weight": -1.0}, "weight=-1.0"),
        ({"prompt": "A?", "completion": "<|end|>"}, "only a terminator"),
        ({"prompt": "A?", "completion": "B<|end|>C"}, "goes on behind one"),
        (["A?", "B"], "line 2 is a list"),
    ],
)
def test_a_bad_row_is_refused_with_its_place(model_dir: Path, tmp_path: Path, row: Any, words: str) -> None:
    path = write_rows(tmp_path / "rows.jsonl", [ASKED, row])
    with pytest.raises(DataError, match=words) as caught:
        read(path, make_framing(model_dir))
    assert f"{path}" in str(caught.value)
    assert "row 2" in str(caught.value) or "line 2" in str(caught.value)


def test_messages_that_the_template_refuses_name_the_row(model_dir: Path, tmp_path: Path) -> None:
    (model_dir / "chat_template.jinja").write_text("{{ raise_exception('no system here') }}")
    path = write_rows(tmp_path / "rows.jsonl", [ASKED])
    with pytest.raises(DataError, match=r"row 1 cannot be rendered: .*no system here"):
        read(path, make_framing(model_dir))


@pytest.mark.parametrize(("text", "words"), [('{"prompt": "A"', "line 1"), ("", "it has no row")])
def test_a_torn_or_empty_file_is_refused(model_dir: Path, tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(text)
    with pytest.raises(DataError, match=words):
        read(path, make_framing(model_dir))


def test_a_prompt_id_names_one_prompt(model_dir: Path, tmp_path: Path) -> None:
    rows = [{"prompt": "A?", "completion": text, "prompt_id": "p"} for text in ("B", "C")]
    path = write_rows(tmp_path / "rows.jsonl", rows)
    framing = make_framing(model_dir)
    assert [member.prompt_id for member in read(path, framing).members] == ["p", "p"]
    write_rows(path, [*rows, {"prompt": "D?", "completion": "B", "prompt_id": "p"}])
    with pytest.raises(DataError, match=r"prompt_id='p' names different prompts in .*row 1 and .*row 3"):
        read(path, framing)


def test_a_subset_is_chosen_and_counted(model_dir: Path, tmp_path: Path) -> None:
    rows = [{"prompt": f"{n}?", "completion": "B", "source": "ab"[n % 2]} for n in range(5)]
    path = write_rows(tmp_path / "rows.jsonl", rows)
    framing = make_framing(model_dir)
    found = read(path, framing, subset="b")
    assert found.describe() == f"2 demonstrations from {path} (3 rows of other sources)"
    with pytest.raises(
        DataError, match=r"subset='c' chose none of its rows, 3 of source 'a', 2 of source 'b'"
    ):
        read(path, framing, subset="c")


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


def test_dropping_everything_is_refused_however_large_the_share(model_dir: Path, tmp_path: Path) -> None:
    path = write_rows(tmp_path / "rows.jsonl", [{"prompt": "P" * 100, "completion": "B"}] * 2)
    with pytest.raises(DataError, match="2 of 2 demonstrations"):
        read(path, make_framing(model_dir, max_positions=60), max_dropped_frac=0.99)


def test_rows_of_parquet_are_rows(model_dir: Path, tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [
        {**ASKED, "weight": 2.0, "problem": None},
        {"prompt": "C?", "completion": "D", "weight": None, "problem": "p  q"},
    ]
    path = tmp_path / "rows.parquet"
    pq.write_table(pa.Table.from_pylist(rows), path)
    found = read(path, make_framing(model_dir))
    assert [member.weight for member in found.members] == [2.0, 1.0]
    assert found.problems == {"p q"}


def test_the_digest_names_ids_marks_and_weights(model_dir: Path, tmp_path: Path) -> None:
    framing = make_framing(model_dir, SpellTask())
    variants: list[dict[str, Any]] = [
        {},
        {"weight": 2.0},
        {"train_on": "all"},
        {"completion": "C"},
        {"prompt": "C?"},
    ]
    paths = [write_rows(tmp_path / f"{n}.jsonl", [{**ASKED, **v}]) for n, v in enumerate([*variants, {}])]
    digests = [read(path, framing).digest for path in paths]
    assert digests[0] == digests[-1]
    assert len(set(digests)) == len(variants)


def test_a_completion_of_a_megabyte_is_read_and_dropped(model_dir: Path, tmp_path: Path) -> None:
    rows = [{"prompt": f"{n}?", "completion": "B"} for n in range(99)]
    path = write_rows(tmp_path / "rows.jsonl", [*rows, {"prompt": "A?", "completion": "X" * 2**20}])
    found = read(path, make_framing(model_dir))
    assert (len(found.members), sum(found.counts.values())) == (99, 1)
    assert np.all([member.num_tokens < 512 for member in found.members])
