"""System prompt, prompt template and stop strings of the run's own, over every task."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from strop.errors import ConfigError, DataError
from strop.rollout import Example, Message, Split
from strop.spec import load_spec
from strop.spec.task import TaskSpec
from strop.tasks import Task, build_task, render_prompt
from strop.tasks.generated import ArithmeticSpec
from strop.tasks.prompt import PosedMessage, posed
from strop.tasks.rows.judged_rows import PresetSpec
from strop.tokenizer import Tokenizer
from tests.fixtures.every_task import CASES, section_of
from tests.fixtures.judging import run_self_test
from tests.fixtures.row_files import write_rows
from tests.fixtures.tiny_tokenizer import tiny_tokenizer

SYSTEM = "Be brief.\nNo jokes."
PLAIN_CASES = [case for case in CASES if case != "mixture"]
NOT_TAKEN = {
    # They open each attempt in their own words.
    *((name, "prompt_template") for name in ("guess-number", "repo-repair", "mlgym", "harbor")),
}


def setting_of(name: str, task: Task) -> Any:
    """Return a value that the task takes for a setting: a template names the first text that it may."""
    if name != "prompt_template":
        return {"system_prompt": SYSTEM, "stop": ["\n###"]}[name]
    fields = an_example(task).fields
    known = [key for key, value in fields.items() if isinstance(value, str | int)]
    return f"Now: {{{known[0]}}} {{{{so}}}}"


def an_example(task: Task) -> Example:
    try:
        return task.examples(Split.HELD_OUT)[0]
    except (DataError, IndexError):
        return task.examples(Split.TRAIN)[0]


def with_settings(spec: TaskSpec, **settings: Any) -> TaskSpec:
    """Return the section with further settings, checked as when a run file is read."""
    return type(spec).model_validate({**spec.model_dump(), **settings})


@pytest.mark.parametrize("name", ["system_prompt", "prompt_template", "stop"])
@pytest.mark.parametrize("case", PLAIN_CASES)
def test_every_task_is_asked_as_the_run_says(case: str, name: str, tmp_path: Path) -> None:
    if case == "reasoning-gym":
        pytest.importorskip("reasoning_gym")
    spec = section_of(case, tmp_path)
    own = build_task(spec)
    value = setting_of(name, own)
    if (spec.name, name) in NOT_TAKEN or (case, name) == ("mbpp thinking", "stop"):
        with pytest.raises(ValueError, match=rf"task\.{name}="):
            with_settings(spec, **{name: value})
        return
    task = build_task(with_settings(spec, **{name: value}))
    example = an_example(task)
    assert task.name == own.name
    assert task.version not in {own.version, build_task(with_settings(spec, system_prompt="Else.")).version}
    # How a reply is judged stays as it was.
    assert task.gold_replies(example) == own.gold_replies(example)
    asked, before = task.render(example), own.render(example)
    if name == "stop":
        assert asked == before
        assert task.limits_of(example).stops(is_base=True) == ("\n###",) == task.limits.stops(is_base=False)
        return
    assert task.limits_of(example) == own.limits_of(example)
    assert posed(asked).is_thinking == posed(before).is_thinking
    if name == "system_prompt":
        assert asked[0] == Message(role="system", content=SYSTEM)
        assert [message.text for message in asked[1:]] == [message.text for message in before]
        # Plain text knows nothing of thinking.
        if spec.thinking != "on":
            tokenizer = Tokenizer.load(tiny_tokenizer(tmp_path / "model"))
            plain, _ = render_prompt(tokenizer, before, "base")
            assert render_prompt(tokenizer, asked, "base")[0] == f"{SYSTEM}\n\n{plain}"
    else:
        (message,) = asked
        assert isinstance(message, PosedMessage)
        assert message.text.startswith("Now: ")
        assert message.text.endswith(" {so}")
        assert message.base == message.text
        assert message.text != f"Now: {value}"


def test_both_forms_of_a_prompt_to_the_letter(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(tiny_tokenizer(tmp_path))
    spec = ArithmeticSpec(system_prompt=SYSTEM, prompt_template="{{{a}}} + {b} =")
    task = build_task(spec)
    example = task.examples(Split.HELD_OUT)[0]
    a, b = example.fields["a"], example.fields["b"]
    assert render_prompt(tokenizer, task.render(example), "chat")[0] == (
        f"<|start|>system\n{SYSTEM}<|end|>\n<|start|>user\n{{{a}}} + {b} =<|end|>\n<|start|>assistant\n"
    )
    assert render_prompt(tokenizer, task.render(example), "base")[0] == f"{SYSTEM}\n\n{{{a}}} + {b} ="


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (
            "{{ raise_exception('no system') if messages[0].role == 'system' }}{{ messages[-1].content }}",
            "refused",
        ),
        (
            "{% for m in messages %}{{ m.content if m.role != 'system' }}{% endfor %}",
            "leaves out",
        ),
    ],
    ids=["refuses", "says nothing"],
)
def test_a_model_that_cannot_be_told_is_refused(tmp_path: Path, template: str, message: str) -> None:
    model_dir = tiny_tokenizer(tmp_path)
    (model_dir / "chat_template.jinja").write_text(template)
    tokenizer = Tokenizer.load(model_dir)
    task = build_task(ArithmeticSpec(system_prompt=SYSTEM))
    asked = task.render(task.examples(Split.HELD_OUT)[0])
    with pytest.raises(ConfigError, match=rf"(?s){message}.*task\.system_prompt"):
        render_prompt(tokenizer, asked, "chat")
    # Without the setting the same model is asked, and plain text knows no roles.
    assert render_prompt(tokenizer, asked[1:], "chat")[0]
    assert render_prompt(tokenizer, asked, "base")[0].startswith(SYSTEM)


GSM8K = [{"question": f"{n} and {n}?", "answer": f"Twice.\n#### {2 * n}"} for n in range(1, 6)]


def gsm8k(folder: Path, **settings: Any) -> Task:
    for stem, rows in (("train", GSM8K[:4]), ("test", GSM8K[4:])):
        write_rows(folder / f"{stem}.jsonl", rows)
    return build_task(PresetSpec(name="gsm8k", source=str(folder), **settings))


def test_a_field_that_the_examples_do_not_have_is_refused_when_they_are_read(tmp_path: Path) -> None:
    task = gsm8k(tmp_path, prompt_template="Solve: {problem}")
    for split in Split:
        with pytest.raises(ConfigError, match=r"problem.*answer, question, solution"):
            task.examples(split)
    # A list is no text: the model would read Python.
    mmlu = section_of("mmlu", tmp_path)
    with pytest.raises(ConfigError, match=r"choices.*a, about, answer, b, c, d, question"):
        build_task(with_settings(mmlu, prompt_template="{choices}")).examples(Split.HELD_OUT)
    sums = build_task(ArithmeticSpec(prompt_template="{question}"))
    with pytest.raises(ConfigError, match=r"question.*: a, b\."):
        sums.render(an_example(sums))


@pytest.mark.parametrize(
    "settings",
    [
        *({"prompt_template": one} for one in ("Solve it.", "{{question}}", "", "{question", "{question}}")),
        *({"prompt_template": one} for one in ("{} {question}", "{question!r}", '{"answer": {question}}')),
        {"system_prompt": " \n"},
        {"stop": ["\n", ""]},
        {"stop": ["\n"], "thinking": "on"},
        *({"stop": "\n"}, {"stop": [1]}),
    ],
)
def test_settings_that_cannot_work_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(settings))):
        PresetSpec(name="gsm8k", **settings)


@pytest.mark.parametrize(
    "word", ["system_prompt=Be brief.", "prompt_template={a}", 'stop=["x"]', "thinking=on"]
)
def test_a_task_made_of_others_leaves_them_to_its_parts(word: str) -> None:
    words = ["name=x", "task.name=mixture", "task.parts.a.name=arithmetic"]
    setting = word.partition("=")[0]
    with pytest.raises(ConfigError, match=rf"task\.{setting}=.*\[task\.parts\.LABEL\]"):
        load_spec(None, [*words, f"task.{word}"])
    own = build_task(load_spec(None, words).spec.task)
    task = build_task(load_spec(None, [*words, f"task.parts.a.{word}"]).spec.task)
    assert task.version != own.version
    example = task.examples(Split.HELD_OUT)[0]
    asked, limits = task.render(example), task.limits_of(example)
    assert (asked != own.render(example)) == (setting != "stop")
    assert limits.stops(is_base=True) == {"stop": ("x",), "thinking": ()}.get(setting, ("\n",))


def test_a_row_with_a_system_message_of_its_own_is_refused(tmp_path: Path) -> None:
    told = [{"role": "system", "content": "Sir."}, {"role": "user", "content": "1?"}]
    rows = [
        {"messages": [{"role": "user", "content": "2?"}], "gold": "2"},
        {"messages": told, "gold": "1"},
    ]
    write_rows(tmp_path / "train.jsonl", rows)
    (tmp_path / "test.jsonl").write_text(json.dumps({"messages": told[1:], "gold": "3"}))
    own = [f"task.source={tmp_path}", "task.prompt=messages", "task.answer=gold", "task.reward=exact"]
    words = ["name=x", "task.name=rows", *own, "task.system_prompt=Be brief."]
    task = build_task(load_spec(None, words).spec.task)
    with pytest.raises(DataError, match="has a system message of its own, beside"):
        task.examples(Split.TRAIN)


def test_gold_replies_that_a_stop_string_would_cut_are_found(tmp_path: Path) -> None:
    for stop in (["\n\n\n"], ["\nQuestion"], []):
        task = gsm8k(tmp_path, stop=stop)
        assert run_self_test(task, task.examples(Split.TRAIN)) == []
    task = gsm8k(tmp_path, stop=["\n"])
    gold, *_ = run_self_test(task, task.examples(Split.TRAIN)[:2])
    assert gold.probe == "gold"
    assert {entry.reply for entry in gold.evidence} == {"Twice."}


def test_a_template_that_tells_the_answer_is_found(tmp_path: Path) -> None:
    task = gsm8k(tmp_path, prompt_template="{question} {solution}")
    assert {finding.probe for finding in run_self_test(task, task.examples(Split.TRAIN))} == {"echo"}
