"""Tests of the rollout path: what flows through it, and who owns what goes wrong."""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from strop.engine import Completion, GenerationRequest
from strop.engine.contract import stream_seed
from strop.environments import (
    Action,
    AttemptFailed,
    Environment,
    RolloutPlan,
    SingleTurn,
    StepResult,
    run_group,
    run_rollout,
)
from strop.environments.extending import PromptCache
from strop.environments.groups import NUM_REFILLS
from strop.errors import ConfigError, SandboxLost, WeightMismatch
from strop.rollout import (
    RESTART,
    Example,
    FailureOwner,
    FinishReason,
    Group,
    Message,
    Outcome,
    Rollout,
    Sampling,
    Turn,
    make_example,
)
from strop.tasks import build_task
from strop.tasks.failures import describe_failure
from strop.tasks.generated import ArithmeticSpec
from strop.tokenizer import Tokenizer
from strop.train.measure import measure_rollouts
from tests.fixtures.builders import plan_for
from tests.fixtures.dummy_engine import DummyEngine, ScriptedReply
from tests.fixtures.judging import failed
from tests.fixtures.scripted_environment import ScriptedEnvironment
from tests.fixtures.tiny_tokenizer import tiny_tokenizer
from tests.fixtures.tool_templates import HERMES

SUM = make_example("arithmetic", {"a": 3, "b": 4}, "7")
TASK = build_task(ArithmeticSpec())


@pytest.fixture
def tokenizer(tmp_path: Path) -> Tokenizer:
    return Tokenizer.load(tiny_tokenizer(tmp_path / "chat"))


@pytest.fixture
def base_tokenizer(tmp_path: Path) -> Tokenizer:
    return Tokenizer.load(tiny_tokenizer(tmp_path / "base", with_chat_template=False))


def plan(sample_index: int = 0, *, max_reply_tokens: int = 32, example: Example = SUM) -> RolloutPlan:
    return plan_for(
        example,
        max_reply_tokens=max_reply_tokens,
        sample_index=sample_index,
        step=5,
        run_seed=9,
        sampling=Sampling(temperature=0.8),
    )


def attempt(
    environment: Environment,
    engine: DummyEngine,
    tokenizer: Tokenizer,
    *,
    sample_index: int = 0,
    max_reply_tokens: int = 32,
) -> Rollout:
    wanted = plan(sample_index, max_reply_tokens=max_reply_tokens)
    return asyncio.run(run_rollout(environment, engine, tokenizer, wanted))


def judge_last_word(example: Example, actions: tuple[Action, ...]) -> Outcome:
    is_correct = bool(actions) and actions[-1].text == example.answer
    return Outcome(parts={"correct": float(is_correct)}, is_correct=is_correct)


def asking(*questions: str) -> ScriptedEnvironment:
    messages = [(Message(role="user", content=question),) for question in questions]
    return ScriptedEnvironment(messages[0], messages[1:], judge_last_word)


def joined_ids(turns: Sequence[Turn]) -> list[int]:
    return [int(token_id) for turn in turns for token_id in turn.token_ids]


def test_one_turn_from_prompt_to_score(tokenizer: Tokenizer) -> None:
    engine = DummyEngine(tokenizer, ["3 + 4 = 7"])
    rollout = attempt(SingleTurn(TASK), engine, tokenizer)
    prompt, reply = rollout.turns
    assert (prompt.role, prompt.text) == (
        "prompt",
        "<|start|>user\nWhat is 3 + 4?<|end|>\n<|start|>assistant\n",
    )
    assert prompt.token_ids.tolist() == tokenizer.encode(prompt.text).tolist()
    assert not prompt.is_sampled
    assert (reply.role, reply.text, reply.finish_reason) == ("assistant", "3 + 4 = 7", FinishReason.EOS)
    assert reply.token_ids[-1] == tokenizer.eos_id
    assert (rollout.outcome.reward, rollout.outcome.truncated) == (1.0, False)
    assert (rollout.step, rollout.sample_index, rollout.sampling.temperature) == (5, 0, 0.8)


def test_request_says_what_the_plan_and_the_task_say(tokenizer: Tokenizer) -> None:
    engine = DummyEngine(tokenizer, ["7"])
    attempt(SingleTurn(TASK), engine, tokenizer, sample_index=2, max_reply_tokens=6)
    (request,) = engine.requests
    assert request.seed == stream_seed(9, SUM.example_id, 5, 2, 0)
    assert request.max_tokens == 6
    assert request.stop_token_ids == tokenizer.stop_token_ids
    assert request.sampling == Sampling(temperature=0.8)


def test_time_is_kept_by_stage(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = iter([1.0, 4.0, 10.0, 10.5])
    monkeypatch.setattr("strop.environments.rollout.perf_counter", lambda: next(ticks))
    rollout = attempt(SingleTurn(TASK), DummyEngine(tokenizer, ["7"]), tokenizer)
    # Generation from 1 to 4, judging from 10 to 10.5.
    assert rollout.seconds == {"generate": 3.0, "verify": 0.5}


def test_ids_that_do_not_read_as_their_text_are_not_extended(tokenizer: Tokenizer) -> None:
    prompts, asked = PromptCache(tokenizer, "chat"), Message(role="user", content="1 + 1?")
    ids = np.append(tokenizer.encode("2"), np.int32(tokenizer.turn_end_id))
    for text, is_extended in (("2", True), ("3", False)):
        reply = Turn(role="assistant", text=text, token_ids=ids, finish_reason=FinishReason.EOS)
        assert (prompts.extend([asked], reply, (), [asked]) is not None) is is_extended


def test_reply_that_would_encode_differently_is_not_encoded_again(tokenizer: Tokenizer) -> None:
    class SplitEngine(DummyEngine):
        """Samples "as" as two tokens, where the tokenizer would merge them."""

        async def generate(self, request: GenerationRequest) -> Completion:
            completion = await super().generate(request)
            ids = np.concatenate([tokenizer.encode("a"), tokenizer.encode("s"), completion.token_ids[-1:]])
            return Completion(
                token_ids=ids.astype(np.int32),
                logprobs=np.full(3, -1, dtype=np.float32),
                text="as",
                finish_reason=FinishReason.EOS,
                policy_version=0,
            )

    engine = SplitEngine(tokenizer, ["as", "as"])
    rollout = attempt(asking("a?", "b?"), engine, tokenizer)
    assert tokenizer.encode("as").tolist() != rollout.turns[1].token_ids[:-1].tolist()
    assert engine.requests[1].prompt_ids.tolist() == joined_ids(rollout.turns[:3])


def test_turns_of_a_base_model(base_tokenizer: Tokenizer) -> None:
    rollout = attempt(asking("a?", "b?"), DummyEngine(base_tokenizer, ["x", "7"]), base_tokenizer)
    assert [turn.text for turn in rollout.turns] == ["a?\n", "x", "\n\nb?\n", "7"]


@pytest.mark.parametrize(
    "template",
    [
        # Drops earlier replies, as some templates drop earlier reasoning.
        "{% for m in messages %}{{ m.content if m.role == 'user' or loop.last }}{% endfor %}:",
        # Ends a turn with something else than the terminator.
        "{% for m in messages %}[{{ m.role }}]{{ m.content }}[/]{% endfor %}[assistant]",
    ],
)
def test_template_that_cannot_be_extended_begins_a_new_sample(tmp_path: Path, template: str) -> None:
    (tiny_tokenizer(tmp_path) / "chat_template.jinja").write_text(template)
    tokenizer = Tokenizer.load(tmp_path)
    engine = DummyEngine(tokenizer, ["x", "7"])
    rollout = attempt(asking("a?", "b?"), engine, tokenizer)
    assert rollout.outcome.reward == 1.0
    assert [turn.role for turn in rollout.turns] == ["prompt", "assistant", RESTART, "assistant"]
    history = [Message(role=role, content=text) for role, text in (("user", "a?"), ("assistant", "x"))]
    rendered = tokenizer.render([*history, Message(role="user", content="b?")])
    assert rollout.turns[2].text == rendered
    assert [len(turns) for turns in rollout.samples] == [2, 2]
    for request, turns in zip(engine.requests, rollout.samples, strict=True):
        assert request.prompt_ids.tolist() == turns[0].token_ids.tolist()


@pytest.mark.parametrize(
    ("reply", "reward"), [("3 + 4 = 7", None), ("3 + 4 = 7</think>8", 0.0), ("8</think>7", 1.0)]
)
def test_a_thought_the_prompt_opens_is_no_answer(tmp_path: Path, reply: str, reward: float | None) -> None:
    """Incident: a thought that was cut was judged, and earned full marks."""
    path = tiny_tokenizer(tmp_path) / "chat_template.jinja"
    path.write_text(path.read_text() + "{% if add_generation_prompt %}<think>\n{% endif %}")
    tokenizer = Tokenizer.load(tmp_path)
    max_tokens = 32 if reward is not None else len(tokenizer.encode(reply))
    engine = DummyEngine(tokenizer, [reply])
    rollout = attempt(SingleTurn(TASK), engine, tokenizer, max_reply_tokens=max_tokens)
    assert rollout.outcome.reward == (reward or 0.0)
    assert rollout.outcome.truncated == (reward is None)


def test_a_control_token_inside_a_reply_is_seen(tokenizer: Tokenizer) -> None:
    """Incident: what was sampled as 4, a control token, 2 was judged as 42."""
    (reply,) = attempt(asking("a?"), DummyEngine(tokenizer, ["4<|start|>2"]), tokenizer).turns[1:]
    assert reply.text == "4<|start|>2"
    assert tokenizer.token_id("<|start|>") in reply.token_ids


def test_a_reply_of_a_tool_extends_the_ids(tmp_path: Path) -> None:
    """The world reads the call in the reply, and its next messages are those of a tool."""
    (tiny_tokenizer(tmp_path) / "chat_template.jinja").write_text(HERMES)
    tokenizer = Tokenizer.load(tmp_path)
    call = '<tool_call>\n{"name":  "add", "arguments": {"a": 3, "b": 4}}\n</tool_call>'
    answer = Message(role="tool", content="7", tool_call_id="call-1", name="add")
    world = ScriptedEnvironment((Message(role="user", content="a?"),), [(answer, answer)], judge_last_word)
    engine = DummyEngine(tokenizer, [call, "7"])
    rollout = attempt(world, engine, tokenizer, max_reply_tokens=99)
    assert rollout.outcome.reward == 1.0
    assert rollout.turns[1].text == call
    assert rollout.turns[2].text == (
        "\n<|start|>user\n<tool_response>\n7\n</tool_response>\n<tool_response>\n7\n</tool_response><|end|>"
        "\n<|start|>assistant\n"
    )
    assert engine.requests[1].prompt_ids.tolist() == joined_ids(rollout.turns[:3])


def test_a_reply_of_a_tool_that_the_template_leaves_out_ends_the_run(tmp_path: Path) -> None:
    template = "{% for m in messages if m.role != 'tool' %}{{ m.content }}{% endfor %}"
    (tiny_tokenizer(tmp_path) / "chat_template.jinja").write_text(template)
    tokenizer = Tokenizer.load(tmp_path)
    answer = Message(role="tool", content="7")
    world = ScriptedEnvironment((Message(role="user", content="a?"),), [(answer,)], judge_last_word)
    with pytest.raises(ConfigError, match="leaves out a message of the role tool"):
        attempt(world, DummyEngine(tokenizer, ["x"]), tokenizer)
    assert world.num_closes == 1


def test_cut_reply_is_judged_and_marked_and_a_cut_turn_ends_the_attempt(tokenizer: Tokenizer) -> None:
    rollout = attempt(SingleTurn(TASK), DummyEngine(tokenizer, ["7 or more"]), tokenizer, max_reply_tokens=1)
    assert (rollout.outcome.truncated, rollout.outcome.reward) == (True, 1.0)
    environment = asking("a?", "b?")
    rollout = attempt(environment, DummyEngine(tokenizer, ["xyz"]), tokenizer, max_reply_tokens=2)
    assert [action.text for action in environment.actions] == ["xy"]
    assert rollout.outcome.truncated


class Failing(ScriptedEnvironment):
    """Raises an error in one of its calls."""

    def __init__(self, call: str, error: Exception) -> None:
        super().__init__(
            (Message(role="user", content="a?"),), [(Message(role="user", content="b?"),)], judge_last_word
        )
        self._call, self._error = call, error

    async def reset(self, example: Example, seed: int) -> tuple[Message, ...]:
        self._fail("reset")
        return await super().reset(example, seed)

    async def step(self, action: Action) -> StepResult:
        self._fail("step")
        return await super().step(action)

    async def score(self) -> Outcome:
        self._fail("score")
        return await super().score()

    def _fail(self, call: str) -> None:
        if call == self._call:
            raise self._error


@pytest.mark.parametrize("call", ["reset", "step", "score"])
@pytest.mark.parametrize("owner", FailureOwner)
def test_a_world_says_who_owns_its_failure(tokenizer: Tokenizer, call: str, owner: FailureOwner) -> None:
    world = Failing(call, AttemptFailed(owner, "disk_full", "no room for the workspace"))
    rollout = attempt(world, DummyEngine(tokenizer, ["x", "7"]), tokenizer)
    failure = rollout.outcome.failure
    assert failure is not None
    assert (failure.owner, failure.kind, rollout.outcome.reward) == (owner, "disk_full", None)
    assert describe_failure(failure).startswith(
        f"{owner}, disk_full: no room for the workspace (test_rollout.py:"
    )
    assert [len(rollout.turns), world.num_closes] == [{"reset": 0, "step": 2, "score": 4}[call], 1]


@pytest.mark.parametrize(
    ("error", "owner", "kind"),
    [
        (SandboxLost("it is gone"), FailureOwner.INFRA, "SandboxLost"),
        (OSError("it is gone"), FailureOwner.TASK, "OSError"),
    ],
)
def test_a_failure_without_a_named_owner(
    tokenizer: Tokenizer, error: Exception, owner: FailureOwner, kind: str
) -> None:
    rollout = attempt(Failing("step", error), DummyEngine(tokenizer, ["x"]), tokenizer)
    assert failed(rollout.outcome) == (owner, kind)


def test_the_owner_of_a_failure_survives_pickling() -> None:
    error = pickle.loads(pickle.dumps(AttemptFailed(FailureOwner.INFRA, "disk_full", "no room")))
    assert (error.owner, error.kind, str(error)) == (FailureOwner.INFRA, "disk_full", "no room")


def test_cancellation_ends_the_request_and_closes(tokenizer: Tokenizer) -> None:
    ended = []

    class SilentEngine(DummyEngine):
        async def generate(self, request: GenerationRequest) -> Completion:
            try:
                await asyncio.Event().wait()
            finally:
                ended.append(asyncio.current_task().cancelling())  # type: ignore[union-attr]
            raise AssertionError("the event is never set")

    environment = asking("a?")

    async def act() -> None:
        rollout = asyncio.ensure_future(
            run_rollout(environment, SilentEngine(tokenizer, []), tokenizer, plan())
        )
        await asyncio.sleep(0.01)
        rollout.cancel()
        with pytest.raises(asyncio.CancelledError):
            await rollout
        assert ended == [1]

    asyncio.run(act())
    assert environment.num_closes == 1


def test_a_world_that_does_not_close_is_counted_and_the_score_stands(tokenizer: Tokenizer) -> None:
    class LeakyEnvironment(SingleTurn):
        async def close(self) -> None:
            raise OSError("busy")

    rollout = attempt(LeakyEnvironment(TASK), DummyEngine(tokenizer, ["7"]), tokenizer)
    assert rollout.outcome.reward == 1.0
    assert rollout.outcome.metrics == {"close_failed": 1.0}


def group_of(engine: DummyEngine, tokenizer: Tokenizer, plans: Sequence[RolloutPlan]) -> Group:
    return asyncio.run(run_group(partial(SingleTurn, TASK), engine, tokenizer, plans))


def test_group_shares_one_prompt_and_keeps_the_order(tokenizer: Tokenizer) -> None:
    engine = DummyEngine(tokenizer, ["7", "8", "7"])
    group = group_of(engine, tokenizer, [plan(0), plan(1), plan(2)])
    assert [rollout.sample_index for rollout in group.rollouts] == [0, 1, 2]
    assert [rollout.outcome.reward for rollout in group.rollouts] == [1.0, 0.0, 1.0]
    # The same array, not an equal one: it was encoded once.
    assert len({id(rollout.turns[0].token_ids) for rollout in group.rollouts}) == 1
    assert len({request.seed for request in engine.requests}) == 3


def test_one_lost_rollout_leaves_the_others(tokenizer: Tokenizer) -> None:
    cable = OSError("cable")
    group = group_of(DummyEngine(tokenizer, ["7", cable, cable, cable]), tokenizer, [plan(0), plan(1)])
    assert [rollout.outcome.reward for rollout in group.rollouts] == [1.0, None]
    assert group.rollouts[1].outcome.metrics[NUM_REFILLS] == 2.0


def test_what_the_engine_loses_is_made_again_as_it_would_have_been(tokenizer: Tokenizer) -> None:
    engine = DummyEngine(tokenizer, ["7", OSError("cable"), ScriptedReply(text="7", is_aborted=True), "7"])
    kept, lost = group_of(engine, tokenizer, [plan(0), plan(1)]).rollouts
    assert (kept.outcome.reward, lost.outcome.reward) == (1.0, 1.0)
    assert (NUM_REFILLS in kept.outcome.metrics, lost.outcome.metrics[NUM_REFILLS]) == (False, 2.0)
    _, *again = engine.requests
    # The same stream, so that the attempt is what it would have been.
    assert len({request.seed for request in again}) == 1
    metrics = measure_rollouts([Group(example=SUM, rollouts=(kept, lost))])
    assert (metrics["failed_frac"], metrics["refilled_frac"]) == (0.0, 0.5)


@pytest.mark.parametrize(
    ("error", "num_attempts"), [(SandboxLost("gone", kind="gone"), 3), (KeyError("a bug"), 1)]
)
def test_a_world_is_made_anew_for_the_machines_failures_alone(
    tokenizer: Tokenizer, error: Exception, num_attempts: int
) -> None:
    made: list[Failing] = []

    def make_environment() -> Failing:
        made.append(Failing("step", error))
        return made[-1]

    engine = DummyEngine(tokenizer, lambda request: "7")
    (lost,) = asyncio.run(run_group(make_environment, engine, tokenizer, [plan()])).rollouts
    assert (lost.outcome.reward, len(made)) == (None, num_attempts)
    assert [one.num_closes for one in made] == [1] * num_attempts


def test_what_ends_the_run_ends_the_group(tokenizer: Tokenizer) -> None:
    with pytest.raises(WeightMismatch, match="other"):
        group_of(DummyEngine(tokenizer, ["7", WeightMismatch("other")]), tokenizer, [plan(0), plan(1)])
