"""The JSON form in which requests, replies, weight updates and errors cross between processes.

Token ids in, token ids out: no prompt is ever tokenized twice. Ids and log-probabilities are sent as the
bytes of their int32 and float32 values, and Python's JSON round-trips float64, so every value arrives
exactly. Values that the requests of a batch share, above all prompts, are sent once, and replies are columns:
a token takes 10.7 bytes (two values in base64) and its text, 15 in all in English. Where replies return as
they end, each line takes some 120 bytes more. Errors return as the class that was raised.
"""

from __future__ import annotations

import base64
import binascii
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from importlib import import_module
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field

from strop.engine.contract import (
    Completion,
    GenerationRequest,
    ReplyScore,
    UpdateMode,
    WeightReceipt,
    WeightTransport,
    WeightUpdate,
)
from strop.errors import ConfigError, EngineError, StropError
from strop.rollout import FinishReason, FloatArray, IntArray, Sampling, VersionSegment

ABSENT = -1
"""Number of tokens where there is an error in place of a reply."""
_MAX_TRACE_CHARS = 2500


class Form(BaseModel):
    """Base of all messages: no defaults for missing fields, no further fields."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class MannerForm(Form):
    """Sampling settings that requests share."""

    temperature: float
    top_p: float
    top_k: int | None
    max_tokens: int
    stop_token_ids: list[int]
    stop_strings: list[str]

    @classmethod
    def of(cls, request: GenerationRequest) -> MannerForm:
        """Encode a request without its prompt and seed."""
        return cls(
            temperature=request.sampling.temperature,
            top_p=request.sampling.top_p,
            top_k=request.sampling.top_k,
            max_tokens=request.max_tokens,
            stop_token_ids=sorted(request.stop_token_ids),
            stop_strings=list(request.stop_strings),
        )


class RequestForm(Form):
    """A `GenerationRequest`: its seed, and the places of its other parts in the message."""

    prompt: int = Field(ge=0)
    manner: int = Field(ge=0)
    seed: int = Field(ge=0, lt=2**64)


class GenerateCall(Form):
    """Requests of one batch, in their order. Parts that they share are sent once."""

    prompts: list[str]
    """In the form of `write_ids`."""
    manners: list[MannerForm]
    requests: list[RequestForm]

    @classmethod
    def of(cls, requests: Sequence[GenerationRequest]) -> GenerateCall:
        """Encode requests."""
        prompts: dict[str, int] = {}
        manners: dict[str, tuple[int, MannerForm]] = {}
        forms = []
        for request in requests:
            manner = MannerForm.of(request)
            place, _ = manners.setdefault(manner.model_dump_json(), (len(manners), manner))
            prompt = prompts.setdefault(write_ids(request.prompt_ids), len(prompts))
            forms.append(RequestForm(prompt=prompt, manner=place, seed=request.seed))
        return cls(prompts=list(prompts), manners=[manner for _, manner in manners.values()], requests=forms)

    def read(self) -> list[GenerationRequest]:
        """Decode the requests; equal prompts are one array.

        Raises: EngineError if a prompt is damaged, or a request names one that is missing.
        """
        prompts = [read_ids(prompt) for prompt in self.prompts]
        for form in self.requests:
            if form.prompt >= len(prompts) or form.manner >= len(self.manners):
                raise _damaged(f"a request names prompt {form.prompt} of {len(prompts)}")
        return [
            GenerationRequest(
                prompt_ids=prompts[form.prompt],
                seed=form.seed,
                sampling=Sampling(temperature=manner.temperature, top_p=manner.top_p, top_k=manner.top_k),
                max_tokens=manner.max_tokens,
                stop_token_ids=frozenset(manner.stop_token_ids),
                stop_strings=tuple(manner.stop_strings),
            )
            for form in self.requests
            for manner in [self.manners[form.manner]]
        ]


class RemoteTraceback(Exception):
    """The cause of an error from another process; its text is the traceback there."""


class ErrorForm(Form):
    """An error of strop's tree, by the name of its class."""

    kind: str
    message: str
    trace: str = ""
    """For an error with a cause: the end of both tracebacks."""

    @classmethod
    def of(cls, error: StropError) -> ErrorForm:
        """Encode an error."""
        trace = "".join(traceback.format_exception(error))[-_MAX_TRACE_CHARS:] if error.__cause__ else ""
        return cls(kind=type(error).__name__, message=str(error), trace=trace)

    def read(self) -> StropError:
        """Return the error as its class; as EngineError if this side does not know the class."""
        known = {kind.__name__: kind for kind in _walk_errors(StropError)}
        error = known.get(self.kind, EngineError)(self.message)
        error.__cause__ = RemoteTraceback(self.trace) if self.trace else None
        return error


class GenerateAnswer(Form):
    """The outcome of each request, in their order, as columns.

    Versions have no default: a reply without one is refused.
    """

    num_tokens: list[int]
    """Of each reply; `ABSENT` for an error."""
    token_ids: str
    """Of all replies, joined, in the form of `write_ids`."""
    logprobs: str
    """Of all replies, joined, in the form of `write_floats`."""
    texts: list[str]
    finish_reasons: list[FinishReason]
    policy_versions: list[int]
    segments: dict[int, list[tuple[int, int]]] = {}
    """Start and version of each segment, by the number of the reply among the replies."""
    errors: list[ErrorForm] = []

    @classmethod
    def of(cls, outcomes: Sequence[Completion | StropError]) -> GenerateAnswer:
        """Encode replies and errors."""
        replies = [outcome for outcome in outcomes if isinstance(outcome, Completion)]
        return cls(
            num_tokens=[
                len(outcome.token_ids) if isinstance(outcome, Completion) else ABSENT for outcome in outcomes
            ],
            token_ids=write_ids(_join([reply.token_ids for reply in replies], np.int32)),
            logprobs=write_floats(_join([reply.logprobs for reply in replies], np.float32)),
            texts=[reply.text for reply in replies],
            finish_reasons=[reply.finish_reason for reply in replies],
            policy_versions=[reply.policy_version for reply in replies],
            segments={
                place: [(segment.start, segment.version) for segment in reply.segments]
                for place, reply in enumerate(replies)
                if reply.segments
            },
            errors=[ErrorForm.of(outcome) for outcome in outcomes if isinstance(outcome, StropError)],
        )

    def read(self, num_requests: int) -> list[Completion | StropError]:
        """Decode replies and errors.

        Raises: EngineError if the columns do not fit each other or the number of requests.
        """
        lengths = [length for length in self.num_tokens if length >= 0]
        num_errors = self.num_tokens.count(ABSENT)
        columns = (self.texts, self.finish_reasons, self.policy_versions)
        if len(self.num_tokens) != num_requests:
            raise _damaged(f"{len(self.num_tokens)} replies to {num_requests} requests")
        if len(lengths) + num_errors != num_requests or len(self.errors) != num_errors:
            raise _damaged(f"{len(self.errors)} errors in {num_errors} places")
        if {len(column) for column in columns} != {len(lengths)} or max(self.segments, default=-1) >= len(
            lengths
        ):
            raise _damaged(f"columns of other lengths than {len(lengths)} replies")
        ids = read_ids(self.token_ids)
        if len(ids) != sum(lengths):
            raise _damaged(f"{len(ids)} token ids came for {sum(lengths)} tokens")
        logprobs = read_floats(self.logprobs, sum(lengths))
        replies, errors, end = iter(range(len(lengths))), iter(self.errors), 0
        outcomes: list[Completion | StropError] = []
        for length in self.num_tokens:
            if length == ABSENT:
                outcomes.append(next(errors).read())
                continue
            place, start, end = next(replies), end, end + length
            segments = [VersionSegment(start=at, version=v) for at, v in self.segments.get(place, ())]
            reply = Completion(
                token_ids=ids[start:end],
                logprobs=logprobs[start:end],
                text=self.texts[place],
                finish_reason=self.finish_reasons[place],
                policy_version=self.policy_versions[place],
                segments=tuple(segments),
            )
            outcomes.append(reply)
        return outcomes


class AnswerPart(Form):
    """The outcomes of some requests of a call: one line of a streamed answer."""

    places: list[int]
    """Places of these requests in the call."""
    answer: GenerateAnswer

    @classmethod
    def of(cls, outcomes: Mapping[int, Completion | StropError]) -> AnswerPart:
        """Encode the outcomes of the requests at some places."""
        return cls(places=list(outcomes), answer=GenerateAnswer.of(list(outcomes.values())))

    def read(self) -> list[tuple[int, Completion | StropError]]:
        """Decode the outcomes by place. Raises: EngineError as `GenerateAnswer.read` does."""
        return list(zip(self.places, self.answer.read(len(self.places)), strict=True))


class ScoreCall(Form):
    """Replies to one prompt, to be scored together; ids in the form of `write_ids`."""

    prompt_ids: str
    replies: list[str]
    temperature: float

    @classmethod
    def of(cls, prompt_ids: IntArray, replies: Sequence[IntArray], temperature: float) -> ScoreCall:
        """Encode replies to score."""
        return cls(
            prompt_ids=write_ids(prompt_ids),
            replies=[write_ids(ids) for ids in replies],
            temperature=temperature,
        )


class ScoreForm(Form):
    """A `ReplyScore`."""

    logprobs: str
    """In the form of `write_floats`."""
    policy_version: int

    @classmethod
    def of(cls, score: ReplyScore) -> ScoreForm:
        """Encode a score."""
        return cls(logprobs=write_floats(score.logprobs), policy_version=score.policy_version)

    def read(self, num_tokens: int) -> ReplyScore:
        """Decode the score. Raises: EngineError if it has another length."""
        return ReplyScore(logprobs=read_floats(self.logprobs, num_tokens), policy_version=self.policy_version)


class ScoreAnswer(Form):
    """One score per reply, in the same order."""

    scores: list[ScoreForm]


class UpdateForm(Form):
    """A `WeightUpdate`."""

    version: int
    digest: str
    transport: WeightTransport
    path: str | None
    mode: UpdateMode
    is_adapter: bool

    @classmethod
    def of(cls, update: WeightUpdate) -> UpdateForm:
        """Encode an update."""
        return cls(**asdict(update))

    def read(self) -> WeightUpdate:
        """Decode the update."""
        return WeightUpdate(**dict(self))


class ReceiptForm(Form):
    """A `WeightReceipt`."""

    version: int
    digest: str

    @classmethod
    def of(cls, receipt: WeightReceipt) -> ReceiptForm:
        """Encode a receipt."""
        return cls(version=receipt.version, digest=receipt.digest)

    def read(self) -> WeightReceipt:
        """Decode the receipt."""
        return WeightReceipt(version=self.version, digest=self.digest)


class HealthForm(Form):
    """A server's status, which needs no key."""

    pid: int
    version: int
    digest: str
    """Digest of the weights served now."""
    model_digest: str
    """Digest of the weights that the server loaded when it started."""
    tokenizer_digest: str = ""
    """Digest of its tokenizer; empty without one."""


class ReadyForm(Form):
    """Written to the ready file once the server listens."""

    url: str
    pid: int


def write_ids(token_ids: IntArray) -> str:
    """Return token ids as text: base64 of little-endian int32 values."""
    return base64.b64encode(token_ids.astype("<i4").tobytes()).decode("ascii")


def read_ids(text: str) -> IntArray:
    """Return the ids of `write_ids`.

    Raises: EngineError if the text is damaged or an id is negative.
    """
    token_ids = _read_array(text, "<i4", "token ids").astype(np.int32)
    if len(token_ids) and int(token_ids.min()) < 0:
        raise _damaged(f"a token id is {int(token_ids.min())}")
    return token_ids


def write_floats(values: FloatArray) -> str:
    """Return float32 values as text that reads back bit for bit."""
    return base64.b64encode(values.astype("<f4").tobytes()).decode("ascii")


def read_floats(text: str, num_values: int) -> FloatArray:
    """Return the values of `write_floats`.

    Raises: EngineError if the text is damaged or holds another number of values.
    """
    values = _read_array(text, "<f4", "log-probabilities").astype(np.float32)
    if len(values) != num_values:
        raise _damaged(f"{len(values)} log-probabilities came for {num_values} tokens")
    return values


def _read_array(text: str, dtype: str, values: str) -> NDArray[Any]:
    try:
        return np.frombuffer(base64.b64decode(text, validate=True), dtype=dtype)
    except (binascii.Error, ValueError) as error:
        raise _damaged(f"{values} are unreadable ({error})") from error


def _join(parts: Sequence[NDArray[Any]], dtype: type[Any]) -> NDArray[Any]:
    return np.concatenate(parts).astype(dtype) if parts else np.zeros(0, dtype)


def require_server_part(module: str, user: str = "an engine in a process of its own") -> None:
    """Check that a module of the `server` extra is installed, which `user` needs.

    Raises: ConfigError naming the extra if it is missing.
    """
    try:
        import_module(module)
    except ImportError as error:
        raise ConfigError(
            f"{user} needs the Python module {module!r}, which is missing",
            allowed="an installation with the server extra; engines with placement.kind = inline need none",
            next_step="run `pip install strop[server]`",
        ) from error


def _walk_errors(kind: type[StropError]) -> Iterator[type[StropError]]:
    yield kind
    for child in kind.__subclasses__():
        yield from _walk_errors(child)


def _damaged(flaw: str) -> EngineError:
    return EngineError(f"{flaw}. Engine and learner must run the same version of strop.")
