"""The JSON form in which requests, replies, weight updates and errors cross between processes.

Token ids in, token ids out: no prompt is ever tokenized twice. Log-probabilities travel as the bytes
of their float32 values, and Python's JSON writes float64 so that it reads back equal, so a value that
crossed is the value that was sent. Errors come home as the class that was raised.

Shapes: T = tokens of one sequence.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterator
from importlib import import_module
from typing import Annotated

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from strop.engine.contract import (
    Completion,
    GenerationRequest,
    ReplyScore,
    WeightReceipt,
    WeightTransport,
    WeightUpdate,
)
from strop.errors import ConfigError, EngineError, StropError, explain_refusal
from strop.rollout import FinishReason, FloatArray, IntArray, Sampling

TokenId = Annotated[int, Field(ge=0, lt=2**31)]


class Form(BaseModel):
    """Base of everything on the wire: complete, exact, and nothing besides."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class RequestForm(Form):
    """A `GenerationRequest`."""

    prompt_ids: list[TokenId]
    seed: int = Field(ge=0, lt=2**64)
    temperature: float
    top_p: float
    top_k: int | None
    max_tokens: int
    stop_token_ids: list[TokenId]
    stop_strings: list[str]

    @classmethod
    def of(cls, request: GenerationRequest) -> RequestForm:
        """Write a request down."""
        return cls(
            prompt_ids=request.prompt_ids.tolist(),
            seed=request.seed,
            temperature=request.sampling.temperature,
            top_p=request.sampling.top_p,
            top_k=request.sampling.top_k,
            max_tokens=request.max_tokens,
            stop_token_ids=sorted(request.stop_token_ids),
            stop_strings=list(request.stop_strings),
        )

    def read(self) -> GenerationRequest:
        """Return the request that was written down."""
        return GenerationRequest(
            prompt_ids=_read_ids(self.prompt_ids),
            seed=self.seed,
            sampling=Sampling(temperature=self.temperature, top_p=self.top_p, top_k=self.top_k),
            max_tokens=self.max_tokens,
            stop_token_ids=frozenset(self.stop_token_ids),
            stop_strings=tuple(self.stop_strings),
        )


class CompletionForm(Form):
    """A `Completion`. The version has no default: a reply without its engine's stamp is refused."""

    token_ids: list[TokenId]
    logprobs: str
    """Base64 of T little-endian float32 values."""
    text: str
    finish_reason: FinishReason
    policy_version: int

    @classmethod
    def of(cls, completion: Completion) -> CompletionForm:
        """Write a completion down."""
        return cls(
            token_ids=completion.token_ids.tolist(),
            logprobs=write_floats(completion.logprobs),
            text=completion.text,
            finish_reason=completion.finish_reason,
            policy_version=completion.policy_version,
        )

    def read(self) -> Completion:
        """Return the completion that was written down.

        Raises: EngineError if tokens and log-probabilities differ in number.
        """
        return Completion(
            token_ids=_read_ids(self.token_ids),
            logprobs=read_floats(self.logprobs, len(self.token_ids)),
            text=self.text,
            finish_reason=self.finish_reason,
            policy_version=self.policy_version,
        )


class ErrorForm(Form):
    """An error of strop's tree, by the name of its class."""

    kind: str
    message: str

    @classmethod
    def of(cls, error: StropError) -> ErrorForm:
        """Write an error down."""
        return cls(kind=type(error).__name__, message=str(error))

    def read(self) -> StropError:
        """Return the error as its own class; as EngineError if this side does not know the class."""
        known = {kind.__name__: kind for kind in _walk_errors(StropError)}
        return known.get(self.kind, EngineError)(self.message)


class ReplyForm(Form):
    """What became of one request of a batch: exactly one of the two."""

    completion: CompletionForm | None = None
    error: ErrorForm | None = None


class GenerateCall(Form):
    """Requests that belong to one batch, in the order they were asked."""

    requests: list[RequestForm]


class GenerateAnswer(Form):
    """One reply per request, in the same order."""

    replies: list[ReplyForm]


class ScoreCall(Form):
    """Replies to one prompt, to be scored together."""

    prompt_ids: list[TokenId]
    replies: list[list[TokenId]]
    temperature: float


class ScoreForm(Form):
    """A `ReplyScore`."""

    logprobs: str
    """In the form of `write_floats`."""
    policy_version: int

    @classmethod
    def of(cls, score: ReplyScore) -> ScoreForm:
        """Write a score down."""
        return cls(logprobs=write_floats(score.logprobs), policy_version=score.policy_version)

    def read(self, num_tokens: int) -> ReplyScore:
        """Return the score that was written down. Raises: EngineError if it is of another length."""
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

    @classmethod
    def of(cls, update: WeightUpdate) -> UpdateForm:
        """Write an update down."""
        return cls(version=update.version, digest=update.digest, transport=update.transport, path=update.path)

    def read(self) -> WeightUpdate:
        """Return the update that was written down."""
        return WeightUpdate(
            version=self.version, digest=self.digest, transport=self.transport, path=self.path
        )


class ReceiptForm(Form):
    """A `WeightReceipt`."""

    version: int
    digest: str

    @classmethod
    def of(cls, receipt: WeightReceipt) -> ReceiptForm:
        """Write a receipt down."""
        return cls(version=receipt.version, digest=receipt.digest)

    def read(self) -> WeightReceipt:
        """Return the receipt that was written down."""
        return WeightReceipt(version=self.version, digest=self.digest)


class HealthForm(Form):
    """What a server says of itself to anyone on this machine."""

    pid: int
    version: int
    digest: str
    """Of the weights served now."""
    model_digest: str
    """Of the weights that the server loaded when it started."""


class ReadyForm(Form):
    """Written to the ready file once the server listens."""

    url: str
    pid: int


def write_floats(values: FloatArray) -> str:
    """Return float32 values as text that reads back bit for bit."""
    return base64.b64encode(values.astype("<f4").tobytes()).decode("ascii")


def read_floats(text: str, num_values: int) -> FloatArray:
    """Return the values of `write_floats`.

    Raises: EngineError if the text is damaged or holds another number of values.
    """
    try:
        values = np.frombuffer(base64.b64decode(text, validate=True), dtype="<f4").astype(np.float32)
    except (binascii.Error, ValueError) as error:
        raise _damaged(f"log-probabilities are unreadable ({error})", num_values) from error
    if len(values) != num_values:
        raise _damaged(f"{len(values)} log-probabilities came for {num_values} tokens", num_values)
    return values


def require_server_part(module: str) -> None:
    """Make sure that a module of the `server` extra is installed.

    Raises: ConfigError naming the extra if it is missing.
    """
    try:
        import_module(module)
    except ImportError as error:
        raise ConfigError(
            explain_refusal(
                f"an engine in a process of its own needs the Python module {module!r}, which is missing",
                allowed="placement.kind = process with the server extra, or placement.kind = inline",
                next_step="run `pip install strop[server]`",
            )
        ) from error


def _read_ids(token_ids: list[int]) -> IntArray:
    return np.array(token_ids, dtype=np.int32)


def _walk_errors(kind: type[StropError]) -> Iterator[type[StropError]]:
    yield kind
    for child in kind.__subclasses__():
        yield from _walk_errors(child)


def _damaged(given: str, num_values: int) -> EngineError:
    return EngineError(
        explain_refusal(
            given,
            allowed=f"base64 of {num_values} little-endian float32 values",
            next_step="run engine and learner from the same version of strop",
        )
    )
