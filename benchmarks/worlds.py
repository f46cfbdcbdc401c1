"""What an attempt of several turns costs beside the model, and whether its ids drift.

`guess-number` against engines that answer after a while and compute nothing: processor time of a rollout of
one turn and of five, and rollouts a second with 10,000 in flight. The face: a call through it by OpenAI's
client, beside the same call of a server that says a fixed answer. Drift: 1,000 random dialogues with calls
and odd text for each of five tokenizers and templates; a turn that cannot be extended counts.
Goals: 5 ms of processor time, 2,000 rollouts/s, 3 ms a call, no drift.
"""

from __future__ import annotations

import asyncio
import gc
import random
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.figures import Figure, Measured
from strop.agents import Face
from strop.engine import Completion
from strop.environments import PromptCache, RolloutPlan, choose_environment, run_group
from strop.environments.guess_number import GuessNumberSpec
from strop.environments.recording import Recorder
from strop.rollout import FinishReason, Sampling, Split
from strop.tasks import build_task
from strop.testing.simulated_engine import SimulatedEngine, SimulatedSpeed
from strop.tokenizer import Tokenizer
from strop.train.watch.process import full_collections_by_hand
from tests.environments.test_drift import talk
from tests.environments.test_worlds import TEMPLATES, tokenizer_of

NUM_IN_FLIGHT = 10_000
GROUP_SIZE = 8
REPLY_S = 2.0
NUM_DIALOGUES = 1000
NUM_CALLS = 500


async def _flood(
    tokenizer: Tokenizer, max_turns: int, num_in_flight: int, num_rounds: int, reply_s: float
) -> dict[str, float]:
    """Keep rollouts in flight until each place has had some; return their number a second and their cost."""
    task = build_task(GuessNumberSpec(max_turns=max_turns))
    examples = task.examples(Split.TRAIN)
    make_environment = choose_environment(task)
    # One token a step: every reply takes as long, whatever the others do.
    speed = SimulatedSpeed(
        median_reply_tokens=2,
        reply_sigma=0.0,
        step_base_s=reply_s / 2,
        step_row_s=0.0,
        prefill_tokens_per_s=1e12,
        max_num_seqs=10**6,
        max_cache_tokens=10**9,
    )
    engine = SimulatedEngine(speed=speed, say=lambda request: str(request.seed % 20 + 1))
    lost = 0

    async def ask_on(place: int) -> None:
        nonlocal lost
        # Not all in step: engines of a run answer one after the other.
        await asyncio.sleep(reply_s * max_turns * place * GROUP_SIZE / num_in_flight)
        for step in range(num_rounds):
            example = examples[(place + step) % len(examples)]
            plans = [
                RolloutPlan(
                    example=example,
                    step=step,
                    sample_index=index,
                    run_seed=place,
                    sampling=Sampling(),
                    max_reply_tokens=16,
                )
                for index in range(GROUP_SIZE)
            ]
            group = await run_group(make_environment, engine, tokenizer, plans)
            lost += sum(not one.outcome.is_scored for one in group.rollouts)

    num_groups = num_in_flight // GROUP_SIZE
    begun_at, cpu_before = time.perf_counter(), time.process_time()
    await asyncio.gather(*map(ask_on, range(num_groups)))
    passed_s, cpu_s = time.perf_counter() - begun_at, time.process_time() - cpu_before
    number = num_groups * num_rounds * GROUP_SIZE
    return {"per_s": number / passed_s, "cpu_ms": 1000 * cpu_s / number, "lost": float(lost)}


async def _time_calls(tokenizer: Tokenizer, num_calls: int) -> dict[str, float]:
    """Return the median time of a call through the face, and of one of a server with a fixed answer."""
    import openai

    reply = np.asarray(tokenizer.encode("It is seven."), dtype=np.int32)
    ended = np.append(reply, tokenizer.eos_id).astype(np.int32)

    async def sample(prompt_ids: Any, num_tokens: int, stream: int, stop: tuple[str, ...]) -> Completion:
        return Completion(
            token_ids=ended,
            logprobs=np.full(len(ended), -0.5, dtype=np.float32),
            text="It is seven.",
            finish_reason=FinishReason.EOS,
            policy_version=0,
        )

    recorder = Recorder(PromptCache(tokenizer, "auto"), sample, max_reply_tokens=64, max_positions=None)
    create: Any = None

    async def call(index: int) -> Any:
        asked = [{"role": "user", "content": f"What is {index} and 3?"}]
        return await create(model="policy", messages=asked)

    async with (
        Face().serving() as face,
        face.open(recorder) as (url, key),
        openai.AsyncOpenAI(base_url=url, api_key=key, max_retries=0) as client,
    ):
        create = client.chat.completions.create
        answer = await call(-1)
        through = await _median_s(call, num_calls)
    async with (
        _serving_fixed(answer.model_dump_json().encode()) as url,
        openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client,
    ):
        create = client.chat.completions.create
        await call(-1)
        beside = await _median_s(call, num_calls)
    return {"through_ms": 1000 * through, "beside_ms": 1000 * beside}


async def _median_s(call: Callable[[int], Awaitable[Any]], num_calls: int) -> float:
    times = []
    for index in range(num_calls):
        begun_at = time.perf_counter()
        await call(index)
        times.append(time.perf_counter() - begun_at)
    return statistics.median(times)


@asynccontextmanager
async def _serving_fixed(body: bytes) -> AsyncIterator[str]:
    """Answer each request alike, without looking at it."""
    head = f"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(asyncio.IncompleteReadError):
            while asked := await reader.readuntil(b"\r\n\r\n"):
                lines = [line.partition(b":") for line in asked.lower().splitlines()]
                await reader.readexactly(
                    next(int(value) for name, _, value in lines if name == b"content-length")
                )
                writer.write(head.encode() + body)
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1"
        # Their clients have gone.
        await asyncio.sleep(0.05)


def _count_drift(model_dir: Path, num_dialogues: int) -> dict[str, int]:
    """Return how many turns of random dialogues could not be extended, by tokenizer."""
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        tokenizers = {form: (form, tokenizer_of(Path(folder), form)) for form in TEMPLATES}
        tokenizers["smollm2"] = ("fence", Tokenizer.load(model_dir))
        for name, (form, tokenizer) in tokenizers.items():
            draw = random.Random(f"worlds/{name}")
            found[name] = sum(talk(draw, form, tokenizer) for _ in range(num_dialogues))
    return found


def measure_worlds(*, is_quick: bool, model_dir: Path) -> Measured:
    """Measure everything in this process, one after the other."""
    tokenizer = Tokenizer.load(model_dir)
    num_in_flight = 80 if is_quick else NUM_IN_FLIGHT
    found: dict[str, Any] = {}
    with full_collections_by_hand():
        for max_turns, num_rounds in ((1, 4), (5, 1)):
            gc.collect()
            size = (num_in_flight, 1, 0.02) if is_quick else (num_in_flight, num_rounds, REPLY_S)
            flood = _flood(tokenizer, max_turns, *size)
            found[f"turns_{max_turns}"] = asyncio.run(flood)
        found["face"] = asyncio.run(_time_calls(tokenizer, 5 if is_quick else NUM_CALLS))
    found["drift"] = _count_drift(model_dir, 5 if is_quick else NUM_DIALOGUES)
    one, five, face = found["turns_1"], found["turns_5"], found["face"]

    def figure(name: str, unit: str, value: float, **goal: Any) -> Figure:
        return Figure(name=name, unit=unit, value=value, measured=(value,), **goal)

    return Measured(
        figures=[
            figure("one turn: processor time", "ms/rollout", one["cpu_ms"], at_most=5.0),
            figure("one turn, 10,000 in flight", "rollouts/s", one["per_s"], at_least=2000.0),
            figure("five turns: processor time", "ms/rollout", five["cpu_ms"]),
            figure("five turns, 10,000 in flight", "rollouts/s", five["per_s"]),
            figure("rollouts lost", "rollouts", one["lost"] + five["lost"], at_most=0.0),
            figure("a call through the face", "ms, median", face["through_ms"]),
            figure("what the face adds", "ms", face["through_ms"] - face["beside_ms"], at_most=3.0),
            figure("turns rendered again", "turns", float(sum(found["drift"].values())), at_most=0.0),
        ],
        details={"found": found},
    )
