"""The four tasks whose replies must follow instructions, on rows of our own in the published columns."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from strop.errors import ConfigError, DataError
from strop.rollout import Example, Split
from strop.spec import TaskSpec
from strop.tasks import Task, build_task, describe_counts
from strop.tasks.instructions.replies import is_echo, judged_text, variants
from strop.tasks.instructions.tasks import IfBenchSpec, IfEvalSpec, IfMultiSpec, RlvrIfevalSpec
from tests.fixtures.judging import run_self_test
from tests.tasks.instructions.instruction_cases import (
    BENCH_ARGUMENTS,
    GOOGLE_ARGUMENTS,
    MULTI_ARGUMENTS,
    RLVR_ARGUMENTS,
    Arguments,
)

pytest.importorskip("langdetect")

Row = dict[str, Any]

TWO_PARTS = ["punctuation:no_comma", "detectable_format:number_bullet_lists"]


def eval_row(key: int, cases: dict[str, Arguments]) -> Row:
    """A row of IFEval or IFBench; the published tables name every argument and leave most empty."""
    names = {name for arguments in cases.values() for name in arguments}
    tables = [{name: arguments.get(name) for name in names} for arguments in cases.values()]
    prompt = f"Write about the sea, please. Task {key}, following {', '.join(cases)}."
    return {"key": key, "prompt": prompt, "instruction_id_list": list(cases), "kwargs": tables}


def messages(text: str) -> list[Row]:
    return [{"role": "user", "content": text}]


def rlvr_row(function: str, arguments: Arguments) -> Row:
    unused = dict.fromkeys(("N", "quantifier", "end_phrase", "word", "i", "options"))
    truth = json.dumps({"func_name": function, **unused, **arguments})
    return {
        "messages": messages(f"Write about the sea, please: {function} {json.dumps(dict(arguments))}"),
        "ground_truth": truth,
        "constraint_type": function,
        "constraint": "as said",
        "dataset": "ifeval",
    }


def multi_row(cases: dict[str, Arguments | None], number: int = 0) -> Row:
    truth = repr([{"instruction_id": list(cases), "kwargs": list(cases.values())}])
    text = f"Write about the sea, please ({number}): {', '.join(cases)}"
    return {"messages": messages(text), "ground_truth": truth, "constraint_type": "multi", "constraint": "-"}


def write(path: Path, rows: Sequence[Row]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


@pytest.fixture
def ifeval_file(tmp_path: Path) -> str:
    rows = [eval_row(number, {id_: case}) for number, (id_, case) in enumerate(GOOGLE_ARGUMENTS.items())]
    rows.append(eval_row(99, {id_: GOOGLE_ARGUMENTS[id_] for id_ in TWO_PARTS}))
    return write(tmp_path / "ifeval.jsonl", rows)


@pytest.fixture
def multi_file(tmp_path: Path) -> str:
    rows = [multi_row({id_: case or None}, n) for n, (id_, case) in enumerate(MULTI_ARGUMENTS.items())]
    return write(tmp_path / "multi.jsonl", rows)


def ifeval(source: str, **settings: Any) -> Task:
    return build_task(IfEvalSpec(name="ifeval", source=source, **settings))


def last(task: Task) -> Example:
    return task.examples(Split.HELD_OUT)[-1]


def test_ifeval_is_for_evaluation_only(ifeval_file: str) -> None:
    task = ifeval(ifeval_file)
    assert task.examples(Split.TRAIN) == ()
    assert len(task.examples(Split.HELD_OUT)) == 26
    assert len(ifeval(ifeval_file, num_held_out=3).examples(Split.HELD_OUT)) == 3
    assert (task.limits.max_reply_tokens, task.limits.stop_strings) == (4096, ())


def test_the_prompt_is_the_users_text(ifeval_file: str) -> None:
    task = ifeval(ifeval_file)
    (message,) = task.render(last(task))
    assert message.text == f"Write about the sea, please. Task 99, following {', '.join(TWO_PARTS)}."
    assert message.role == "user"


def test_parquet_and_jsonl_make_the_same_task(tmp_path: Path, ifeval_file: str) -> None:
    rows = [json.loads(line) for line in Path(ifeval_file).read_text().splitlines()]
    names = {name for row in rows for table in row["kwargs"] for name in table}
    for row in rows:  # the published file names every argument in every table
        row["kwargs"] = [{name: table.get(name) for name in sorted(names)} for table in row["kwargs"]]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "ifeval.parquet")
    assert ifeval(str(tmp_path / "ifeval.parquet")).version == ifeval(ifeval_file).version


def test_ifeval_scores_all_instructions_and_counts_each(ifeval_file: str) -> None:
    task = ifeval(ifeval_file)
    example = last(task)  # no comma, three bullets
    outcome = task.verify(example, "Of the sea:\n* blue\n* wide\n* deep")
    assert (outcome.parts, outcome.is_correct, outcome.format_ok) == ({"correct": 1.0}, True, True)
    half = task.verify(example, "The sea is blue and wide")
    assert (half.parts, half.is_correct) == ({"correct": 0.0}, False)
    assert half.metrics == {
        "instructions_total": 2.0,
        "instructions_satisfied": 1.0,
        "instructions_satisfied_loose": 1.0,
        "correct_strict": 0.0,
        "correct_loose": 0.0,
    }


def test_strictness_chooses_the_score_and_both_are_reported(ifeval_file: str) -> None:
    # The first line has the comma; without it, every instruction is followed.
    reply = "Sure, gladly:\nOf the sea:\n* blue\n* wide\n* deep"
    for strictness, score in (("strict", 0.0), ("loose", 1.0)):
        task = ifeval(ifeval_file, strictness=strictness)
        outcome = task.verify(last(task), reply)
        assert outcome.reward == score
        assert (outcome.metrics["correct_strict"], outcome.metrics["correct_loose"]) == (0.0, 1.0)


def test_variants_are_the_eight_of_loose_mode() -> None:
    assert variants("*a*\nb\n*c") == ["*a*\nb\n*c", "b\n*c", "*a*\nb", "b", "a\nb\nc", "b\nc", "a\nb"]
    assert variants("a") == ["a", ""]


@pytest.mark.parametrize(
    ("reply", "judged"),
    [
        ("<think>no, never</think>\nSo it is", "So it is"),
        ("never,</think> So it is", "So it is"),
        ("<think>one</think> two <think>three</think> So", "So"),
        (" So it is\n", " So it is\n"),
        ("<think>So it is", None),
        ("<think>one</think> two <think>three", None),
        ("<think>one</think>", ""),
    ],
)
def test_judged_is_what_stands_behind_the_reasoning(reply: str, judged: str | None) -> None:
    assert judged_text(reply) == judged


def test_unclosed_reasoning_and_silence_are_no_format(ifeval_file: str) -> None:
    task = ifeval(ifeval_file)
    for reply in ("<think>Of the sea:\n* a\n* b\n* c", "<think>well</think> \n", "", " \n"):
        outcome = task.verify(last(task), reply)
        assert (outcome.reward, outcome.format_ok, outcome.is_correct) == (0.0, False, False)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Say it now", True),
        (" say  it\nnow 7", False),
        ("Say it\nnow! 42 a", True),
        ("Say it now and I did", False),
    ],
)
def test_an_echo_is_the_prompt_and_next_to_nothing(text: str, expected: bool) -> None:
    assert is_echo(text, "Say it now") is expected


def test_an_echo_earns_nothing_under_own_rules(tmp_path: Path) -> None:
    row = eval_row(1, {"punctuation:no_comma": {}})
    row["prompt"] = "Write about the sea without commas"
    source = write(tmp_path / "one.jsonl", [row])
    assert [
        ifeval(source, rules=rules).verify(last(ifeval(source)), row["prompt"]).reward
        for rules in ("own", "lm-eval")
    ] == [0.0, 1.0]


@pytest.mark.parametrize(
    ("reply", "own", "harness"),
    [
        # A comma in a thought is a comma to the harness, and a thought without an end is a reply.
        ("<think>Well, salt.</think>The sea is salt water.", 1.0, 0.0),
        ("<think>The sea is salt water.", 0.0, 1.0),
    ],
)
def test_the_harness_rules_know_no_thinking(tmp_path: Path, reply: str, own: float, harness: float) -> None:
    source = write(tmp_path / "one.jsonl", [eval_row(1, {"punctuation:no_comma": {}})])
    for rules, reward in (("own", own), ("lm-eval", harness)):
        task = ifeval(source, rules=rules)
        assert task.verify(last(task), reply).reward == reward


def test_the_harness_rules_tell_what_is_left_to_chance(tmp_path: Path) -> None:
    source = write(
        tmp_path / "one.jsonl", [eval_row(1, {"detectable_format:number_bullet_lists": {"num_bullets": 0}})]
    )
    task = ifeval(source, rules="lm-eval")
    outcome = task.verify(last(task), "none at all")
    assert (outcome.reward, outcome.metrics["instructions_drawn"]) == (1.0, 1.0)
    assert task.limits.verify_limit_s is not None
    assert task.version != ifeval(source).version


def test_the_harness_rules_need_a_sentence_splitter(
    ifeval_file: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from strop.tasks.instructions import tasks

    def refuse() -> None:
        raise ConfigError("no Punkt here")

    monkeypatch.setattr(tasks, "load_punkt", refuse)
    with pytest.raises(ConfigError, match="no Punkt here"):
        ifeval(ifeval_file, rules="lm-eval").examples(Split.HELD_OUT)
    assert ifeval(ifeval_file).examples(Split.HELD_OUT)


def test_without_langdetect_the_task_says_what_to_install(
    ifeval_file: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from strop.tasks.instructions import segments

    monkeypatch.setattr(segments, "find_spec", lambda _: None)
    with pytest.raises(ConfigError, match=r"langdetect is not installed.*Next: pip install 'strop\[tasks\]'"):
        ifeval(ifeval_file, rules="lm-eval").examples(Split.HELD_OUT)


def test_ifbench_refuses_or_leaves_out_what_it_cannot_judge(tmp_path: Path) -> None:
    rows = [eval_row(n, {id_: case}) for n, (id_, case) in enumerate(BENCH_ARGUMENTS.items())]
    rows.insert(1, eval_row(77, {"count:words_french": {"N": 3}}))
    source = write(tmp_path / "bench.jsonl", rows)
    task = build_task(IfBenchSpec(name="ifbench", source=source))
    with pytest.raises(
        DataError, match=r"row 2 asks for the instruction 'count:words_french', which has no checker"
    ):
        task.examples(Split.HELD_OUT)
    kept = build_task(IfBenchSpec(name="ifbench", source=source, skip_unjudged=True))
    assert len(kept.examples(Split.HELD_OUT)) == len(BENCH_ARGUMENTS)
    assert describe_counts(kept) == "rows left out, no checker: 1"
    few = build_task(IfBenchSpec(name="ifbench", source=source, skip_unjudged=True, num_held_out=5))
    assert len(few.examples(Split.HELD_OUT)) == 5
    nothing = write(tmp_path / "nothing.jsonl", rows[1:2])
    with pytest.raises(DataError, match=r"all 1 rows of .* have an instruction without a checker"):
        build_task(IfBenchSpec(name="ifbench", source=nothing, skip_unjudged=True)).examples(Split.HELD_OUT)


def test_a_misspelt_id_is_refused_even_where_rows_are_left_out(tmp_path: Path) -> None:
    source = write(tmp_path / "bench.jsonl", [eval_row(1, {"count:pronoun": {}})])
    task = build_task(IfBenchSpec(name="ifbench", source=source, skip_unjudged=True))
    with pytest.raises(DataError, match="'count:pronoun', which has no checker"):
        task.examples(Split.HELD_OUT)


def test_rlvr_holds_out_by_content(tmp_path: Path) -> None:
    rows = [rlvr_row(function, case) for function, case in RLVR_ARGUMENTS.items()]
    task = build_task(RlvrIfevalSpec(name="rlvr-ifeval", source=write(tmp_path / "rlvr.jsonl", rows)))
    turned = build_task(
        RlvrIfevalSpec(name="rlvr-ifeval", source=write(tmp_path / "turned.jsonl", rows[::-1]))
    )
    ids = {example.example_id for example in task.examples(Split.HELD_OUT)}
    assert (len(task.examples(Split.TRAIN)), len(ids)) == (23, 2)  # a tenth of 25
    assert {example.example_id for example in turned.examples(Split.HELD_OUT)} == ids
    assert task.limits.max_reply_tokens == 2048


def test_if_multi_pays_the_share_or_all(tmp_path: Path) -> None:
    rows = [multi_row({id_: MULTI_ARGUMENTS[id_] or None for id_ in TWO_PARTS}, n) for n in range(10)]
    source = write(tmp_path / "multi.jsonl", rows)
    reply = "The sea is blue <answer>and wide</answer>"
    for all_or_nothing, parts in ((False, {"satisfied_frac": 0.5}), (True, {"correct": 0.0})):
        task = build_task(IfMultiSpec(name="if-multi", source=source, all_or_nothing=all_or_nothing))
        outcome = task.verify(task.examples(Split.TRAIN)[0], reply)
        assert (outcome.parts, outcome.is_correct) == (parts, False)
        assert outcome.metrics == {"instructions_total": 2.0, "instructions_satisfied": 1.0}


def test_answer_tags_are_not_judged_in_if_multi(tmp_path: Path) -> None:
    rows = [multi_row({"last_word:last_word_answer": {"last_word": "blue"}}, n) for n in range(2)]
    task = build_task(IfMultiSpec(name="if-multi", source=write(tmp_path / "multi.jsonl", rows)))
    assert task.verify(task.examples(Split.TRAIN)[0], "<answer>The sea is blue</answer>").reward == 1.0


@pytest.mark.parametrize("name", ["ifeval", "ifbench", "rlvr-ifeval", "if-multi"])
def test_self_test_passes(name: str, tmp_path: Path, ifeval_file: str, multi_file: str) -> None:
    bench = [eval_row(n, {id_: case}) for n, (id_, case) in enumerate(BENCH_ARGUMENTS.items())]
    specs: dict[str, TaskSpec] = {
        "ifeval": IfEvalSpec(name="ifeval", source=ifeval_file),
        "ifbench": IfBenchSpec(name="ifbench", source=write(tmp_path / "bench.jsonl", bench)),
        "rlvr-ifeval": RlvrIfevalSpec(
            name="rlvr-ifeval",
            source=write(tmp_path / "rlvr.jsonl", [rlvr_row(*case) for case in RLVR_ARGUMENTS.items()]),
        ),
        "if-multi": IfMultiSpec(name="if-multi", source=multi_file),
    }
    task = build_task(specs[name])
    examples = [*task.examples(Split.TRAIN), *task.examples(Split.HELD_OUT)]
    assert run_self_test(task, examples) == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kwargs": [{}]}, "instruction_id_list and kwargs: 2 ids and 1 argument tables"),
        ({"kwargs": "none"}, "2 ids and a str for argument tables"),
        ({"kwargs": [{}, 3]}, r"arguments '\[\{\}, 3\]'. Allowed: tables, or null"),
        ({"instruction_id_list": [], "kwargs": []}, "row 1 has no instruction"),
        ({"prompt": " "}, "row 1 has columns"),
    ],
)
def test_malformed_evaluation_rows_are_refused(tmp_path: Path, change: Row, message: str) -> None:
    row = eval_row(1, {id_: GOOGLE_ARGUMENTS[id_] for id_ in TWO_PARTS}) | change
    with pytest.raises(DataError, match=message):
        ifeval(write(tmp_path / "one.jsonl", [row])).examples(Split.HELD_OUT)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"ground_truth": "func_name: x"}, "row 2 has ground_truth 'func_name: x'"),
        ({"ground_truth": None}, "row 2 has ground_truth 'None'"),
        ({"ground_truth": '{"N": 3}'}, r"the keys \['N'\]"),
        ({"ground_truth": '{"func_name": "verify_all"}'}, "'verify_all', which has no checker"),
        ({"ground_truth": '{"func_name": "validate_title", "N": 0}'}, "N is not known"),
        ({"ground_truth": '{"func_name": "validate_response_language"}'}, "language is missing"),
        ({"ground_truth": '{"func_name": "validate_choice", "options": "yes"}'}, "no slash stands between"),
        ({"ground_truth": '{"func_name": "validate_choice", "options": "[a]"}'}, "not a list of texts"),
        ({"messages": []}, r"row 2 has messages '\[\]'"),
        ({"messages": [{"role": "assistant", "content": "Hi"}]}, "one message of role user"),
    ],
)
def test_malformed_training_rows_are_refused(tmp_path: Path, change: Row, message: str) -> None:
    row = rlvr_row("validate_title", {}) | change
    task = build_task(
        RlvrIfevalSpec(
            name="rlvr-ifeval",
            source=write(tmp_path / "one.jsonl", [rlvr_row("validate_no_commas", {}), row]),
        )
    )
    with pytest.raises(DataError, match=message):
        task.examples(Split.TRAIN)


def test_unequal_lists_of_a_multi_row_are_refused(tmp_path: Path) -> None:
    truth = repr([{"instruction_id": TWO_PARTS, "kwargs": [None]}])
    row = multi_row({}) | {"ground_truth": truth}
    task = build_task(
        IfMultiSpec(
            name="if-multi",
            source=write(tmp_path / "one.jsonl", [multi_row({"detectable_format:title": None}), row]),
        )
    )
    with pytest.raises(DataError, match="instruction_id and kwargs: 2 ids and 1 argument tables"):
        task.examples(Split.TRAIN)


@pytest.mark.parametrize("name", ["rlvr-ifeval", "if-multi"])
def test_one_prompt_with_several_instructions_stays_in_one_split(name: str, tmp_path: Path) -> None:
    """The data has no split: whole rows told apart would be held out and trained on by the same prompt."""
    prompts = [f"Write about the sea, number {number}." for number in range(30)]
    rows = []
    for prompt in prompts:
        # Three rows of one prompt but for white space, each with an instruction of its own.
        for space, word in (("", "ship"), (" ", "harbor"), ("\n", "sail")):
            if name == "rlvr-ifeval":
                row = rlvr_row("verify_keywords", {"keyword_list": [word]})
            else:
                row = multi_row({"keywords:word_once": {"keyword": word}})
            rows.append(row | {"messages": messages(f"{prompt}{space}")})
    source = write(tmp_path / "rows.jsonl", rows)
    task = build_task(
        RlvrIfevalSpec(name="rlvr-ifeval", source=source)
        if name == "rlvr-ifeval"
        else IfMultiSpec(name="if-multi", source=source)
    )
    asked = {
        split: {" ".join(example.fields["prompt"].split()) for example in task.examples(split)}
        for split in Split
    }
    assert asked[Split.TRAIN] & asked[Split.HELD_OUT] == set()
    assert asked[Split.TRAIN] | asked[Split.HELD_OUT] == set(prompts)
    # A tenth of the prompts, not of the rows.
    assert len(asked[Split.HELD_OUT]) == 3
