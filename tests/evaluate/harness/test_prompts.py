"""P2: what lm-eval 0.4.13 asks is, byte for byte, what strop says it asks, on 200 rows of each task.

The rows hold what prompts are spoiled by (`harness_rows`). Solved examples that are shown before a problem
are compared too: those that task files bring, and those that the harness draws from our rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from random import Random
from typing import Any

import pytest

from strop.evaluate.harness import GENERATING, PROTOCOLS
from strop.rollout import Example, Split
from strop.spec.harness import HarnessSpec
from strop.tasks import Task, build_task
from strop.tasks.prompt import PosedMessage, join_shots
from tests.evaluate.harness.harness_rows import HARD_TEXTS
from tests.evaluate.harness.harness_world import NUM_ROWS, RecordedRun, Recording

pytestmark = pytest.mark.slow
SHOWING = [name for name, protocol in GENERATING.items() if protocol.num_fewshot]


def base_prompt(task: Task, example: Example) -> str:
    """Return the prompt that our own task asks a base model with."""
    (message,) = task.render(example)
    assert isinstance(message, PosedMessage)
    assert message.base is not None
    return message.base


@pytest.mark.parametrize("name", GENERATING)
def test_p2_prompts_without_shown_examples_are_ours_byte_for_byte(name: str, recording: Recording) -> None:
    run = recording.prompts[name, 0]
    assert len(run.prompts) == len(run.job.examples) >= NUM_ROWS >= 200
    assert run.prompts == {
        example.example_id: PROTOCOLS[name].prompt(example) for example in run.job.examples
    }
    asked = "\n".join(run.prompts.values())
    missing = [text for text in HARD_TEXTS if text not in asked]
    # A docstring cannot hold what ends it, and the reader of Python makes other line breaks of some.
    assert len(missing) <= (6 if name == "humaneval" else 0), missing


def test_p2_the_published_164_problems_of_humaneval_are_asked_as_they_stand(recording: Recording) -> None:
    run = recording.prompts["published", 0]
    assert len(run.job.examples) == 164
    assert run.prompts == {example.example_id: example.fields["prompt"] for example in run.job.examples}


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("gsm8k", {"mode": "hash"}),
        ("gsm8k_cot", {"mode": "strict"}),
        ("minerva_math", {}),
        ("aime24", {}),
        ("aime25", {}),
        ("mbpp", {"rules": "lm-eval"}),
        ("humaneval", {}),
        ("published", {}),
        ("ifeval", {"rules": "lm-eval"}),
    ],
)
def test_p2_our_own_tasks_ask_base_models_in_the_same_words(
    name: str, settings: Mapping[str, str], recording: Recording
) -> None:
    run = recording.prompts[name, 0]
    spec = run.job.task._spec.model_copy(update=settings)  # type: ignore[attr-defined]
    task = build_task(spec)
    assert run.prompts == {example.example_id: base_prompt(task, example) for example in run.job.examples}


def shots_of_task_file(run: RecordedRun, part: str) -> Sequence[Mapping[str, Any]]:
    return run.shown[f"strop_{part}"][: run.job.protocol.num_fewshot]


def written_shot(name: str, shown: Mapping[str, Any]) -> tuple[str, str]:
    """Return a shown example, in the harness's columns, as our prompt and its target."""
    form = PROTOCOLS[name].prompt
    if name == "gsm8k_cot":
        return form(Example(task="gsm8k", example_id="", fields=shown, answer=None)), f" {shown['target']}"
    if name == "mbpp":
        fields = {"text": shown["text"], "tests": shown["test_list"]}
        example = Example(task="mbpp", example_id="", fields=fields, answer=None)
        return form(example), f"{shown['code']}\n[DONE]"
    example = Example(task="math", example_id="", fields=shown, answer=None)
    return form(example), f" {shown['solution']}"


@pytest.mark.parametrize("name", [name for name in SHOWING if not PROTOCOLS[name].draws_shown])
def test_p2_examples_of_task_files_stand_before_our_prompt(name: str, recording: Recording) -> None:
    run, protocol = recording.prompts[name, PROTOCOLS[name].num_fewshot], PROTOCOLS[name]
    assert len(run.job.examples) >= 200
    heads = {
        part: join_shots([written_shot(name, shown) for shown in shots_of_task_file(run, part)])
        for part in protocol.files
    }
    for example in run.job.examples:
        part = protocol.part_of(example) if protocol.part_of else protocol.task
        assert run.prompts[example.example_id] == heads[part] + protocol.prompt(example)
        assert len(heads[part]) > 100 * protocol.num_fewshot


@pytest.mark.parametrize("name", [name for name in SHOWING if PROTOCOLS[name].draws_shown])
def test_p2_drawn_examples_stand_before_our_prompt(name: str, recording: Recording) -> None:
    """The harness draws for one problem after the other, from our training rows in their order."""
    run, protocol = recording.prompts[name, PROTOCOLS[name].num_fewshot], PROTOCOLS[name]
    task = run.job.task
    assert len(run.job.examples) >= 200
    parts: dict[str, tuple[Random, list[Example]]] = {}
    for example in run.job.examples:
        part = protocol.part_of(example) if protocol.part_of else protocol.task
        if part not in parts:
            train = [
                e for e in task.examples(Split.TRAIN) if not protocol.part_of or protocol.part_of(e) == part
            ]
            parts[part] = (Random(HarnessSpec().seed), train)
        generator, train = parts[part]
        drawn = generator.sample(train, protocol.num_fewshot)
        shots = [(protocol.prompt(shot), f" {target(name, shot)}") for shot in drawn]
        assert run.prompts[example.example_id] == join_shots(shots) + protocol.prompt(example)


def target(name: str, shot: Example) -> str:
    """Return what the harness shows as the reply: the worked solution, or what is in its last box."""
    return str(shot.fields["solution"] if name == "gsm8k" else shot.answer)
