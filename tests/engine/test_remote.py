"""The engine in another process is the engine in this one, bit for bit, and its failures are told."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Coroutine, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from strop.engine import Completion, Engine, WeightTransport, WeightUpdate
from strop.engine.native import NativeEngine
from strop.engine.remote import RemoteEngine, WaitLimits
from strop.engine.wire import AnswerPart, ErrorForm, GenerateAnswer, HealthForm, ReceiptForm
from strop.errors import ConfigError, EngineError, WeightMismatch
from strop.policy.language_model import DTYPES, LanguageModel
from strop.policy.publication import tensors_digest
from strop.policy.weights import own_tensors, publish_tensors, weights_digest
from strop.rollout import FinishReason
from strop.tokenizer import Tokenizer
from tests.engine.contract_suite import EngineContract
from tests.engine.requests import ask, assert_same_bits, generate_all, mixed_requests
from tests.fixtures.engine_server import KEY, RunningServer, canned_server, engine_server
from tests.fixtures.tiny_model import tiny_model

MAX_ROWS = 16
QUICK = WaitLimits(silence_limit_s=0.3, poll_s=0.01)
HEALTHY = HealthForm(pid=1, version=0, digest="d", model_digest="d")
_versions = itertools.count(1)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def server(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """One server for all tests that leave it running; each gives its updates fresh versions."""
    work_dir = tmp_path_factory.mktemp("server")
    with engine_server(model_dir, work_dir, dtype="float32", max_num_seqs=MAX_ROWS) as running:
        yield running


@pytest.fixture
def tokenizer(model_dir: Path) -> Tokenizer:
    return Tokenizer.load(model_dir)


def load(model_dir: Path, dtype: str = "float32") -> LanguageModel:
    return LanguageModel.load(model_dir, dtype=DTYPES[dtype])


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


class Closing:
    """Runs coroutines on a remote engine in one event loop and closes it there."""

    def __init__(self, engine: RemoteEngine) -> None:
        self.engine = engine

    def run(self, waiting: Coroutine[Any, Any, Any]) -> Any:
        async def act() -> Any:
            try:
                return await waiting
            finally:
                await self.engine.close()

        return asyncio.run(act())


def ask_canned(
    answers: Mapping[str, Any], use: Callable[[RemoteEngine], Coroutine[Any, Any, Any]], **options: Any
) -> Any:
    """Use an engine whose server says one thing on each path."""

    async def act() -> Any:
        async with canned_server(answers) as url:
            engine = RemoteEngine(url, KEY, **options)
            try:
                return await use(engine)
            finally:
                await engine.close()

    return asyncio.run(act())


@pytest.mark.parametrize("is_streamed", [False, True], ids=["batches", "streams"])
class TestRemoteEngine(EngineContract):
    @pytest.fixture
    def engine(self, server: RunningServer, is_streamed: bool) -> Engine:
        return server.connect(is_streamed=is_streamed)

    @pytest.fixture
    def shared_update(self, model_dir: Path, tmp_path: Path) -> WeightUpdate:
        return publish(load(model_dir), tmp_path / "w.safetensors")

    @pytest.fixture
    def broken_update(self, model_dir: Path, tmp_path: Path) -> WeightUpdate:
        update = publish(load(model_dir), tmp_path / "w.safetensors")
        return replace(update, digest="0" * 64)


@pytest.mark.parametrize("is_streamed", [False, True])
def test_replies_and_scores_equal_those_of_the_engine_in_this_process(
    is_streamed: bool, server: RunningServer, model_dir: Path, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    """Two rounds: after an update by file, and after another one."""
    loaded, model, engine = load(model_dir), load(model_dir), server.connect(is_streamed=is_streamed)
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
        assert engine.version == update.version
        assert await engine.health() == HealthForm(
            pid=server.child.pid,
            version=update.version,
            digest=update.digest,
            model_digest=weights_digest(loaded),
            tokenizer_digest=tokenizer.digest,
        )

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
def test_smp_6_damaged_weights_are_refused_over_the_wire(
    kind: str, message: str, server: RunningServer, model_dir: Path, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    """Incident: engines served weights that nobody had published. Old ones stay served here."""
    other = load(model_dir)
    nudge(other)
    publish_tensors(own_tensors(other), tmp_path / "w.safetensors")
    update = tampered(kind, tmp_path / "w.safetensors")
    engine, request = server.connect(), ask(tokenizer, sampling=None)

    async def act() -> tuple[Completion, HealthForm, Completion, HealthForm]:
        before, health = await engine.generate(request), await engine.health()
        with pytest.raises(WeightMismatch, match=message):
            await engine.update(update)
        return before, health, await engine.generate(request), await engine.health()

    before, health, after, later_health = Closing(engine).run(act())
    assert_same_bits([before], [after])
    assert before.policy_version == after.policy_version
    assert health == later_health
    assert engine.version is None


@pytest.mark.parametrize("is_streamed", [False, True])
def test_one_bad_request_leaves_the_others_of_its_batch_alone(
    is_streamed: bool, server: RunningServer, tokenizer: Tokenizer
) -> None:
    engine = server.connect(is_streamed=is_streamed)
    requests = [ask(tokenizer), ask(tokenizer, max_tokens=10_000), ask(tokenizer, seed=12)]

    async def act() -> list[Completion | BaseException]:
        return await asyncio.gather(*map(engine.generate, requests), return_exceptions=True)

    good, bad, fine = Closing(engine).run(act())
    assert isinstance(bad, EngineError)
    assert "asks for 10000. Allowed: at least one of each, and together at most 512" in str(bad)
    assert len(good.token_ids) == len(fine.token_ids) == 12


# ---------------------------------------------------------------- replies as they end


@pytest.mark.parametrize("is_streamed", [True, False])
def test_who_asks_again_waits_for_the_longest_only_where_batches_travel(
    is_streamed: bool, server: RunningServer, tokenizer: Tokenizer
) -> None:
    """The second turn of a short reply, as tools have it, is over before a long first one."""
    engine = server.connect(is_streamed=is_streamed)
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


# ---------------------------------------------------------------- death, silence, lies


@pytest.mark.slow
@pytest.mark.parametrize("path", ["/v1/generate", "/v1/replies"])
def test_prc_5_a_killed_server_is_told_with_its_cause(
    path: str, model_dir: Path, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    """Incident: an engine ended and its partner idled for hours."""
    with engine_server(model_dir, tmp_path, dtype="float32", max_num_seqs=4) as running:
        engine = running.connect(WaitLimits(poll_s=0.01), is_streamed=path == "/v1/replies")
        requests = [ask(tokenizer, seed=seed, max_tokens=500) for seed in range(64)]

        async def act() -> list[Completion | BaseException]:
            first = asyncio.create_task(engine.generate(ask(tokenizer, max_tokens=1)))
            waiting = asyncio.gather(*map(engine.generate, requests), return_exceptions=True)
            # The answer has begun where it comes line by line.
            await (first if path == "/v1/replies" else asyncio.sleep(0.3))
            os.kill(running.child.pid, signal.SIGKILL)
            await asyncio.gather(first, return_exceptions=True)
            return await waiting

        started = time.monotonic()
        found = Closing(engine).run(act())
        assert time.monotonic() - started < 60
        failures = [answer for answer in found if not isinstance(answer, Completion)]
        # Four are under way at once, for seconds. Line by line, some may be home before the kill.
        assert len(failures) >= (32 if path == "/v1/replies" else 64)
        for failure in failures:
            assert isinstance(failure, EngineError)
            assert f"did not answer {path}: ended with -9" in str(failure)
            assert "listening on http://127.0.0.1:" in str(failure)


@pytest.mark.parametrize("stage", ["/v1/generate", "/v1/replies", "/v1/weights", "/v1/score", "/health"])
def test_prc_1_a_stopped_server_meets_the_deadline(
    stage: str, server: RunningServer, model_dir: Path, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    """Incident: weight transfer and generation waited for ever on an engine that hung."""
    update = publish(load(model_dir), tmp_path / "w.safetensors")
    engine, request = server.connect(QUICK, is_streamed=stage == "/v1/replies"), ask(tokenizer)
    waits: dict[str, Coroutine[Any, Any, Any]] = {
        "/v1/generate": engine.generate(request),
        "/v1/replies": engine.generate(request),
        "/v1/weights": engine.update(update),
        "/v1/score": engine.score(request.prompt_ids, request.prompt_ids, 1.0),
        "/health": engine.health(),
    }
    for other in waits.keys() - {stage}:
        waits[other].close()
    os.kill(server.child.pid, signal.SIGSTOP)
    started = time.monotonic()
    try:
        with pytest.raises(EngineError, match=rf"did not answer {stage}: no sign of life for 0\.3 s"):
            Closing(engine).run(waits[stage])
    finally:
        os.kill(server.child.pid, signal.SIGCONT)
    assert time.monotonic() - started < 60


def test_prc_1_an_answer_that_takes_too_long_ends_the_wait(
    server: RunningServer, tokenizer: Tokenizer
) -> None:
    engine = server.connect(WaitLimits(reply_limit_s=0.05))
    requests = [ask(tokenizer, seed=seed, max_tokens=500) for seed in range(64)]
    with pytest.raises(EngineError, match=r"no answer within 0\.05 s"):
        Closing(engine).run(generate_all(engine, requests))


def test_a_wrong_key_is_refused_by_the_real_server(server: RunningServer, tokenizer: Tokenizer) -> None:
    engine = RemoteEngine(server.url, server.key + "x")
    with pytest.raises(EngineError, match="POST /v1/generate came without the key of this server"):
        Closing(engine).run(engine.generate(ask(tokenizer)))


def test_sec_4_the_key_is_in_no_argument_and_no_log(server: RunningServer) -> None:
    """Incident: tokens in process lists and logs."""
    words = Path(f"/proc/{server.child.pid}/cmdline").read_bytes().decode().split("\0")
    environment = Path(f"/proc/{server.child.pid}/environ").read_bytes().decode()
    assert "--key-file" in words
    assert server.key not in " ".join(words) + environment + server.child.tail(1000)


def test_nobody_listening_is_told() -> None:
    engine = RemoteEngine("http://127.0.0.1:9", KEY, find_death=lambda: "it was never started")
    with pytest.raises(EngineError, match="did not answer /health: it was never started"):
        Closing(engine).run(engine.health())


def test_proxies_of_the_environment_take_no_part(monkeypatch: pytest.MonkeyPatch) -> None:
    """They would be given the key and every reply, and engines are on machines of the run's own."""
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.delenv(name, raising=False)

    assert ask_canned({"/health": HEALTHY}, lambda engine: engine.health()) == HEALTHY


def test_closing_answers_those_who_wait(server: RunningServer, tokenizer: Tokenizer) -> None:
    request = ask(tokenizer, max_tokens=500)

    async def act(engine: RemoteEngine, pause_s: float) -> Completion | BaseException:
        waiting = asyncio.gather(engine.generate(request), return_exceptions=True)
        await asyncio.sleep(pause_s)
        await engine.close()
        return (await waiting)[0]

    # Before the batch is sent, and while it is under way: it does not end meanwhile.
    os.kill(server.child.pid, signal.SIGSTOP)
    try:
        for pause_s in (0.0, 0.2):
            failure = asyncio.run(act(server.connect(), pause_s))
            assert isinstance(failure, EngineError)
            assert "closed" in str(failure)
    finally:
        os.kill(server.child.pid, signal.SIGCONT)


@pytest.mark.parametrize("kind", ["generate", "score"])
def test_closing_at_any_moment_leaves_nobody_waiting(tokenizer: Tokenizer, kind: str) -> None:
    """Also where what would send the request was made and has not begun."""
    request = ask(tokenizer, max_tokens=5)

    async def act(num_steps: int) -> None:
        engine = RemoteEngine("http://127.0.0.1:9", KEY)
        waiting = asyncio.ensure_future(
            engine.generate(request)
            if kind == "generate"
            else engine.score(request.prompt_ids, request.prompt_ids, 1.0)
        )
        for _ in range(num_steps):
            await asyncio.sleep(0)
        await engine.close()
        with pytest.raises(EngineError):
            await asyncio.wait_for(waiting, 60.0)

    for num_steps in range(1, 40):
        asyncio.run(act(num_steps))


@pytest.mark.parametrize(("version", "digest"), [(2, "promised"), (1, "of the old weights")])
def test_smp_6_a_receipt_for_other_weights_is_refused(version: int, digest: str) -> None:
    """Incident: an engine acknowledged an update that it had ignored."""
    update = WeightUpdate(version=1, digest="promised", transport=WeightTransport.FILE, path="w")

    async def act(engine: RemoteEngine) -> None:
        with pytest.raises(WeightMismatch, match=f"acknowledged version {version} with digest {digest}"):
            await engine.update(update)
        assert engine.version is None

    ask_canned({"/v1/weights": ReceiptForm(version=version, digest=digest)}, act)


def test_an_update_without_a_file_is_refused() -> None:
    engine = RemoteEngine("http://127.0.0.1:9", KEY)
    update = WeightUpdate(version=1, digest="d", transport=WeightTransport.SHARED)
    with pytest.raises(WeightMismatch, match="weight update 1 is by shared, and the engine is elsewhere"):
        Closing(engine).run(engine.update(update))


# 5 as int32; 0xbf800000 is -1.0 in float32.
GOOD = GenerateAnswer(
    num_tokens=[1],
    token_ids="BQAAAA==",
    logprobs="AACAvw==",
    texts=["x"],
    finish_reasons=[FinishReason.LENGTH],
    policy_versions=[3],
)
UNSTAMPED = GOOD.model_dump_json().replace('"policy_versions":[3],', "")


def test_an_error_that_came_from_another_one_crosses_with_its_traceback() -> None:
    """Incident: of an engine in another process, nobody learnt where in it every reply failed."""
    error = EngineError("generation failed")
    try:
        raise RuntimeError("no such operator")
    except RuntimeError as first:
        error.__cause__ = first
    form = ErrorForm.model_validate_json(ErrorForm.of(error).model_dump_json())
    trace = "".join(traceback.format_exception(form.read()))
    assert 'raise RuntimeError("no such operator")' in trace
    assert trace.endswith("EngineError: generation failed\n")
    # A refusal says it all by itself.
    assert ErrorForm.of(EngineError("closed")).trace == ""
    assert ErrorForm(kind="EngineError", message="closed").read().__cause__ is None


REFUSED = (401, ErrorForm(kind="EngineError", message="no key").model_dump_json())


@pytest.mark.parametrize(
    ("is_streamed", "answer", "message"),
    [
        # SMP-4: the loop never guesses which version spoke. What lines may lack is tried below.
        (False, (200, UNSTAMPED), "cannot be used"),
        (False, GOOD.model_copy(update={"num_tokens": []}), "0 replies to 1 requests"),
        (False, (500, "Internal Server Error"), "status 500: Internal Server Error"),
        (True, (500, "Internal Server Error"), "status 500: Internal Server Error"),
        (False, REFUSED, "no key"),
        (True, REFUSED, "no key"),
    ],
)
def test_an_unusable_answer_is_an_engine_error(
    is_streamed: bool, answer: Any, message: str, tokenizer: Tokenizer
) -> None:
    answers = {"/v1/generate": answer, "/v1/replies": answer, "/health": HEALTHY}
    with pytest.raises(EngineError, match=message):
        ask_canned(answers, lambda engine: engine.generate(ask(tokenizer)), is_streamed=is_streamed)


def line(*places: int) -> str:
    return AnswerPart(places=list(places), answer=GOOD).model_dump_json(exclude_defaults=True) + "\n"


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ("", "2 of 2 requests are not answered"),
        (line(0), "1 of 2 requests are not answered"),
        (line(0) + line(0), "request 0 of 2 is answered twice, or is none"),
        (line(2), "request 2 of 2 is answered twice, or is none"),
        (line(0, 1), "1 replies to 2 requests"),
        ("not json\n", "not json"),
        # SMP-4, as above.
        (
            line(0) + line(1).replace('"policy_versions":[3],', "").replace(',"policy_versions":[3]', ""),
            "used",
        ),
    ],
)
def test_whoever_a_line_does_not_answer_well_gets_an_engine_error(
    lines: str, message: str, tokenizer: Tokenizer
) -> None:
    async def act(engine: RemoteEngine) -> list[Completion | BaseException]:
        requests = [ask(tokenizer), ask(tokenizer)]
        return await asyncio.gather(*map(engine.generate, requests), return_exceptions=True)

    first, second = ask_canned({"/v1/replies": (200, lines), "/health": HEALTHY}, act, is_streamed=True)
    assert isinstance(first, Completion) == lines.startswith(line(0))
    assert isinstance(second, EngineError)
    assert message in str(second)


@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize("text", ["x", "a\nb\r\u2028c\x85\u2029\x0b\x0c\x1cd"], ids=["plain", "line breaks"])
def test_a_good_canned_answer_is_a_completion(is_streamed: bool, text: str, tokenizer: Tokenizer) -> None:
    """The twin of the unusable ones, so that they are refused for what they say."""
    answer = GOOD.model_copy(update={"texts": [text]})
    said = AnswerPart(places=[0], answer=answer).model_dump_json() + "\n"

    answers = {"/v1/generate": answer, "/v1/replies": (200, said)}
    completion = ask_canned(answers, lambda engine: engine.generate(ask(tokenizer)), is_streamed=is_streamed)
    assert (completion.token_ids.tolist(), completion.logprobs.tolist()) == ([5], [-1.0])
    assert (completion.policy_version, completion.text) == (3, text)


def test_a_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    # None in sys.modules is how Python itself marks a module that cannot be imported.
    monkeypatch.setitem(sys.modules, "httpx", None)
    with pytest.raises(ConfigError, match=r"module 'httpx', which is missing.*pip install strop\[server\]"):
        RemoteEngine("http://127.0.0.1:9", KEY)
