"""The page's answers: what of a run it is told, and to whom it answers at all."""

from __future__ import annotations

import asyncio
import http.client
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib.resources import files
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from starlette.testclient import TestClient

from strop.errors import ConfigError, StoreError, StropError
from strop.record import Event, EventKind, RunDir
from strop.record.events import JsonLines
from strop.record.files import DirectoryRecord, RecordFiles, Shard, StoreRecord
from strop.store.opening import open_objects
from strop.tokenizer import Tokenizer
from strop.view.live import LiveRun, cut_text
from strop.view.places import find_runs
from strop.view.server import Address, build_app, follow
from tests.view.rich_runs import RichRuns, make_runs
from tests.view.served import served
from tests.view.synthetic_run import make_run


def no_job(name: str) -> tuple[str, RecordFiles]:
    raise ConfigError(f"there is no job {name}", allowed="a job", next_step="submit one")


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return make_run(tmp_path, num_steps=3, eval_steps=(0, 3))


def client(path: Path, **more: Any) -> TestClient:
    return TestClient(build_app(find_runs(str(path), no_job), **more), base_url="http://127.0.0.1:8421")


def test_a_run_is_told_as_it_was_recorded(run: RunDir) -> None:
    page = client(run.path.parent)
    (listed,) = page.get("/api/runs").json()
    assert (listed["key"], listed["num_steps"], listed["phase"]) == (run.path.name, 3, "running")
    answer = page.get("/api/run", params={"run": run.path.name}).json()
    assert [one["step"] for one in answer["evals"]] == [0, 3]
    assert answer["change"]["low"] < answer["change"]["estimate"] < answer["change"]["high"]
    assert answer["rollout_steps"] == [1, 3]
    assert answer["wanted_steps"] == 40


def test_metrics_are_columns(run: RunDir) -> None:
    run.metrics.append(4, {"reward_mean": 0.5})
    told = client(run.path).get("/api/metrics", params={"run": run.path.name}).json()
    assert told["columns"]["step"] == [1, 2, 3, 4]
    # What step 4 did not measure is absent, and not 0.
    assert [value is None for value in told["columns"]["entropy_nats"]] == [False, False, False, True]
    assert told["offset"] == run.metrics.path.stat().st_size


def test_answers_at_the_same_time_tell_each_step_once(run: RunDir) -> None:
    live = LiveRun(key="run", record=DirectoryRecord(run.path))

    def read_steps(_: int) -> list[float]:
        live.read_metrics()
        return [line["step"] for line in live.metrics]

    with ThreadPoolExecutor(8) as threads:
        for step in range(4, 40):
            run.metrics.append(step, {"reward_mean": 0.5})
            for steps in threads.map(read_steps, range(8)):
                assert steps == list(range(1, step + 1))


def test_a_step_that_was_written_anew_is_read_anew(run: RunDir) -> None:
    page, key = client(run.path), {"run": run.path.name, "step": "1"}
    assert page.get("/api/rollouts", params=key).json()["rows"][0]["reply"] == "7"
    shutil.copy(run.rollouts_path(3), run.path / "aside")
    (run.path / "aside").replace(run.rollouts_path(1))
    assert page.get("/api/rollouts", params=key).json()["rows"][0]["reply"] == "12"


def test_rollouts_are_listed_found_and_opened(run: RunDir) -> None:
    page, key = client(run.path), {"run": run.path.name}
    rows = page.get("/api/rollouts", params=key | {"step": "1"}).json()["rows"]
    assert [row["reply"] for row in rows] == ["7", "9", "The answer is 12."]
    found = page.get("/api/search", params=key | {"text": "ANSWER is"}).json()
    assert [(row["step"], row["index"]) for row in found["found"]] == [(1, 2)]
    assert found["next"] is None
    opened = page.get("/api/rollout", params=key | {"step": "1", "key": "2"}).json()
    sampled = [turn for turn in opened["turns"] if "token_ids" in turn]
    assert sampled[-1]["text"] == "The answer is 12."
    # No tokenizer is in this run's record.
    assert sampled[-1]["tokens"] is None
    assert len(sampled[-1]["logprobs"]) == len(sampled[-1]["token_ids"])


def test_what_no_step_took_is_listed_behind_the_step_s(run: RunDir) -> None:
    discarded = run.discarded_path(1)
    discarded.parent.mkdir(exist_ok=True)
    shutil.copy(run.rollouts_path(3), discarded)
    page, key = client(run.path), {"run": run.path.name, "step": "1"}
    rows = page.get("/api/rollouts", params=key).json()["rows"]
    assert [row["key"] for row in rows] == ["0", "1", "2", "d0", "d1", "d2"]
    opened = page.get("/api/rollout", params=key | {"key": "d2"}).json()
    assert opened["turns"][-1]["text"] == rows[5]["reply"] == "11"


def test_replies_of_an_evaluation_are_opened_like_a_step_s(run: RunDir) -> None:
    folder = run.path / "eval" / "arithmetic-step-000003"
    folder.mkdir()
    for place, step in enumerate((1, 3)):
        name = Shard(examples=range(32 * place, 32 * place + 32)).file_name
        shutil.copy(run.rollouts_path(step), folder / name)
    page, key = client(run.path), {"run": run.path.name, "step": "3", "of": "eval"}
    assert page.get("/api/steps", params=key).json() == {"steps": [3]}
    assert page.get("/api/run", params=key).json()["reply_steps"] == [3]
    rows = page.get("/api/rollouts", params=key).json()["rows"]
    assert [row["key"] for row in rows] == ["0.0", "0.1", "0.2", "1.0", "1.1", "1.2"]
    assert page.get("/api/rollout", params=key | {"key": "1.2"}).json()["turns"][-1]["text"] == "11"
    found = page.get("/api/search", params=key | {"text": "answer is"}).json()["found"]
    assert [row["key"] for row in found] == ["0.2"]
    assert page.get("/api/steps", params=key | {"of": "dreams"}).status_code == 404


def test_the_timeline_of_some_steps_is_read_alone(run: RunDir) -> None:
    page, key = client(run.path), {"run": run.path.name}
    assert page.get("/api/timeline", params=key).json() == []

    def spans(step: int) -> list[dict[str, Any]]:
        return [{"lane": "learner", "name": "learn", "start": float(step), "end": step + 0.5}]

    lines = [{"step": step, "spans": spans(step)} for step in (1, 2, 2, 3)]
    log = JsonLines(run.path / "timeline.jsonl")
    for line in lines[:3]:
        log.append_line(line)
    assert page.get("/api/timeline", params=key | {"first": "2", "last": "2"}).json() == lines[1:3]
    log.append_line(lines[3])
    assert page.get("/api/timeline", params=key | {"first": "3"}).json() == lines[3:]
    log.truncate_after(1)
    assert page.get("/api/timeline", params=key).json() == lines[:1]


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("/api/run?run=absent", "there is no run 'absent' here"),
        ("/api/rollouts?run=KEY&step=2", "step-000002.parquet is not there"),
        ("/api/rollouts?run=KEY&step=x", "step='x'"),
        ("/api/rollout?run=KEY&step=1&key=99", "99"),
        ("/api/rollout?run=KEY&step=1&key=x", "rollout 'x' of step 1"),
    ],
)
def test_a_bad_address_says_what_there_is(run: RunDir, path: str, words: str) -> None:
    answer = client(run.path).get(path.replace("KEY", run.path.name))
    assert answer.status_code == 404
    assert words in answer.json()["error"]


def test_a_damaged_run_is_listed_as_such(run: RunDir) -> None:
    (run.path / "run.json").write_text("{")
    (listed,) = client(run.path.parent).get("/api/runs").json()
    assert listed["phase"] == "damaged"
    assert "damaged" in listed["error"]


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS"])
def test_nothing_but_get_is_answered(run: RunDir, method: str) -> None:
    assert client(run.path).request(method, "/api/runs").status_code == 405


def test_notes_are_written_where_the_page_may(run: RunDir, s3_root: str) -> None:
    def put(page: TestClient, path: str = "/api/notes", text: str = "remember <b>", **headers: str) -> int:
        headers = headers or {"x-strop": "notes"}
        asked = {"run": run.path.name}
        return page.put(path, params=asked, content=text, headers=headers).status_code

    assert put(client(run.path)) == 405
    page = client(run.path, writes_notes=True)
    # Another site's script can send neither the header nor this machine's name.
    assert put(page, **{"content-type": "text/plain"}) == 405
    assert put(page, "/api/runs") == 405
    assert put(page, **{"x-strop": "notes", "host": "evil.example"}) == 403
    assert not (run.path / "notes.md").exists()
    assert put(page) == 200
    answer = page.get("/api/run", params={"run": run.path.name}).json()
    assert (answer["notes"], answer["writes_notes"]) == ("remember <b>", True)
    assert put(page, text="x" * (1 << 21)) == 413
    with pytest.raises(StoreError, match="cannot be written from here"):
        LiveRun(key="far", record=StoreRecord(open_objects(s3_root), s3_root)).write_notes("x")


def test_elsewhere_a_token_lets_in(run: RunDir) -> None:
    page = client(run.path, token="a secret", host="0.0.0.0")
    assert page.get("/", headers={"host": "any.example"}).status_code == 401
    assert page.get("/api/runs", headers={"authorization": "Bearer a secret"}).status_code == 200
    assert page.get("/?token=another").status_code == 401
    page = client(run.path, token="a secret")
    opened = page.get("/?token=a secret", follow_redirects=False)
    # The token is out of the address at once, and of reach for scripts and other sites.
    assert (opened.status_code, opened.headers["location"]) == (307, "/")
    assert {"HttpOnly", "SameSite=strict"} <= set(opened.headers["set-cookie"].split("; "))
    assert page.get("/api/runs").status_code == 200


def test_news_follow_the_logs_and_a_resume(run: RunDir) -> None:
    live = LiveRun(key="run", record=DirectoryRecord(run.path))
    metrics, events = live.read_metrics(), live.read_events()[1]

    async def hear() -> list[str]:
        news = follow(live, (metrics, events), poll_s=0.001)
        heard = [await anext(news)]

        async def next_of(kind: str) -> None:
            heard.append(await anext(news))
            assert f"event: {kind}\n" in heard[-1]

        run.metrics.append(4, {"reward_mean": 0.5})
        await next_of("metrics")
        run.events.append(Event(kind=EventKind.TRIPWIRE, step=4, cause="zero_variance"))
        await next_of("event")
        run.metrics.truncate_after(2)
        await next_of("restart")
        await next_of("metrics")
        await next_of("metrics")
        (run.path / "notes.md").write_text("remember")
        await next_of("state")
        return heard

    heard = asyncio.run(hear())
    # A browser that asks on from there is told nothing twice.
    assert f"id: {run.metrics.path.stat().st_size}.{run.events.path.stat().st_size}\n" in heard[-1]


def test_tokens_add_up_to_the_text(tokenizer: Tokenizer) -> None:
    text = "Ünïcode 👩‍🚀 and  two spaces\n\n\tx = 3"
    pieces = cut_text(tokenizer._fast, tokenizer.encode(text).tolist())
    assert "".join(pieces) == text
    assert len(pieces) == len(tokenizer.encode(text))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("127.0.0.1", ("127.0.0.1", None)), (":9", ("127.0.0.1", 9)), ("0.0.0.0:80", ("0.0.0.0", 80)),
        ("[::1]:80", ("::1", 80)), ("[::1]", ("::1", None)), ("host", ("host", None)),
    ],
)  # fmt: skip
def test_addresses(text: str, expected: tuple[str, int | None]) -> None:
    address = Address.parse(text)
    assert (address.host, address.port) == expected


@pytest.mark.parametrize("text", ["", ":", "host:port", "host:70000", "a@b", "host/path", "[::1"])
def test_what_is_no_address_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="--address"):
        Address.parse(text)


def test_a_taken_port_is_refused_and_the_usual_one_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    with Address(port=0).listen() as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match="cannot listen"):
            Address(port=port).listen()
        monkeypatch.setattr("strop.view.server.DEFAULT_PORT", port)
        with Address().listen() as other:
            assert other.getsockname()[1] != port
    with pytest.raises(ConfigError, match="cannot listen"):
        Address(host="192.0.2.1", port=0).listen()


def test_trials_of_a_sweep_are_runs(run: RunDir, tmp_path: Path) -> None:
    shutil.copytree(run.path, tmp_path / "more/sweep/members/0", ignore=shutil.ignore_patterns("latest"))
    assert [one.key for one in find_runs(str(tmp_path / "more"), no_job).list()] == ["sweep/members/0"]


def test_a_mirror_in_s3_is_shown(run: RunDir, s3_root: str) -> None:
    objects = open_objects(s3_root)
    for path in sorted(run.path.rglob("*")):
        if path.is_file() and "attempts" not in path.parts and path.name != "lock":
            name = path.relative_to(run.path)
            objects.write(f"{s3_root}/checkpoints/my-run/{name}", path.read_bytes())
    runs = find_runs(s3_root, no_job)
    page = TestClient(build_app(runs), base_url="http://127.0.0.1:8421")
    assert [one["key"] for one in page.get("/api/runs").json()] == ["my-run"]
    # Whether a process works in it cannot be told from here.
    assert page.get("/api/run?run=my-run").json()["phase"] == "unfinished"
    assert len(page.get("/api/rollouts?run=my-run&step=1").json()["rows"]) == 3


def test_a_job_is_asked_for_by_its_name(run: RunDir) -> None:
    runs = find_runs("my-job", lambda name: (name, DirectoryRecord(run.path)))
    assert [one.key for one in runs.list()] == ["my-job"]


@pytest.mark.parametrize("place", ["./absent", "absent/too", "file:///absent/store", "s3://", "nobody"])
def test_a_place_without_runs_is_refused(place: str) -> None:
    with pytest.raises(StropError):
        find_runs(place, no_job)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> RichRuns:
    return make_runs(tmp_path_factory.mktemp("runs"))


@pytest.fixture(scope="module")
def address(runs: RichRuns) -> Iterator[str]:
    with served(runs.root) as address:
        yield address


class Answer:
    """What came back for one request."""

    def __init__(self, address: str, path: str, **headers: str) -> None:
        parts = urlsplit(address)
        assert parts.hostname is not None
        connection = http.client.HTTPConnection(parts.hostname, parts.port, timeout=60)
        connection.request("GET", path, headers=headers)
        got = connection.getresponse()
        self.status, self.headers = got.status, {name.lower(): value for name, value in got.getheaders()}
        self.body = got.read()
        connection.close()


@pytest.mark.parametrize(
    "host", ["evil.example", "127.0.0.1.evil.example", "", "[", "@localhost", "localhost:80@x"]
)
def test_a_page_of_another_name_gets_nothing(address: str, host: str) -> None:
    answer = Answer(address, "/api/runs", Host=host)
    assert answer.status in (400, 403)
    assert b"key" not in answer.body


@pytest.mark.parametrize("path", ["/", "/page/page.css", "/api/runs", "/api/run?run=nobody", "/nothing"])
def test_every_answer_keeps_the_browser_to_this_page(address: str, path: str) -> None:
    headers = Answer(address, path).headers
    policy = dict(part.strip().partition(" ")[::2] for part in headers["content-security-policy"].split(";"))
    assert policy["default-src"] == "'none'"
    assert not {word for rule in policy.values() for word in rule.split()} - {"'none'", "'self'", "data:"}
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["referrer-policy"] == "no-referrer"


@pytest.mark.parametrize(
    "path",
    ["/page/..%2fserver.py", "/page/../server.py", "/page/%2e%2e/server.py", "/page/", "/page/.", "//etc"],
)
def test_nothing_else_of_this_machine_is_sent(address: str, path: str) -> None:
    assert Answer(address, path).status == 404


def test_every_module_is_asked_for_at_once(address: str) -> None:
    """A module that only another one names is asked for after that one has come."""
    page = Answer(address, "/").body.decode()
    modules = [one.name for one in (files("strop.view") / "page").iterdir() if one.name.endswith(".js")]
    assert [name for name in modules if f'="page/{name}"' not in page] == []
