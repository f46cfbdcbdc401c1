"""The things that flow: examples, turns, outcomes, rollouts and groups.

Frozen and serialisable, with no behaviour beyond checking their own form. Token streams are numpy
arrays, so a token costs its bytes and nothing more. Lengths are explicit: nothing in strop infers
the end of a text from a pad id, an end-of-text id or any other token value.

Shapes: T = tokens of one turn. logprobs_T[t] is the log-probability (nats) of token_ids_T[t] given
everything before it, under the distribution that it was sampled from.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from strop.errors import DataError, UnfitRecord

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    IntArray = NDArray[np.int32]
    FloatArray = NDArray[np.float32]
    BoolArray = NDArray[np.bool_]
else:
    # Types alone: a command that only reads a run file waits for no numpy.
    IntArray = FloatArray = BoolArray = Any


class Split(StrEnum):
    """The two disjoint parts of a task. There is no default: every score names its split."""

    TRAIN = "train"
    HELD_OUT = "held_out"


RESTART = "restart"
"""Role of a prompt that was rendered anew because the ids before it could not be extended."""
CONVERSATION = "conversation"
"""Role of a prompt with which a program begins another conversation, or edits an earlier one."""
PROMPT_TOO_LONG = "prompt_too_long"
"""Kind of failure: the model has no room for a whole reply behind the prompt, so nobody was asked."""


class FinishReason(StrEnum):
    """Why generation of a turn ended."""

    EOS = "eos"
    """A stop token was sampled; it is the last token of the turn."""
    STOP_STRING = "stop_string"
    """A stop string was completed. Its tokens were sampled and end the turn's ids; the text ends before."""
    LENGTH = "length"
    """The token budget was used up; the text is cut."""
    ABORT = "abort"
    """The engine gave up in between. Never a sample: discarded or run again, never scored."""


class FailureOwner(StrEnum):
    """Who is responsible for a rollout that could not be scored."""

    INFRA = "infra"
    FORMAT = "format"
    AGENT_CODE = "agent_code"
    TASK = "task"
    ENGINE = "engine"


@dataclass(frozen=True, kw_only=True, slots=True)
class Sampling:
    """The distribution that tokens are drawn from; it travels with the log-probabilities."""

    temperature: float = 1.0
    """Logits are divided by it. 0 means greedy: log-probabilities are then those at 1."""
    top_p: float = 1.0
    """Keep the most probable tokens up to this mass and renormalise. 1 keeps all."""
    top_k: int | None = None
    """Keep this many most probable tokens and renormalise. None keeps all."""

    @property
    def is_truncated(self) -> bool:
        """Whether the support is smaller than the vocabulary."""
        return self.top_p < 1.0 or self.top_k is not None


@dataclass(frozen=True, kw_only=True, slots=True)
class ToolCall:
    """A call of a tool that the assistant asks for.

    Raises: DataError if it has no name, or its arguments are no JSON object.
    """

    name: str
    arguments: str = "{}"
    """A JSON object as text."""
    call_id: str | None = None
    """Names the call in the tool's reply."""

    def __post_init__(self) -> None:
        try:
            is_object = isinstance(json.loads(self.arguments), dict)
        except (ValueError, RecursionError):
            is_object = False
        if not self.name or not is_object:
            raise DataError(
                f"a call of the tool {self.name!r} with the arguments {self.arguments!r:.80}",
                allowed="a name, and a JSON object as text",
                next_step="keep what is no whole call in the message's content",
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class Message:
    """One message of a chat, before rendering."""

    role: str
    """'system', 'user', 'assistant' or 'tool', or another that the model's chat template knows."""
    content: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    """Of an assistant's message."""
    tool_call_id: str | None = None
    """Of a tool's reply: the call that it answers."""
    name: str | None = None
    """Of a tool's reply: the tool. Many chat templates write neither of the two."""
    reasoning: str | None = None
    """What an assistant thought before its content; a template may leave out that of earlier turns."""

    @property
    def text(self) -> str:
        """The content."""
        return self.content

    def to_json(self) -> dict[str, Any]:
        """Return the message in the form of OpenAI's chat API; what is empty is left out, except content."""
        found: dict[str, Any] = {"role": self.role, "content": self.content}
        if self.tool_calls:
            found["tool_calls"] = [
                {"type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                | ({} if call.call_id is None else {"id": call.call_id})
                for call in self.tool_calls
            ]
        optional = (("tool_call_id", self.tool_call_id), ("name", self.name), (REASONING, self.reasoning))
        return found | {key: value for key, value in optional if value is not None}

    @classmethod
    def from_json(cls, value: Any) -> Message:
        """Read a message that `to_json` or a client of OpenAI's chat API wrote.

        Content may be null, absent or in parts, which are joined; arguments may be an object.
        Raises: DataError if the value is no message, or has parts or keys that a `Message` has no room for.
        """
        try:
            message = cls(
                role=_text(value["role"]),
                content=_read_content(value.get("content") or ""),
                tool_calls=tuple(map(_read_call, value.get("tool_calls") or ())),
                tool_call_id=_optional_text(value, "tool_call_id"),
                name=_optional_text(value, "name"),
                reasoning=_optional_text(value, REASONING),
            )
            unknown = sorted(value.keys() - _MESSAGE_KEYS)
        except (AttributeError, LookupError, TypeError, ValueError) as error:
            raise _no_message(value, repr(error)) from error
        if unknown:
            raise _no_message(value, f"unknown keys {unknown}")
        return message


REASONING = "reasoning_content"
"""Key of a message's reasoning in JSON, as most servers and chat templates name it."""
_MESSAGE_KEYS = frozenset({"role", "content", "tool_calls", "tool_call_id", "name", REASONING})


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r:.80} is no text")
    return value


def _optional_text(value: Mapping[str, Any], key: str) -> str | None:
    return None if value.get(key) is None else _text(value[key])


def _read_content(value: Any) -> str:
    parts = value if isinstance(value, list) else [{"type": "text", "text": value}]
    if kinds := {part["type"] for part in parts} - {"text"}:
        raise ValueError(f"parts of types {kinds}")
    return "".join(_text(part["text"]) for part in parts)


def _read_call(value: Any) -> ToolCall:
    arguments = value["function"].get("arguments") or "{}"
    return ToolCall(
        name=_text(value["function"]["name"]),
        arguments=arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False),
        call_id=value.get("id"),
    )


def _no_message(value: Any, cause: str) -> DataError:
    return DataError(
        f"the message {value!r:.80} cannot be read ({cause})",
        allowed="role, content as a text or as parts of type text, tool_calls, tool_call_id, name and"
        " reasoning_content, as in OpenAI's chat API",
        next_step="correct the message",
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Example:
    """One problem of a task. Build it with `make_example`, which derives the id."""

    task: str
    example_id: str
    """Content hash over task name, fields and answer; stable under filtering and reordering."""
    fields: Mapping[str, Any]
    """What the prompt is rendered from. JSON values only."""
    answer: str | None
    """The gold answer; None where only a program can judge."""


def make_example(task: str, fields: Mapping[str, Any], answer: str | None) -> Example:
    """Build an example whose id is a hash of its content.

    Raises: DataError if a field is not a JSON value.
    """
    try:
        content = json.dumps([task, dict(fields), answer], sort_keys=True, ensure_ascii=False)
    except TypeError as error:
        raise DataError(
            f"an example of task {task} holds a value that is not JSON ({error})",
            allowed="strings, numbers, booleans, null, lists and tables",
            next_step="convert the field when the data is read",
        ) from error
    digest = hashlib.sha256(content.encode()).hexdigest()[:16]
    return Example(task=task, example_id=digest, fields=fields, answer=answer)


@dataclass(frozen=True, kw_only=True, slots=True)
class VersionSegment:
    """Where in a reply a policy version begins; it holds until the next segment's start."""

    start: int
    """Index of the segment's first token."""
    version: int


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Turn:
    """What one speaker said, as text and as the exact token ids that were fed or sampled."""

    role: str
    """'prompt', 'assistant', `RESTART` or `CONVERSATION`."""
    text: str
    """Of a reply, what is judged: without the terminator or the stop string that ended it."""
    token_ids: IntArray
    logprobs: FloatArray | None = None
    """Only on turns that the policy spoke; then as long as `token_ids` and finite."""
    policy_version: int | None = None
    """Of the oldest token, where the weights changed in between."""
    finish_reason: FinishReason | None = None
    segments: tuple[VersionSegment, ...] = ()
    """Which version sampled which tokens; empty where one version sampled all."""

    def __post_init__(self) -> None:
        if self.logprobs is None:
            return
        if len(self.logprobs) != len(self.token_ids):
            raise UnfitRecord(
                f"a turn has {len(self.token_ids)} token ids and {len(self.logprobs)} log-probabilities"
            )
        import numpy as np

        if not bool(np.isfinite(self.logprobs).all()):
            raise UnfitRecord("a turn has a log-probability that is not finite")

    @property
    def is_sampled(self) -> bool:
        """Whether the policy spoke this turn, so that its tokens are trained."""
        return self.logprobs is not None


@dataclass(frozen=True, kw_only=True, slots=True)
class Failure:
    """Why a rollout has no score."""

    owner: FailureOwner
    kind: str
    """Exception class or cause, for counting: 'TypeError', 'timeout', 'abort'."""
    detail: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """What a rollout is worth, or why that is unknown. None is unscored and never becomes 0."""

    parts: Mapping[str, float | None]
    """Named reward parts; the reward is their sum."""
    is_correct: bool | None = None
    """Whether the task counts this as solved; separate from the reward, which may be shaped."""
    format_ok: bool | None = None
    """Whether the answer stood where the task asked for it; separate from being right."""
    truncated: bool = False
    timed_out: bool = False
    """Whether code that the policy wrote used up its time: a wrong answer, told apart from others."""
    extracted: str | None = None
    """What of the reply was compared or run; None where nothing was found or the whole reply counts."""
    isolation: str | None = None
    """Sandbox level that the policy's code ran at; None where nothing untrusted ran."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    turn_rewards: tuple[float, ...] = ()
    """How much of the reward each reply earned, for credit per turn (`algorithm.credit`). What they leave of
    the reward was earned by the last reply; empty: all of it."""
    failure: Failure | None = None

    @property
    def reward(self) -> float | None:
        """Sum of the parts, or None if a part is unscored or the rollout failed."""
        if self.failure is not None or not self.parts:
            return None
        values = [value for value in self.parts.values() if value is not None]
        if len(values) < len(self.parts) or not all(math.isfinite(v) for v in values):
            return None
        return math.fsum(values)

    @property
    def is_too_long(self) -> bool:
        """Whether the prompt left no room for a reply, so that there was no attempt."""
        return self.failure is not None and self.failure.kind == PROMPT_TOO_LONG

    @property
    def is_scored(self) -> bool:
        """Whether this outcome may enter group statistics."""
        return self.reward is not None

    @classmethod
    def lost(cls, owner: FailureOwner, kind: str, detail: str = "") -> Outcome:
        """Build the outcome of a rollout that could not be scored."""
        return cls(parts={}, failure=Failure(owner=owner, kind=kind, detail=detail))


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Rollout:
    """One attempt at one example."""

    example: Example
    step: int
    """Steps completed when the attempt was asked for; evaluation uses the same count."""
    sample_index: int
    """Position inside its group, from 0."""
    turns: tuple[Turn, ...]
    outcome: Outcome
    sampling: Sampling
    seconds: Mapping[str, float] = field(default_factory=dict)
    """Wall time by stage: 'generate', 'verify'."""

    @property
    def reply(self) -> Turn | None:
        """The last turn that the policy spoke, or None if it never did."""
        return next((turn for turn in reversed(self.turns) if turn.is_sampled), None)

    @property
    def heard(self) -> tuple[Turn, ...]:
        """Everything before the last turn that the policy spoke; all turns if it never did."""
        reply = self.reply
        return self.turns if reply is None else self.turns[: self.turns.index(reply)]

    @property
    def samples(self) -> tuple[tuple[Turn, ...], ...]:
        """The turns, cut where a prompt holds a whole conversation: what was seen and said in one piece.

        Each piece begins with a prompt. Its ids, joined, are what the engine was given and sampled.
        """
        restarts = [i for i, turn in enumerate(self.turns) if turn.role in (RESTART, CONVERSATION) and i]
        return tuple(
            self.turns[start:end] for start, end in itertools.pairwise([0, *restarts, len(self.turns)])
        )

    @property
    def num_sampled_tokens(self) -> int:
        """Tokens that the policy sampled over all turns, those that ended its replies among them."""
        return sum(len(turn.token_ids) for turn in self.turns if turn.is_sampled)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Group:
    """The rollouts of one example that are compared with each other."""

    example: Example
    rollouts: tuple[Rollout, ...]
