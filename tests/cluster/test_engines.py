"""The engine in an actor is the engine in this process, bit for bit, and its failures are told."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import traceback
from collections.abc import AsyncIterator, Awaitable, Iterator
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from strop.cluster.contract import read_files
from strop.cluster.ray.engines import ActorEngine, EngineActor
from strop.engine import Completion, Engine, GenerationRequest, WeightTransport, WeightUpdate
from strop.engine.contract import WeightReceipt
from strop.engine.native import NativeEngine
from strop.errors import EngineError, EngineLost, WeightMismatch
from strop.policy.language_model import DTYPES, LanguageModel
from strop.policy.publication import tensors_digest
from strop.policy.weights import own_tensors, publish_tensors
from strop.rollout import FinishReason
from strop.tokenizer import Tokenizer
from tests.engine.contract_suite import EngineContract
from tests.engine.requests import ask, assert_same_bits, generate_all, mixed_requests
from tests.fixtures.dummy_engine import DummyEngine
from tests.fixtures.engine_actor import Closing, RunningEngine, engine_actor
from tests.fixtures.ray_traces import is_alive, needs_ray
from tests.fixtures.tiny_model import tiny_model
from tests.fixtures.tiny_run import tiny_spec

pytestmark = needs_ray
MAX_ROWS = 16
_versions = itertools.count(1)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def running(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningEngine]:
    """One actor for all tests that leave it running; each gives its updates fresh versions."""
    spec = tiny_spec(engine={"max_num_seqs": MAX_ROWS}, placement={"kind": "ray"})
    with engine_actor(spec, model_dir, tmp_path_factory.mktemp("roles")) as started:
        yield started


@pytest.fixture
def tokenizer(model_dir: Path) -> Tokenizer:
    return Tokenizer.load(model_dir)


def load(model_dir: Path) -> LanguageModel:
    return LanguageModel.load(model_dir, dtype=DTYPES["float32"])


def by_file(path: Path, digest: str) -> WeightUpdate:
    return WeightUpdate(
        version=next(_versions), digest=digest, transport=WeightTransport.FILE, path=str(path)
    )


def publish(model: LanguageModel, path: Path) -> WeightUpdate:
    return by_file(path, publish_tensors(own_tensors(model), path))


def nudge(model: LanguageModel) -> None:
    """Change every weight, so that old and new weights give other replies."""
    for _, parameter in model.named_parameters():
        parameter.data.mul_(1.3)


@pytest.mark.slow
@pytest.mark.parametrize("is_streamed", [False, True], ids=["batches", "streams"])
class TestActorEngine(EngineContract):
    @pytest.fixture
    def engine(self, running: RunningEngine, is_streamed: bool) -> Engine:
        return running.connect(is_streamed=is_streamed)

    @pytest.fixture
    def shared_update(self, model_dir: Path, tmp_path: Path) -> WeightUpdate:
        return publish(load(model_dir), tmp_path / "w.safetensors")

    @pytest.fixture
    def broken_update(self, model_dir: Path, tmp_path: Path) -> WeightUpdate:
        update = publish(load(model_dir), tmp_path / "w.safetensors")
        return replace(update, digest="0" * 64)


@pytest.mark.slow
@pytest.mark.parametrize("is_streamed", [False, True])
def test_replies_and_scores_equal_those_of_the_engine_in_this_process(
    is_streamed: bool, running: RunningEngine, model_dir: Path, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    """Two rounds: after an update by file, and after one whose file is sent, as to another machine."""
    model = load(model_dir)
    engine = running.connect(is_streamed=is_streamed, sees_files=not is_streamed)
    here = NativeEngine(model, tokenizer, max_num_seqs=MAX_ROWS)
    requests = mixed_requests(tokenizer)
    prompt, reply = tokenizer.encode("1 + 2 ="), tokenizer.encode(" 3, as we all know")

    async def play(engine: Engine, update: WeightUpdate) -> tuple[list[Completion], bytes]:
        await engine.update(update)
        score = await engine.score(prompt, reply, 0.7)
        return await generate_all(engine, requests), score.logprobs.tobytes()

    async def act() -> None:
        first: list[Completion] = []
        for name in ("one", "two"):
            nudge(model)
            update = publish(model, tmp_path / name)
            there = await play(engine, update)
            shared = replace(update, transport=WeightTransport.SHARED, path=None)
            expected = await play(here, shared)
            assert_same_bits(there[0], expected[0])
            assert there[1] == expected[1]
            # The update changed something, so equality after it is not equality of untouched weights.
            assert [c.token_ids.tolist() for c in there[0]] != [c.token_ids.tolist() for c in first]
            first = there[0]
        assert {FinishReason.LENGTH, FinishReason.STOP_STRING} <= {one.finish_reason for one in first}

    Closing(engine).run(act())


def tampered(kind: str, good: Path) -> WeightUpdate:
    """Damage a publication the way it happened to others."""
    tensors = load_file(good)
    promised = tensors_digest(tensors.items())
    name = sorted(tensors)[0]
    if kind == "truncated":
        good.write_bytes(good.read_bytes()[:-100])
        return by_file(good, promised)
    if kind == "absent":
        good.unlink()
        return by_file(good, promised)
    if kind == "other bytes":
        tensors[name] = tensors[name] + 1
        save_file(tensors, good)
        return by_file(good, promised)
    # The rest is wrong although the digest is that of the file.
    if kind == "dropped":
        del tensors[name]
    elif kind == "cast":
        tensors = {key: tensor.half() for key, tensor in tensors.items()}
    elif kind == "reshaped":
        tensors[name] = tensors[name].flatten()
    elif kind == "extra":
        tensors["adapter"] = tensors[name].clone()
    save_file(tensors, good)
    return by_file(good, tensors_digest(tensors.items()))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("truncated", "cannot be read"),
        ("absent", "cannot be read"),
        ("other bytes", "have digest"),
        ("dropped", "is missing"),
        ("cast", "float16"),
        ("reshaped", "do not fit the model"),
        ("extra", "adapter is unknown to the model"),
    ],
)
def test_smp_6_damaged_weights_are_refused_by_an_actor(
    kind: str, message: str, running: RunningEngine, model_dir: Path, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    """Incident: engines served weights that nobody had published. Old ones stay served here."""
    other = load(model_dir)
    nudge(other)
    publish_tensors(own_tensors(other), tmp_path / "w.safetensors")
    update = tampered(kind, tmp_path / "w.safetensors")
    engine, request = running.connect(), ask(tokenizer)

    async def act() -> tuple[Completion, Completion]:
        before = await engine.generate(request)
        with pytest.raises(WeightMismatch, match=message):
            await engine.update(update)
        return before, await engine.generate(request)

    before, after = Closing(engine).run(act())
    assert_same_bits([before], [after])
    assert before.policy_version == after.policy_version


@pytest.mark.slow
@pytest.mark.parametrize("is_streamed", [False, True])
def test_one_bad_request_leaves_the_others_of_its_batch_alone(
    is_streamed: bool, running: RunningEngine, tokenizer: Tokenizer
) -> None:
    engine = running.connect(is_streamed=is_streamed)
    requests = [ask(tokenizer), ask(tokenizer, max_tokens=10_000), ask(tokenizer, seed=12)]

    async def act() -> list[Completion | BaseException]:
        return await asyncio.gather(*map(engine.generate, requests), return_exceptions=True)

    good, bad, fine = Closing(engine).run(act())
    assert isinstance(bad, EngineError)
    assert "asks for 10000" in str(bad)
    assert len(good.token_ids) == len(fine.token_ids) == 12


@pytest.mark.slow
@pytest.mark.parametrize("is_streamed", [True, False])
def test_who_asks_again_waits_for_the_longest_only_where_batches_travel(
    is_streamed: bool, running: RunningEngine, tokenizer: Tokenizer
) -> None:
    """The second turn of a short reply, as tools have it, is over before a long first one."""
    engine = running.connect(is_streamed=is_streamed)
    ended: list[str] = []
    expected = ["short 2", "short 3", "long 500"] if is_streamed else ["long 500", "short 2", "short 3"]

    async def attempt(name: str, *lengths: int) -> None:
        for length in lengths:
            await engine.generate(ask(tokenizer, seed=length, max_tokens=length))
            ended.append(f"{name} {length}")

    async def act() -> None:
        # On a busy machine this process may sleep while the other one says everything. A batch never differs.
        for _ in range(8 if is_streamed else 1):
            ended.clear()
            await asyncio.gather(attempt("long", 500), attempt("short", 2, 3))
            if ended == expected:
                break

    Closing(engine).run(act())
    assert ended == expected


@pytest.mark.slow
@pytest.mark.parametrize("is_streamed", [False, True])
def test_prc_5_a_killed_engine_is_told_with_its_cause(
    is_streamed: bool, running: RunningEngine, tokenizer: Tokenizer
) -> None:
    """Incident: an engine ended and its partner idled for hours. Last on the actor: it is killed."""
    engine = running.connect(is_streamed=is_streamed)
    requests = [ask(tokenizer, seed=seed, max_tokens=500) for seed in range(64)]

    async def act() -> list[Completion | BaseException]:
        waiting = asyncio.gather(*map(engine.generate, requests), return_exceptions=True)
        await asyncio.sleep(0.3)
        if is_alive(running.pid):
            os.kill(running.pid, signal.SIGKILL)
        return await asyncio.wait_for(waiting, 60.0)

    found = Closing(engine).run(act())
    failures = [answer for answer in found if not isinstance(answer, Completion)]
    # Streamed, some may be home before the kill.
    assert len(failures) >= (32 if is_streamed else 64)
    assert all(isinstance(failure, EngineLost) for failure in failures)

    async def look() -> None:
        with pytest.raises(EngineLost, match=f"role engine-0 on node 0 .*, process {running.pid}, ended"):
            await asyncio.wait_for(running.placement._watch.guard(asyncio.sleep(600)), 60.0)

    running.loop.run_until_complete(look())


# ---------------------------------------------------------------- without Ray: lies, bugs, and who waits


class Fake:
    """An actor in this process, around an engine."""

    def __init__(self, engine: Engine) -> None:
        self.host = EngineActor.__new__(EngineActor)
        self.host._engine = engine
        self.ask = self

    async def remote(self, batch: bytes, is_streamed: bool) -> AsyncIterator[Awaitable[bytes]]:
        async for part in self.host.ask(batch, is_streamed):
            yield asyncio.sleep(0, part)


async def test_a_batch_is_answered_in_its_order(tokenizer: Tokenizer) -> None:
    engine = DummyEngine(tokenizer, ["a long one", "b", "c"])
    client = ActorEngine(Fake(engine))
    found = await asyncio.gather(*(client.generate(ask(tokenizer, seed=seed)) for seed in range(3)))
    assert [one.text for one in found] == ["a long one", "b", "c"]
    assert [request.seed for request in engine.requests] == [0, 1, 2]


async def test_a_bug_is_answered_with_its_place_and_its_traceback(tokenizer: Tokenizer) -> None:
    """Incident: of an engine in another process, nobody learnt where in it every reply failed."""

    class Broken(DummyEngine):
        async def generate(self, request: GenerationRequest) -> Completion:
            try:
                raise KeyError("no such operator")
            except KeyError as error:
                raise EngineError("the reply failed") from error

    client = ActorEngine(Fake(Broken(tokenizer, [])))
    with pytest.raises(EngineError) as caught:
        await client.generate(ask(tokenizer))
    assert 'raise KeyError("no such operator")' in "".join(traceback.format_exception(caught.value))


class Silent:
    """An actor that never answers."""

    def __init__(self) -> None:
        self.ask = self

    async def remote(self, batch: bytes, is_streamed: bool) -> AsyncIterator[Awaitable[bytes]]:
        yield asyncio.sleep(3600, b"")


@pytest.mark.parametrize("kind", ["generate", "score"])
def test_closing_at_any_moment_leaves_nobody_waiting(tokenizer: Tokenizer, kind: str) -> None:
    """Also where what would send the request was made and has not begun."""
    request = ask(tokenizer, max_tokens=5)

    async def act(num_steps: int) -> None:
        engine = ActorEngine(Silent())
        waiting = asyncio.ensure_future(
            engine.generate(request)
            if kind == "generate"
            else engine.score(request.prompt_ids, request.prompt_ids, 1.0)
        )
        for _ in range(num_steps):
            await asyncio.sleep(0)
        await engine.close()
        with pytest.raises(EngineError):
            await asyncio.wait_for(waiting, 30.0)

    for num_steps in range(1, 40):
        asyncio.run(act(num_steps))


async def test_weights_that_are_sent_are_those_that_were_published(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    """Two files of a folder; what was sent before goes once the next update is served."""
    seen: list[dict[str, bytes]] = []

    class Reader(DummyEngine):
        async def update(self, update: WeightUpdate) -> WeightReceipt:
            seen.append({name: one.tobytes() for name, one in read_files(Path(update.path or "")).items()})
            return WeightReceipt(version=update.version, digest=update.digest)

    host = EngineActor.__new__(EngineActor)
    host._engine, host.undo, host._weights_dir = Reader(tokenizer, []), AsyncExitStack(), tmp_path / "there"
    for name in ("v1", "v2"):
        (tmp_path / name).mkdir()
        contents = {"a": name.encode() * 1000, "b": b"y"}
        for file, content in contents.items():
            (tmp_path / name / file).write_bytes(content)
        await host.update(by_file(tmp_path / name, ""), read_files(tmp_path / name))
        assert seen[-1] == {f"{name}/{file}": content for file, content in contents.items()}
        assert [path.name for path in (tmp_path / "there").iterdir()] == [name]
    await host.end()
    assert not (tmp_path / "there").exists()
