"""What the page's server answers through a real socket, where no client mends a request before it is sent."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

import pytest

from tests.view.rich_runs import HOSTILE, LAST, RichRuns, make_runs
from tests.view.served import served

TOKEN = "let-me-in"


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


def ask_about(address: str, path: str, run: Path, **query: object) -> Any:
    words = "".join(f"&{name}={quote(str(value))}" for name, value in query.items())
    return json.loads(Answer(address, f"/api/{path}?run={run.name}{words}").body)


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


def test_a_token_stays_out_of_addresses_and_scripts(runs: RichRuns) -> None:
    with served(runs.root, token=TOKEN) as address:
        first = Answer(address, f"/?token={TOKEN}")
        assert TOKEN not in first.headers["location"]
        cookie = first.headers["set-cookie"].lower()
        assert "httponly" in cookie
        assert "samesite=strict" in cookie
        # Behind a tunnel the machine has another name.
        assert Answer(address, "/api/runs", Cookie=cookie.partition(";")[0], Host="node7:80").status == 200
        assert Answer(address, "/api/runs", Cookie="strop_view=\xfc").status == 401


def test_a_text_is_found_wherever_it_stands(address: str, runs: RichRuns) -> None:
    def count(text: str) -> int:
        return len(ask_about(address, "search", runs.whole.path, text=text)["found"])

    assert (count("17*23"), count("<SCRIPT>"), count("nobody wrote this")) == (2, 5, 0)


def test_a_rollout_comes_token_by_token(address: str, runs: RichRuns) -> None:
    told = ask_about(address, "rollout", runs.whole.path, step=LAST, key=4)
    sampled = [turn for turn in told["turns"] if turn["role"] == "assistant"]
    assert len(sampled) == 2
    for turn in sampled:
        assert "".join(turn["tokens"]) == turn["text"]
        assert len(turn["tokens"]) == len(turn["logprobs"]) == len(turn["advantages"])
        assert max(turn["logprobs"]) <= 0.0
        assert turn["advantages"] == [4.0] + [0.5] * (len(turn["tokens"]) - 1)


def test_a_text_that_would_act_is_sent_as_it_was_written(address: str, runs: RichRuns) -> None:
    assert ask_about(address, "rollout", runs.whole.path, step=LAST, key=7)["turns"][1]["text"] == HOSTILE
