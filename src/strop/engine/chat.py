"""The chat form of the OpenAI protocol over an engine of strop's own, as far as a judge needs it.

POST /v1/chat/completions takes messages, a temperature, a seed and `max_tokens`, and answers with one choice.
Not covered: streaming, several choices, tools, log-probabilities; they are ignored.
"""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, Field

from strop.engine.contract import Engine, GenerationRequest
from strop.rollout import FinishReason, Message, Sampling
from strop.tokenizer import Tokenizer

CHAT_PATH = "/v1/chat/completions"


class MessageForm(BaseModel):
    """One message."""

    role: str
    content: str


class ChatCall(BaseModel):
    """What is asked."""

    model: str
    messages: list[MessageForm] = Field(min_length=1)
    temperature: float = Field(default=1.0, ge=0.0)
    seed: int = Field(default=0, ge=0, lt=2**64)
    max_tokens: int = Field(default=512, ge=1)


class ChatFace:
    """Answers for one engine."""

    def __init__(self, engine: Engine, tokenizer: Tokenizer) -> None:
        self._engine = engine
        self._tokenizer = tokenizer

    async def complete(self, call: ChatCall) -> dict[str, Any]:
        """Answer a chat.

        Raises: ConfigError if the model has no chat template; EngineError as the engine does.
        """
        messages = [Message(role=one.role, content=one.content) for one in call.messages]
        request = GenerationRequest(
            prompt_ids=self._tokenizer.encode(self._tokenizer.render(messages)),
            seed=call.seed,
            sampling=Sampling(temperature=call.temperature),
            max_tokens=call.max_tokens,
            stop_token_ids=frozenset(self._tokenizer.stop_token_ids),
        )
        found = await self._engine.generate(request)
        is_cut = found.finish_reason is FinishReason.LENGTH
        choice = {
            "index": 0,
            "message": {"role": "assistant", "content": found.text},
            "finish_reason": "length" if is_cut else "stop",
        }
        return {"object": "chat.completion", "model": call.model, "choices": [choice]}
