"""Requests of agents were ignored or refused without a name, and malformed calls came back empty."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from strop.environments import choose_environment, run_rollout
from strop.rollout import Group, Rollout, Split
from strop.spec import load_spec
from strop.tasks import build_task
from strop.train.measure import measure_rollouts
from tests.environments.test_worlds import tokenizer_of
from tests.fixtures.builders import plan_for
from tests.fixtures.dummy_engine import DummyEngine

PROGRAM = """
import json, os, sys, urllib.error, urllib.request

problem = json.load(sys.stdin)
for path, body in json.load(open(sys.argv[1])):
    body = {"model": "policy", **body}
    request = urllib.request.Request(
        f"{os.environ['OPENAI_BASE_URL']}/{path}",
        json.dumps(body).encode(),
        {"authorization": f"Bearer {os.environ['OPENAI_API_KEY']}"},
    )
    with urllib.request.urlopen(request) as answer, open(sys.argv[2], "a") as answers:
        answers.write(json.dumps(json.load(answer)) + "\\n")
print("done")
"""
CHAT, RESPONSES = "chat/completions", "responses"
PARAMETERS = {"type": "object", "properties": {"place": {"type": "string"}}}
LOOK = {"type": "function", "function": {"name": "look", "parameters": PARAMETERS}}
TOOL = {"type": "function", "name": "look", "parameters": PARAMETERS}
SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
AS_SCHEMA = {"type": "json_schema", "json_schema": {"name": "answer", "strict": True, "schema": SCHEMA}}
CALL = '<tool_call>\n{"name": "look", "arguments": {"place": "a"}}\n</tool_call>'
BAD_CALL = '<tool_call>\n{"name": "look", "arguments": {"place": \n</tool_call>'
FORCED = {"type": "function", "function": {"name": "look"}}


def ask(text: str, **fields: Any) -> tuple[str, dict[str, Any]]:
    return CHAT, {"messages": [{"role": "user", "content": text}], **fields}


def attempt(
    tmp_path: Path, requests: list[tuple[str, dict[str, Any]]], replies: list[str]
) -> tuple[Rollout, list[dict[str, Any]]]:
    """Let a program send requests to the model; return the rollout, and the answers that it got."""
    program, wishes, answers = (tmp_path / name for name in ("program.py", "wishes.json", "answers.jsonl"))
    program.write_text(PROGRAM)
    wishes.write_text(json.dumps(requests))
    answers.touch()
    agent = f"'{sys.executable}' '{program}' '{wishes}' '{answers}'"
    task = build_task(load_spec(None, ["name=x", "task.name=arithmetic", f"task.agent={agent}"]).spec.task)
    tokenizer = tokenizer_of(tmp_path, "hermes")
    plan = plan_for(task.examples(Split.TRAIN)[0], max_reply_tokens=400)
    rollout = asyncio.run(
        run_rollout(choose_environment(task)(), DummyEngine(tokenizer, replies), tokenizer, plan)
    )
    return rollout, [json.loads(line) for line in answers.read_text().splitlines()]


ANSWERED: list[tuple[tuple[str, dict[str, Any]], str, Any, str, int]] = [
    # Request, reply of the policy, content and finish reason for the program, format errors.
    (ask("1", stop=["\n", "###"]), "so ### not this", "so", "stop", 0),
    (ask("2", stop="b"), "a\nb", "a", "stop", 0),
    (ask("3", response_format={"type": "json_object"}), '{"n": "x"}', '{"n": "x"}', "stop", 0),
    (ask("4", response_format={"type": "json_object"}), "[1]", "[1]", "stop", 1),
    (ask("5", response_format={"type": "json_object"}), "n is 1", "n is 1", "stop", 1),
    (ask("6", response_format=AS_SCHEMA), '{"n": 7}', '{"n": 7}', "stop", 0),
    (ask("7", response_format=AS_SCHEMA), '{"n": "x"}', '{"n": "x"}', "stop", 1),
    (ask("8", tools=[LOOK], tool_choice="required"), CALL, None, "tool_calls", 0),
    (ask("9", tools=[LOOK], tool_choice="required"), "No.", "No.", "stop", 1),
    (ask("10", tools=[LOOK], tool_choice=FORCED), CALL, None, "tool_calls", 0),
    (ask("11", tools=[LOOK]), BAD_CALL, BAD_CALL, "stop", 1),
    (ask("12", tools=[LOOK]), f"I look. {BAD_CALL}", f"I look. {BAD_CALL}", "stop", 1),
]


def test_requests_are_served_and_broken_forms_are_counted(tmp_path: Path) -> None:
    responses: list[tuple[str, dict[str, Any]]] = [
        (
            RESPONSES,
            {"input": "1", "text": {"format": {"type": "json_schema", "name": "a", "schema": SCHEMA}}},
        ),
        (RESPONSES, {"input": "2", "tools": [TOOL], "tool_choice": "required"}),
    ]
    requests = [request for request, *_ in ANSWERED] + responses
    rollout, answers = attempt(tmp_path, requests, [reply for _, reply, *_ in ANSWERED] + ["no", "no"])
    assert rollout.outcome.failure is None, rollout.outcome.failure
    assert len(answers) == len(requests)
    for (request, _, content, reason, _), answer in zip(ANSWERED, answers, strict=False):
        (choice,) = answer["choices"]
        assert (choice["message"]["content"], choice["finish_reason"]) == (content, reason), request
    num_errors = sum(number for *_, number in ANSWERED) + len(responses)
    assert rollout.outcome.metrics["num_format_errors"] == num_errors


@pytest.mark.parametrize(
    ("request_of", "field"),
    [
        (ask("x", functions=[LOOK["function"]]), "functions"),
        (ask("x", response_format={"type": "grammar", "grammar": "g"}), "grammar"),
        (ask("x", tools=[LOOK], tool_choice={"type": "allowed_tools"}), "allowed_tools"),
        (ask("x", guided_regex="a+"), "guided_regex"),
        (("completions", {"prompt": "x"}), "completions"),
        ((RESPONSES, {"input": "x", "tools": [{"type": "web_search"}]}), "web_search"),
    ],
)
def test_the_record_names_the_request_that_was_refused(
    tmp_path: Path, request_of: tuple[str, dict[str, Any]], field: str
) -> None:
    rollout, answers = attempt(tmp_path, [request_of], [])
    assert (rollout.outcome.reward, answers) == (None, [])
    failure = rollout.outcome.failure
    assert failure is not None
    assert (failure.owner, failure.kind) == ("task", "request_refused")
    assert field in failure.detail


def test_only_breaks_that_the_program_does_not_ask_for_are_broken_prefixes(tmp_path: Path) -> None:
    said = {"role": "assistant", "content": "one"}
    go_on, other = {"role": "user", "content": "And now?"}, {"role": "system", "content": "Sum up."}
    question = {"role": "user", "content": "1"}
    requests = [
        ask("1"),
        (CHAT, {"messages": [question, said, go_on]}),
        # Another conversation, a branch, and the same question again.
        (CHAT, {"messages": [other, go_on]}),
        (CHAT, {"messages": [question, said, question]}),
        ask("1"),
    ]
    rollout, _ = attempt(tmp_path, requests, ["one", "two", "three", "four", "five"])
    assert rollout.outcome.failure is None, rollout.outcome.failure
    assert [len(turns) for turns in rollout.samples] == [4, 2, 2, 2]
    assert measure_rollouts([Group(example=rollout.example, rollouts=(rollout,))])["prefix_break_frac"] == 0.0
