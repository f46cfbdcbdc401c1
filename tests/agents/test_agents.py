"""Programs that ask the model by the real client of OpenAI: their answers, and the record."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest

from strop.agents.face import lease_face
from strop.engine import Completion, GenerationRequest
from strop.environments import choose_environment, run_rollout
from strop.environments.extending import PromptCache
from strop.environments.recording import CallsUsedUp, Recorder
from strop.errors import EngineError
from strop.rollout import CONVERSATION, FailureOwner, FinishReason, Message, Rollout, Split, Turn
from strop.spec.reader import load_spec
from strop.tasks import build_task
from strop.tokenizer import Tokenizer
from tests.environments.test_worlds import TEMPLATES, call, tokenizer_of
from tests.fixtures.builders import plan_for, request_for
from tests.fixtures.dummy_engine import DummyEngine, ScriptedReply
from tests.fixtures.judging import failed

LOOK = {
    "type": "function",
    "function": {
        "name": "look",
        "parameters": {"type": "object", "properties": {"place": {"type": "string"}}},
    },
}
Script = list[str | ScriptedReply | Exception]
ScriptOf = Script | Callable[[GenerationRequest], str | ScriptedReply]


class Asked:
    """A face, a client of the real package, and what the engine was asked."""

    def __init__(self, tokenizer: Tokenizer, script: Script, **bounds: Any) -> None:
        self.engine = DummyEngine(tokenizer, script)
        bounds = {"max_reply_tokens": 400, "max_positions": None, **bounds}
        self.recorder = Recorder(PromptCache(tokenizer, "auto"), self.sample, **bounds)

    async def sample(
        self, prompt_ids: Any, num_tokens: int, stream: int, stop: tuple[str, ...]
    ) -> Completion:
        request = request_for(prompt_ids, max_tokens=num_tokens, seed=stream, stops={260}, stop_strings=stop)
        return await self.engine.generate(request)

    def let(self, work: Callable[[openai.AsyncOpenAI], Any]) -> Any:
        """Run a program against the face."""

        async def main() -> Any:
            async with (
                lease_face() as face,
                face.open(self.recorder) as (url, key),
                openai.AsyncOpenAI(base_url=url, api_key=key, max_retries=0) as client,
            ):
                return await work(client)

        return asyncio.run(main())

    @property
    def turns(self) -> tuple[Turn, ...]:
        """What was recorded."""
        return self.recorder.turns()

    def check(self) -> None:
        """Each request is, id by id, what the turns before its reply say, within a sample."""
        seen: list[int] = []
        asked = []
        for turn in self.turns:
            if turn.role == CONVERSATION:
                seen = []
            if turn.is_sampled:
                asked.append(list(seen))
            seen += turn.token_ids.tolist()
        assert sorted(asked) == sorted(request.prompt_ids.tolist() for request in self.engine.requests)


async def chat(client: openai.AsyncOpenAI, *messages: dict[str, Any], **options: Any) -> Any:
    create: Any = client.chat.completions.create
    return await create(model="any", messages=list(messages), **options)


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


@pytest.mark.parametrize("form", TEMPLATES)
def test_a_conversation_with_tools_is_one_sample(tmp_path: Path, form: str) -> None:
    tokenizer = tokenizer_of(tmp_path, form)
    asked = Asked(tokenizer, [call("look", form, place='a "b"'), call("look", form, place="c"), "Done."])

    async def work(client: openai.AsyncOpenAI) -> str:
        messages: list[Any] = [user("Look.")]
        for _ in range(3):
            message = (await chat(client, *messages, tools=[LOOK])).choices[0].message
            messages.append(message.model_dump(exclude_none=True))
            for one in message.tool_calls or ():
                # As clients do: JSON is read and written anew.
                again = json.dumps(json.loads(one.function.arguments), indent=1)
                messages[-1]["tool_calls"][0]["function"]["arguments"] = again
                messages.append({"role": "tool", "tool_call_id": one.id, "name": "look", "content": "seen"})
        return str(messages[-1]["content"])

    assert asked.let(work) == "Done."
    assert [turn.role for turn in asked.turns] == ["prompt", "assistant"] * 3
    asked.check()


def test_plain_and_streamed_answers_say_the_same(tmp_path: Path) -> None:
    tokenizer = tokenizer_of(tmp_path, "hermes")
    text = "<think>Why?</think>So: " + call("look", "hermes", place="a")
    asked = Asked(tokenizer, [text, text])

    async def work(client: openai.AsyncOpenAI) -> None:
        plain = await chat(
            client, user("1"), tools=[LOOK], logprobs=True, extra_body={"return_token_ids": True}
        )
        choice = plain.choices[0]
        assert (choice.finish_reason, choice.message.content) == ("tool_calls", "So:")
        assert choice.message.model_extra["reasoning_content"] == "Why?"
        assert choice.message.tool_calls[0].function.arguments == '{"place": "a"}'
        request = asked.engine.requests[0]
        assert plain.model_extra["prompt_token_ids"] == request.prompt_ids.tolist()
        assert (
            len(choice.logprobs.content)
            == len(choice.model_extra["token_ids"])
            == plain.usage.completion_tokens
        )
        options = {"stream": True, "stream_options": {"include_usage": True}, "tools": [LOOK]}
        chunks = [chunk async for chunk in await chat(client, user("2"), **options)]
        deltas = [one.choices[0].delta for one in chunks if one.choices]
        assert "".join(delta.content or "" for delta in deltas) == "So:"
        calls = [part for delta in deltas for part in delta.tool_calls or ()]
        assert "".join(part.function.arguments for part in calls) == '{"place": "a"}'
        assert (calls[0].function.name, chunks[-2].choices[0].finish_reason) == ("look", "tool_calls")
        assert chunks[-1].usage == plain.usage

    asked.let(work)


def test_another_conversation_an_edit_and_a_branch_are_samples_of_their_own(tmp_path: Path) -> None:
    asked = Asked(tokenizer_of(tmp_path), ["a", "b", "c", "d", "e"])

    async def work(client: openai.AsyncOpenAI) -> None:
        await chat(client, user("1"))
        await chat(client, user("1"), {"role": "assistant", "content": "a"}, user("2"))
        await chat(client, user("1"), {"role": "assistant", "content": "a"}, user("3"))
        await chat(client, user("1"), {"role": "assistant", "content": "edited"}, user("2"))
        await chat(client, {"role": "developer", "content": "Sum up."}, user("x"))

    asked.let(work)
    assert [turn.role for turn in asked.turns] == ["prompt", "assistant"] * 2 + [
        CONVERSATION,
        "assistant",
    ] * 3
    assert [turn.text for turn in asked.turns if turn.is_sampled] == ["a", "b", "c", "d", "e"]
    asked.check()
    branch = asked.turns[4]
    assert np.array_equal(branch.token_ids, asked.engine.requests[2].prompt_ids)


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({"n": 2}, "n=2; allowed: 1"),
        ({"logprobs": True, "top_logprobs": 2}, "top_logprobs=2; allowed: 0"),
        ({"logit_bias": {"5": 1}}, "logit_bias"),
        ({"response_format": {"type": "grammar"}}, "grammar"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"functions": [LOOK["function"]]}, "functions"),
        ({"stop": [""]}, "stop"),
        ({"max_tokens": 0}, "max_tokens is no number"),
        ({"messages": []}, "there is no message"),
        ({"messages": [{"content": "x"}]}, "cannot be read"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "cannot be read"),
    ],
)
def test_what_the_policy_cannot_say_is_refused_and_nothing_sampled(
    tmp_path: Path, fields: dict[str, Any], error: str
) -> None:
    asked = Asked(tokenizer_of(tmp_path), [])

    async def work(client: openai.AsyncOpenAI) -> None:
        with pytest.raises(openai.BadRequestError, match=error.replace("[", r"\[")):
            await client.chat.completions.create(**{"model": "m", "messages": [user("x")], **fields})

    asked.let(work)
    assert asked.engine.requests == []
    assert asked.turns == ()


def test_tokens_have_log_probabilities_also_in_a_stream(tmp_path: Path) -> None:
    asked = Asked(tokenizer_of(tmp_path), ["a", "cc"])

    async def work(client: openai.AsyncOpenAI) -> None:
        answer = await chat(client, user("x"), n=1, logprobs=True)
        # Whatever name a program has for the model, it is the policy that answers.
        assert answer.model == "any"
        assert [one.token for one in answer.choices[0].logprobs.content] == ["a", "<|end|>"]
        stream = await chat(client, user("y"), stream=True, logprobs=True)
        chunks = [chunk async for chunk in stream]
        found = [token for one in chunks if (known := one.choices[0].logprobs) for token in known.content]
        assert [bytes(token.bytes) for token in found] == [b"c", b"c", b"<|end|>"]

    asked.let(work)


def test_of_calls_at_once_a_program_may_get_one(tmp_path: Path) -> None:
    form = "hermes"
    asked = Asked(tokenizer_of(tmp_path, form), [call("look", form, place="a") * 2, "b"])

    async def work(client: openai.AsyncOpenAI) -> None:
        options = {"tools": [LOOK], "parallel_tool_calls": False}
        message = (await chat(client, user("x"), **options)).choices[0].message
        (one,) = message.tool_calls
        result = {"role": "tool", "tool_call_id": one.id, "content": "seen"}
        await chat(client, user("x"), message.model_dump(exclude_none=True), result, **options)

    asked.let(work)
    assert [turn.role for turn in asked.turns] == ["prompt", "assistant"] * 2
    assert asked.turns[1].text.count("look") == 2
    asked.check()


def test_content_may_be_absent_null_or_in_parts(tmp_path: Path) -> None:
    asked = Asked(tokenizer_of(tmp_path, "hermes"), ["a"] * 2)

    async def work(client: openai.AsyncOpenAI) -> None:
        calls = [{"id": "000000000", "type": "function", "function": {"name": "look", "arguments": "{}"}}]
        for content in ({}, {"content": None}):
            asking = {"role": "assistant", "tool_calls": calls, "unknown": 1, **content}
            result = {
                "role": "tool",
                "tool_call_id": "000000000",
                "content": [{"type": "text", "text": "seen"}],
            }
            await chat(client, user("x"), asking, result, tools=[LOOK])

    asked.let(work)
    first, second = asked.engine.requests
    assert np.array_equal(first.prompt_ids, second.prompt_ids)
    # Equal prompts are no equal replies: the second has a stream of its own.
    assert first.seed != second.seed


def test_keys_addresses_and_the_end_of_a_rollout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("strop.agents.face._MAX_BODY_BYTES", 1000)
    asked = Asked(tokenizer_of(tmp_path), ["a"])

    async def main() -> None:
        async with lease_face() as face:
            async with face.open(asked.recorder) as (url, key):
                async with openai.AsyncOpenAI(base_url=url, api_key="wrong", max_retries=0) as wrong:
                    with pytest.raises(openai.AuthenticationError):
                        await chat(wrong, user("x"))
                elsewhere = f"{face.url}/r/none/v1"
                async with openai.AsyncOpenAI(base_url=elsewhere, api_key=key, max_retries=0) as other:
                    with pytest.raises(openai.NotFoundError):
                        await chat(other, user("x"))
                client = openai.AsyncOpenAI(base_url=url, api_key=key, max_retries=0)
                assert [one.id async for one in client.models.list()] == ["policy"]
                with pytest.raises(openai.NotFoundError):
                    await client.embeddings.create(model="m", input="x")
                with pytest.raises(openai.APIStatusError, match="Error code: 413"):
                    await chat(client, user("x" * 1000))
            with pytest.raises(openai.APIStatusError) as refused:
                await chat(client, user("x"))
            assert refused.value.status_code == 410
            await client.close()

    asyncio.run(main())
    assert asked.engine.requests == []


def test_a_library_that_asks_again_gets_the_same_reply(tmp_path: Path) -> None:
    asked = Asked(tokenizer_of(tmp_path), ["a", "b"])

    async def main() -> list[str]:
        async with lease_face() as face, face.open(asked.recorder) as (url, key):
            body = {"model": "m", "messages": [user("x")]}
            async with httpx.AsyncClient(headers={"authorization": f"Bearer {key}"}) as client:
                replies = []
                for number in ("0", "1", "0"):
                    headers = {"x-stainless-retry-count": number}
                    answer = await client.post(f"{url}/chat/completions", json=body, headers=headers)
                    replies.append(answer.json()["choices"][0]["message"]["content"])
                return replies

    assert asyncio.run(main()) == ["a", "a", "b"]
    assert [turn.text for turn in asked.turns if turn.is_sampled] == ["a", "b"]


def test_room_calls_and_a_cut_reply(tmp_path: Path) -> None:
    tokenizer, look = tokenizer_of(tmp_path, "hermes"), call("look", "hermes", place="a")
    asked = Asked(tokenizer, [look, "b"], max_positions=600, max_tokens=22)

    async def work(client: openai.AsyncOpenAI) -> None:
        with pytest.raises(openai.BadRequestError, match="maximum context length"):
            await chat(client, user("x" * 1000))
        cut = await chat(client, user("x"), tools=[LOOK], max_completion_tokens=20)
        assert (cut.choices[0].finish_reason, cut.choices[0].message.tool_calls) == ("length", None)
        await chat(client, user("y"))
        with pytest.raises(openai.APIStatusError) as refused:
            await chat(client, user("z"), max_tokens=20)
        assert refused.value.status_code == 410

    asked.let(work)


def test_a_thousand_calls_at_once_have_the_tokens_of_an_attempt_together(tmp_path: Path) -> None:
    """Each takes two; none is cut by what others under way have not used yet."""
    asked = Asked(tokenizer_of(tmp_path), ["7"] * 1000, max_reply_tokens=8, max_tokens=100)

    async def main() -> list[Any]:
        messages = [Message(role="user", content="x")]
        calls = (asked.recorder.ask(messages) for _ in range(1000))
        return await asyncio.gather(*calls, return_exceptions=True)

    found = asyncio.run(main())
    assert sum(isinstance(one, CallsUsedUp) for one in found) == 950
    assert isinstance(asked.recorder.refusal, CallsUsedUp)
    sampled = [turn for turn in asked.turns if turn.is_sampled]
    assert {turn.finish_reason for turn in sampled} == {FinishReason.EOS}
    assert len(sampled) == 50


BEGINNING = """
import json, sys, time
messages = json.load(sys.stdin)["messages"]

def ask():
    import openai
    answer = openai.OpenAI().chat.completions.create(model="x", messages=messages)
    reply = answer.choices[0].message.content
    messages.extend([{"role": "assistant", "content": reply}, {"role": "user", "content": "Sure?"}])
    return reply
"""
PROGRAMS = {
    "two_calls": "ask(); print(ask())",
    "ends_early": "print(7)",
    "asks_until_it_fails": "while True: ask()",
    "fails": "raise RuntimeError('a bug')",
    "hangs": "ask(); time.sleep(600)",
}
COMMAND = """
import json, os, sys, openai
problem = json.load(sys.stdin)
assert not [name for name in os.environ if name.startswith("STROP_")]
answer = openai.OpenAI().chat.completions.create(model="any", messages=problem["messages"])
print(answer.choices[0].message.content, "as", problem["fields"]["a"])
"""


def attempt(
    tmp_path: Path,
    agent: str,
    script: ScriptOf,
    *words: str,
    form: str = "fence",
    max_positions: int | None = None,
) -> Rollout:
    """Have a command, or one of `PROGRAMS`, solve the first sum."""
    if agent in PROGRAMS:
        path = tmp_path / "agent.py"
        path.write_text(BEGINNING + PROGRAMS[agent])
        agent = f"{sys.executable} {path}"
    spec = load_spec(None, ["name=x", "task.name=arithmetic", f"task.agent={json.dumps(agent)}", *words]).spec
    task = build_task(spec.task)
    assert task.version != build_task(spec.task.model_copy(update={"agent": None})).version
    plan = plan_for(task.examples(Split.TRAIN)[0], max_reply_tokens=400, max_positions=max_positions)
    tokenizer = tokenizer_of(tmp_path, form)
    engine = DummyEngine(tokenizer, script)
    return asyncio.run(run_rollout(choose_environment(task)(), engine, tokenizer, plan))


def gold() -> str:
    task = build_task(load_spec(None, ["name=x", "task.name=arithmetic"]).spec.task)
    return task.gold_replies(task.examples(Split.TRAIN)[0])[0]


def test_a_program_is_trained_as_it_is(tmp_path: Path) -> None:
    rollout = attempt(tmp_path, "two_calls", ["1", gold()])
    assert rollout.outcome.reward == 1.0, rollout.outcome
    assert [turn.role for turn in rollout.turns] == ["prompt", "assistant"] * 2
    assert rollout.turns[2].text.count("Sure?") == 1
    assert rollout.outcome.metrics["num_turns"] == 2.0


def test_a_program_gets_the_fields_and_none_of_the_runs_keys(tmp_path: Path) -> None:
    path = tmp_path / "solve.py"
    path.write_text(COMMAND)
    rollout = attempt(tmp_path, f"{sys.executable} {path}", ["5"])
    assert rollout.outcome.failure is None, rollout.outcome.failure
    assert rollout.outcome.reward == 0.0
    assert len(rollout.turns) == 2


@pytest.mark.parametrize(
    ("agent", "script", "owner", "kind"),
    [
        ("ends_early", [], FailureOwner.TASK, "no_call"),
        ("fails", [], FailureOwner.TASK, "agent_failed"),
        ("/no/such/program", [], FailureOwner.TASK, "agent_missing"),
        ("two_calls", ["1", EngineError("gone")], FailureOwner.ENGINE, "EngineError"),
        ("two_calls", [ScriptedReply(text="1", is_aborted=True)], FailureOwner.ENGINE, "EngineError"),
    ],
)
def test_a_program_that_fails_is_no_reward(
    tmp_path: Path, agent: str, script: Script, owner: FailureOwner, kind: str
) -> None:
    rollout = attempt(tmp_path, agent, script)
    assert rollout.outcome.reward is None
    assert failed(rollout.outcome) == (owner, kind)


@pytest.mark.parametrize(
    ("words", "max_positions", "end"), [(["task.agent_tokens=5"], None, "tokens"), ([], 60, "context")]
)
def test_a_program_that_fails_where_the_policy_left_no_room_is_judged_as_it_stands(
    tmp_path: Path, words: list[str], max_positions: int | None, end: str
) -> None:
    rollout = attempt(tmp_path, "asks_until_it_fails", ["7"] * 9, *words, max_positions=max_positions)
    assert (rollout.outcome.reward, rollout.outcome.truncated) == (0.0, True), rollout.outcome
    assert rollout.outcome.metrics[f"stopped_by_{end}"] == 1.0


def test_a_program_is_ended_at_its_time_with_what_it_began(tmp_path: Path) -> None:
    # A machine so busy that the program has not asked within its time gives it more.
    for limit_s in (6, 30, 150):
        rollout = attempt(tmp_path, "hangs", ["7"], f"task.agent_limit_s={limit_s}")
        if rollout.turns[1:]:
            break
    assert (rollout.outcome.reward, rollout.outcome.truncated) == (0.0, True), rollout.outcome
    assert rollout.outcome.metrics["stopped_by_time"] == 1.0
    assert rollout.turns[1].finish_reason is FinishReason.EOS
