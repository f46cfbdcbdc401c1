"""The task itself, against a real HTTP server whose answers are scripted."""

from __future__ import annotations

import asyncio
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from strop.errors import ConfigError, DataError
from strop.rollout import FailureOwner, Outcome, Split
from strop.spec import load_spec
from strop.spec.judge import LlmJudgeSpec
from strop.tasks import build_task, build_warm_task
from strop.tasks.judging import Judge
from strop.tasks.llm_judge import client
from strop.tasks.llm_judge.task import LlmJudge
from strop.tasks.registry import task_summaries
from tests.fixtures.judge_server import Say, judge_server, scored, shown_reply
from tests.fixtures.judged import ROWS, judge_spec, judge_task
from tests.fixtures.judging import failed, run_self_test, verdict
from tests.fixtures.row_files import write_rows

pytestmark = pytest.mark.usefixtures("own_cache")


def compare(question: str) -> str:
    """Judge as a sound judge with the rubric 'correctness' does."""
    gold = question.partition("Reference answer:\n")[2].partition("\n")[0]
    return scored(float(shown_reply(question).strip() == gold))


def verify(task: LlmJudge, text: str, index: int = 0) -> Outcome:
    outcome = verdict(task, task.examples(Split.TRAIN)[index], text)
    task.client.close()
    return outcome


def test_the_score_is_the_reward(tmp_path: Path) -> None:
    with judge_server(lambda question: scored(0.75)) as server:
        outcome = verify(judge_task(tmp_path, server.url), "word-0")
    assert (outcome.reward, outcome.is_correct, outcome.format_ok) == (0.75, True, None)
    (request,) = server.requests
    assert request["path"] == "/v1/chat/completions"
    asked = {key: request[key] for key in ("model", "temperature", "seed", "max_tokens")}
    assert asked == {"model": "scripted", "temperature": 0, "seed": 0, "max_tokens": 512}
    assert "Authorization" not in request["headers"]


def test_solved_is_what_passes(tmp_path: Path) -> None:
    with judge_server(lambda question: scored(0.6)) as server:
        assert verify(judge_task(tmp_path, server.url, pass_score=0.7), "a").is_correct is False
        assert verify(judge_task(tmp_path, server.url, pass_score=0.6), "b").is_correct is True


@pytest.mark.parametrize("text", ["", " \n", "<think>never closed", "<think>all of it</think> "])
def test_nothing_is_worth_nothing_and_no_call(tmp_path: Path, text: str) -> None:
    with judge_server(lambda question: scored(1.0)) as server:
        outcome = verify(judge_task(tmp_path, server.url), text)
    assert (outcome.reward, outcome.is_correct, outcome.format_ok) == (0.0, False, False)
    assert server.requests == []


def test_what_was_thought_is_not_shown(tmp_path: Path) -> None:
    with judge_server(lambda question: scored(1.0)) as server:
        verify(judge_task(tmp_path, server.url), "<think>a secret plan</think>word-0")
    assert "secret" not in server.questions[0]


@pytest.mark.parametrize(
    ("said", "kind"),
    [
        ("The reply is excellent, 10 out of 10.", "judge_unparsable"),
        ("I cannot help with that.", "judge_unparsable"),
        (scored(1.5), "judge_out_of_bounds"),
        ((400, '{"error": "context too long"}'), "judge_http"),
        ((200, "<html>"), "judge_http"),
        ((200, '{"choices": []}'), "judge_http"),
        ((200, '{"choices": [{"message": {"content": null, "refusal": "no"}}]}'), "judge_unparsable"),
        ((302, "elsewhere"), "judge_http"),
    ],
)
def test_rew_6_what_is_no_score_leaves_the_reply_unscored(tmp_path: Path, said: Any, kind: str) -> None:
    with judge_server(lambda question: said) as server:
        outcome = verify(judge_task(tmp_path, server.url), "word-0")
    assert outcome.reward is None
    assert failed(outcome) == (FailureOwner.ENGINE, kind)
    assert outcome.metrics[kind] == 1.0
    assert len(server.requests) == 1


def test_a_busy_judge_is_asked_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "_BACKOFF_S", 0.01)
    answers: list[Any] = [(500, "later"), (429, "later"), scored(1.0)]
    with judge_server(lambda question: answers.pop(0)) as server:
        task = judge_task(tmp_path, server.url)
        assert verify(task, "word-0").reward == 1.0
    # Each try is a call.
    assert task.client.limiter.num_calls == 3


def test_nobody_there_is_no_score(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "_BACKOFF_S", 0.01)
    with judge_server(lambda question: scored(1.0)) as server:
        pass
    outcome = verify(judge_task(tmp_path, server.url), "word-0")
    assert failed(outcome)[1] == "judge_unreachable"


def test_a_judge_that_stays_silent_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "CALL_LIMIT_S", 0.2)
    with judge_server(lambda question: scored(1.0), delay_s=120.0) as server:
        started_at = time.monotonic()
        outcome = verify(judge_task(tmp_path, server.url), "word-0")
        assert time.monotonic() - started_at < 60
    assert failed(outcome)[1] == "judge_timeout"


def test_one_thing_is_asked_once(tmp_path: Path) -> None:
    with judge_server(compare) as server:
        task = judge_task(tmp_path, server.url)
        first, again, other = verify(task, "word-0"), verify(task, "word-0"), verify(task, "word-1")
        stranger = verify(judge_task(tmp_path, server.url, judge_revision="2"), "word-0")
    assert [outcome.metrics["judge_cached"] for outcome in (first, again, other, stranger)] == [0, 1, 0, 0]
    assert [outcome.reward for outcome in (first, again, other)] == [1.0, 1.0, 0.0]
    assert len(server.requests) == 3


def test_what_failed_is_asked_again_and_a_spoiled_entry_too(tmp_path: Path) -> None:
    answers = ["prose", scored(1.0), scored(1.0)]
    with judge_server(lambda question: answers.pop(0)) as server:
        task = judge_task(tmp_path, server.url)
        assert [verify(task, "word-0").reward for _ in range(2)] == [None, 1.0]
        (entry,) = (tmp_path / "cache" / "judgements").rglob("*.json")
        entry.write_text("half a", encoding="utf-8")
        assert verify(task, "word-0").reward == 1.0
    assert len(server.requests) == 3


def test_workers_share_places_and_budget(tmp_path: Path) -> None:
    async def judge_many(spec: LlmJudgeSpec) -> list[Outcome]:
        task = build_task(spec)
        judge = Judge(task, partial(build_warm_task, spec))
        assert isinstance(judge, Judge)
        example = task.examples(Split.TRAIN)[0]
        try:
            return list(await asyncio.gather(*(judge.judge(example, f"word {n}") for n in range(8))))
        finally:
            await judge.close()

    with judge_server(lambda question: scored(1.0), delay_s=0.15) as server:
        outcomes = asyncio.run(
            judge_many(judge_spec(tmp_path, server.url, judge_concurrency=2, max_judge_calls=6))
        )
    assert sorted(outcome.reward or 0.0 for outcome in outcomes) == [0.0] * 2 + [1.0] * 6
    kinds = [outcome.failure.kind for outcome in outcomes if outcome.failure is not None]
    assert kinds == ["judge_budget"] * 2
    assert len(server.requests) == 6
    assert server.max_at_once <= 2


def test_the_key_comes_from_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_KEY", "not for the records")
    with judge_server(lambda question: scored(1.0)) as server:
        task = judge_task(tmp_path, server.url, judge_key_env="SOME_KEY")
        assert verify(task, "word-0").reward == 1.0
    assert server.requests[0]["headers"]["Authorization"] == "Bearer not for the records"
    monkeypatch.delenv("SOME_KEY")
    spec = judge_spec(tmp_path, server.url, judge_key_env="SOME_KEY")
    with pytest.raises(ConfigError, match=r"task\.judge_key_env=SOME_KEY, and that variable is not set"):
        build_warm_task(spec)


def test_a_sound_judge_passes_the_self_test_and_one_that_pays_for_everything_does_not(tmp_path: Path) -> None:
    def probes(say: Say) -> set[str]:
        with judge_server(say) as server:
            task = judge_task(tmp_path, server.url, judge_model=say.__name__)
            found = {finding.probe for finding in run_self_test(task, task.examples(Split.TRAIN)[:6])}
            task.client.close()
        return found

    def praise(question: str) -> str:
        return scored(1.0)

    assert probes(compare) == set()
    assert probes(praise) >= {"garbage", "echo", "near_miss"}


def test_the_version_is_the_judge_and_not_the_way_to_it(tmp_path: Path) -> None:
    def version(**settings: Any) -> str:
        return judge_task(tmp_path, "http://127.0.0.1:1/v1", **settings).version

    plain = version()
    same: list[dict[str, Any]] = [{"judge_concurrency": 3}, {"max_judge_calls": 7}, {"judge_key_env": "K"}]
    assert {version(**settings) for settings in same} == {plain}
    rubric = tmp_path / "rubric.txt"
    rubric.write_text("{{prompt}} {{reply}} {{gold}}")
    first = version(rubric=str(rubric))
    rubric.write_text("{{prompt}} {{reply}} {{gold}}.")
    others = [first, version(rubric=str(rubric)), version(rubric="quality")]
    others += [version(judge_model="other"), version(judge_revision="2"), version(pass_score=0.9)]
    assert len({plain, *others}) == 7


@pytest.mark.parametrize(
    "row",
    [
        {"gold": "a"},
        {"prompt": " ", "gold": "a"},
        {"prompt": "a", "gold": 3},
        {"prompt": "a", "gold": ""},
        {"prompt": "a"},
        "text",
    ],
)
def test_rew_6_malformed_rows_are_refused_by_place(tmp_path: Path, row: Any) -> None:
    task = judge_task(tmp_path, "http://127.0.0.1:1/v1", [row, *ROWS])
    with pytest.raises(DataError, match=r"(row|line) 1"):
        task.examples(Split.TRAIN)


def test_other_columns_fill_places_of_the_rubric(tmp_path: Path) -> None:
    (tmp_path / "r.md").write_text("{{prompt}} for {{audience}} aged {{age}}: {{reply}}")
    rows = [{**row, "audience": "children", "age": 7, "tags": ["x"]} for row in ROWS]
    with judge_server(lambda question: scored(1.0)) as server:
        verify(judge_task(tmp_path, server.url, rows, rubric=str(tmp_path / "r.md")), "word-0")
    assert " for children aged 7: <<<REPLY" in server.questions[0]


def test_a_task_without_data_has_no_examples(tmp_path: Path) -> None:
    task = judge_task(tmp_path, "http://127.0.0.1:1/v1", source=None)
    assert task.version
    with pytest.raises(ConfigError, match=r"task llm-judge has no task\.source"):
        task.examples(Split.TRAIN)


def test_a_reply_of_a_megabyte_is_judged(tmp_path: Path) -> None:
    with judge_server(lambda question: scored(0.0)) as server:
        outcome = verify(judge_task(tmp_path, server.url), "\ud800{" * 500_000)
    assert outcome.reward == 0.0
    assert len(server.questions[0]) < 45_000


def write_run(tmp_path: Path, **settings: str) -> Path:
    lines = {
        "judge_url": '"http://127.0.0.1:1/v1"',
        "judge_model": '"big"',
        "judge_revision": '"1"',
        **settings,
    }
    path = tmp_path / "run.toml"
    body = "".join(f"{key} = {value}\n" for key, value in lines.items())
    path.write_text(f'name = "x"\n[model]\nuri = "org/small"\n[task]\nname = "llm-judge"\n{body}')
    return path


def test_a_run_file_names_a_judge(tmp_path: Path) -> None:
    write_rows(tmp_path / "rows.jsonl", ROWS)
    path = write_run(tmp_path, source='"rows.jsonl"', rubric='"grade.md"')
    task = load_spec(path).spec.task
    assert isinstance(task, LlmJudgeSpec)
    assert (task.source, task.rubric) == (str(tmp_path / "rows.jsonl"), str(tmp_path / "grade.md"))
    assert "llm-judge" in task_summaries()


ITSELF = {"judge_model": '"small"'}


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"judge_url": '"localhost:80"'}, "judge_url"),
        ({"judge_url": '"http://u:p@host/v1"'}, "password"),
        ({"judge_key_env": '"sk-0123456789abcdefghijklmn"'}, "API key"),
        ({"judge_key_env": '"two words"'}, "judge_key_env"),
        ({"judge_url": '"http://far.example/v1"', "judge_key_env": '"K"'}, "plain text"),
        (ITSELF, "itself"),
        ({"judge_model": '"other-org/Small"'}, "itself"),
        ({"pass_score": "0.0"}, "pass_score"),
        ({"judge_engine": '"vllm"'}, "engine"),
        ({"judge_url": '"role"', "judge_key_env": '"K"'}, "key"),
    ],
)
def test_settings_that_cannot_be_meant_are_refused(
    tmp_path: Path, settings: dict[str, str], named: str
) -> None:
    with pytest.raises(ConfigError, match=named):
        load_spec(write_run(tmp_path, **settings))
    load_spec(write_run(tmp_path, **ITSELF, can_judge_itself="true"))
