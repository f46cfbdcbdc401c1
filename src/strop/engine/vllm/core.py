"""vLLM's AsyncLLM as far as `VllmEngine` uses it. Made for vllm 0.32.

All uses of vLLM's classes and settings are here and in `weights`. Facts about 0.32 that this
relies on: `processed_logprobs` are of the distribution sampled from (of a greedy token: at temperature 1),
prompt log-probabilities are at temperature 1 and never use the prefix cache, and a `cache_salt` is part of
the prefix cache's key.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Any, Literal

from strop.engine.contract import GenerationRequest
from strop.engine.vllm.weights import RAISED
from strop.errors import EngineError, EngineLost, describe_error
from strop.rollout import IntArray, VersionSegment

_MAX_SEED = 2**63
"""vLLM keeps a seed as a signed 64-bit integer."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Adapter:
    """A LoRA adapter that vLLM has loaded."""

    adapter_id: int
    """Never used twice, so that cached keys and values of two adapters never mix."""
    path: str
    version: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """The next tokens of a reply."""

    token_ids: list[int]
    logprobs: list[float]
    finish: str | None = None
    """vLLM's finish reason at the end of a reply: stop, length or abort."""
    segments: tuple[VersionSegment, ...] = ()
    """Of the whole reply; only with the last piece."""


class VllmCore:
    """AsyncLLM. Build it in the event loop that it is used in."""

    def __init__(self, settings: dict[str, Any]) -> None:
        """`settings` are those of vLLM's AsyncEngineArgs."""
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        self._llm = AsyncLLM.from_engine_args(AsyncEngineArgs(**settings))
        self._num_requests = 0

    async def follow_parents(self) -> None:
        """Have each of vLLM's workers die with the process that started it."""
        await self._llm.collective_rpc("strop_follow_parent")

    async def sample(
        self, request: GenerationRequest, *, salt: str, adapter: Adapter | None, is_whole: bool
    ) -> AsyncGenerator[Piece, None]:
        """Sample one reply, with `is_whole` in one piece. Closing the iterator ends the request."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        params = SamplingParams(
            temperature=request.sampling.temperature,
            top_p=request.sampling.top_p,
            top_k=request.sampling.top_k or 0,
            seed=request.seed % _MAX_SEED,
            max_tokens=request.max_tokens,
            stop_token_ids=sorted(request.stop_token_ids),
            ignore_eos=True,
            detokenize=False,
            logprobs=0,
            output_kind=RequestOutputKind.FINAL_ONLY if is_whole else RequestOutputKind.DELTA,
        )
        async for output in self._outputs(request.prompt_ids, params, salt=salt, adapter=adapter):
            reply = output.outputs[0]
            spans = reply.weight_versions or []
            yield Piece(
                token_ids=list(reply.token_ids),
                logprobs=[
                    row[token_id].logprob
                    for row, token_id in zip(reply.logprobs or (), reply.token_ids, strict=True)
                ],
                finish=reply.finish_reason,
                segments=tuple(VersionSegment(start=span.start, version=int(span.version)) for span in spans),
            )

    async def score(
        self, prompt_ids: IntArray, reply_ids: IntArray, *, adapter: Adapter | None
    ) -> list[float]:
        """Return the log-probability of each reply token at temperature 1."""
        from vllm import SamplingParams

        token_ids = [*prompt_ids.tolist(), *reply_ids.tolist()]
        params = SamplingParams(max_tokens=1, prompt_logprobs=0, detokenize=False, temperature=0.0)
        last: Any = None
        async for output in self._outputs(token_ids, params, salt="score", adapter=adapter):
            last = output
        rows = last.prompt_logprobs[len(prompt_ids) :]
        return [row[token_id].logprob for row, token_id in zip(rows, reply_ids.tolist(), strict=True)]

    async def pause(self, mode: Literal["abort", "keep"]) -> None:
        """Stop scheduling. Running requests end with the finish reason abort, or are kept."""
        await self._llm.pause_generation(mode=mode, clear_cache=True)

    async def resume(self) -> None:
        """Go on."""
        await self._llm.resume_generation()

    async def load_weights(self, path: str, digest: str) -> list[dict[str, Any]]:
        """Have every worker load a file; returns their answers. See `weights.WeightWorker`."""
        answers: list[dict[str, Any]] = await self._llm.collective_rpc("strop_load", args=(path, digest))
        return answers

    async def drop_cached(self) -> None:
        """Drop all cached keys and values, also those of kept requests."""
        await self._llm.reset_prefix_cache(reset_running_requests=True)

    async def name_version(self, version: int) -> None:
        """Set the version label of tokens that are sampled from now on."""
        await self._llm.update_weight_version(str(version))

    async def load_adapter(self, adapter: Adapter) -> None:
        """Load a LoRA adapter. Raises: EngineError if vLLM refuses it."""
        from vllm.v1.engine.exceptions import EngineGenerateError

        try:
            await self._llm.add_lora(_lora_request(adapter))
        except (EngineGenerateError, *RAISED) as error:
            raise _failed("load the adapter", error) from error

    async def drop_adapter(self, adapter: Adapter) -> None:
        """Unload a LoRA adapter."""
        await self._llm.remove_lora(adapter.adapter_id)

    def close(self) -> None:
        """End vLLM's processes."""
        self._llm.shutdown()

    async def _outputs(
        self, prompt_ids: Any, params: Any, *, salt: str, adapter: Adapter | None
    ) -> AsyncGenerator[Any, None]:
        """Yield vLLM's outputs of one request.

        Raises: EngineError for all errors of vLLM.
        """
        from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

        self._num_requests += 1
        prompt = {"prompt_token_ids": list(map(int, prompt_ids)), "cache_salt": salt}
        lora = None if adapter is None else _lora_request(adapter)
        outputs = self._llm.generate(prompt, params, f"r{self._num_requests}", lora_request=lora)
        try:
            async for output in outputs:
                yield output
        except EngineDeadError as error:
            raise EngineLost(
                f"vLLM's own process died ({error})",
                allowed="an engine that lives as long as the run",
                next_step="read the engine's log for the first error in it; the run resumes",
            ) from error
        except (EngineGenerateError, *RAISED) as error:
            raise _failed("answer a request", error) from error
        finally:
            await outputs.aclose()


def _lora_request(adapter: Adapter) -> Any:
    from vllm.lora.request import LoRARequest

    return LoRARequest(f"adapter-{adapter.adapter_id}", adapter.adapter_id, adapter.path)


def _failed(action: str, error: Exception) -> EngineError:
    return EngineError(
        f"vLLM could not {action} ({describe_error(error)})",
        allowed="requests and adapters that vLLM takes",
        next_step="read the engine's log; the rollout is masked",
    )
