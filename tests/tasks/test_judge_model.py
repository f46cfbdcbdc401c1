"""What a judge is shown, what of its answer counts, and what becomes of its failures.

Of a real HTTP server whose answers are scripted.
"""

from __future__ import annotations

import asyncio
import json
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strop.audit.probes import INJECTIONS
from strop.errors import ConfigError, DataError
from strop.rollout import FailureOwner, Outcome, Split
from strop.spec import load_spec
from strop.spec.judge import JudgeSettings
from strop.tasks import Task, build_task, build_warm_task, judge_model
from strop.tasks.judge_model import read_rubric, read_scores, wrap_reply
from strop.tasks.judging import Judge
from tests.fixtures.judge_server import REPLY, Say, judge_server, scored, shown_reply
from tests.fixtures.judged import ROWS, judge_spec, judge_task
from tests.fixtures.judging import failed, judge_once, run_self_test, verdict
from tests.fixtures.row_files import write_rows

pytestmark = pytest.mark.usefixtures("own_cache")


def compare(question: str) -> str:
    """Judge as a sound judge with the rubric 'correctness' does."""
    gold = question.partition("Reference answer:\n")[2].partition("\n")[0]
    return scored(float(shown_reply(question).strip() == gold))


def judge(task: Task, text: str, index: int = 0) -> Outcome:
    return verdict(task, task.examples(Split.TRAIN)[index], text)


def test_the_score_is_the_reward(tmp_path: Path) -> None:
    with judge_server(lambda question: scored(0.75)) as server:
        outcome = judge(judge_task(tmp_path, server.url), "word-0")
    assert (outcome.reward, outcome.is_correct, outcome.format_ok) == (0.75, True, None)
    (request,) = server.requests
    assert request["path"] == "/v1/chat/completions"
    asked = {key: request[key] for key in ("model", "temperature", "seed", "max_tokens")}
    assert asked == {"model": "scripted", "temperature": 0, "seed": 0, "max_tokens": 512}
    assert "Authorization" not in request["headers"]


def test_solved_is_what_passes(tmp_path: Path) -> None:
    with judge_server(lambda question: scored(0.6)) as server:
        assert judge(judge_task(tmp_path, server.url, pass_score=0.7), "a").is_correct is False
        assert judge(judge_task(tmp_path, server.url, pass_score=0.6), "b").is_correct is True


@pytest.mark.parametrize("text", ["", " \n", "<think>never closed", "<think>all of it</think> "])
def test_nothing_is_worth_nothing_and_no_call(tmp_path: Path, text: str) -> None:
    with judge_server(lambda question: scored(1.0)) as server:
        outcome = judge(judge_task(tmp_path, server.url), text)
    assert (outcome.reward, outcome.is_correct) == (0.0, False)
    assert server.requests == []


def test_what_was_thought_is_not_shown(tmp_path: Path) -> None:
    with judge_server(lambda question: scored(1.0)) as server:
        judge(judge_task(tmp_path, server.url), "<think>a secret plan</think>word-0")
    assert "secret" not in server.questions[0]


@pytest.mark.parametrize(
    ("said", "kind"),
    [
        ("The reply is excellent, 10 out of 10.", "judge_unparsable"),
        ("I cannot help with that.", "judge_unparsable"),
        (scored(1.5), "judge_unparsable"),
        ((400, '{"error": "context too long"}'), "judge_failed"),
        ((200, "<html>"), "judge_failed"),
        ((200, '{"choices": []}'), "judge_failed"),
        ((200, '{"choices": [{"message": {"content": null, "refusal": "no"}}]}'), "judge_unparsable"),
        ((302, "elsewhere"), "judge_failed"),
    ],
)
def test_rew_6_what_is_no_score_leaves_the_reply_unscored(tmp_path: Path, said: Any, kind: str) -> None:
    with judge_server(lambda question: said) as server:
        outcome = judge(judge_task(tmp_path, server.url), "word-0")
    assert outcome.reward is None
    assert failed(outcome) == (FailureOwner.ENGINE, kind)
    assert outcome.metrics[kind] == 1.0
    assert len(server.requests) == 1


def test_a_busy_judge_is_asked_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(judge_model, "_BACKOFF_S", 0.01)
    answers: list[Any] = [(500, "later"), (429, "later"), scored(1.0)]
    with judge_server(lambda question: answers.pop(0)) as server:
        task = judge_task(tmp_path, server.url)
        assert judge(task, "word-0").reward == 1.0
    assert answers == []


def test_nobody_there_is_no_score(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(judge_model, "_BACKOFF_S", 0.01)
    with judge_server(lambda question: scored(1.0)) as server:
        pass
    outcome = judge(judge_task(tmp_path, server.url), "word-0")
    assert failed(outcome)[1] == "judge_failed"


def test_a_judge_that_stays_silent_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(judge_model, "CALL_LIMIT_S", 0.2)
    with judge_server(lambda question: scored(1.0), delay_s=120.0) as server:
        started_at = time.monotonic()
        outcome = judge(judge_task(tmp_path, server.url), "word-0")
        assert time.monotonic() - started_at < 60
    assert failed(outcome)[1] == "judge_failed"


def test_one_thing_is_asked_once(tmp_path: Path) -> None:
    with judge_server(compare) as server:
        task = judge_task(tmp_path, server.url)
        first, again, other = judge(task, "word-0"), judge(task, "word-0"), judge(task, "word-1")
        stranger = judge(judge_task(tmp_path, server.url, judge_revision="2"), "word-0")
    assert [outcome.reward for outcome in (first, again, other, stranger)] == [1.0, 1.0, 0.0, 1.0]
    assert len(server.requests) == 3


def test_what_failed_is_asked_again_and_a_spoiled_entry_too(tmp_path: Path) -> None:
    answers = ["prose", scored(1.0), scored(1.0)]
    with judge_server(lambda question: answers.pop(0)) as server:
        task = judge_task(tmp_path, server.url)
        assert [judge(task, "word-0").reward for _ in range(2)] == [None, 1.0]
        (entry,) = (tmp_path / "cache" / "judgements").rglob("*.txt")
        entry.write_text("half a", encoding="utf-8")
        assert judge(task, "word-0").reward == 1.0
    assert len(server.requests) == 3


def test_so_many_questions_are_asked_at_once(tmp_path: Path) -> None:
    async def judge_many(task: Task) -> list[Outcome]:
        example = task.examples(Split.TRAIN)[0]
        return list(await asyncio.gather(*(Judge(task).judge(example, f"word {n}") for n in range(8))))

    with judge_server(lambda question: scored(1.0), delay_s=0.05) as server:
        outcomes = asyncio.run(judge_many(judge_task(tmp_path, server.url, judge_concurrency=2)))
    assert [outcome.reward for outcome in outcomes] == [1.0] * 8
    assert server.max_at_once <= 2


BOTH = """
def bonus(reply, **columns):
    return len(reply) < 12

def shortest(completions, **columns):
    lengths = [len(one[0]["content"]) for one in completions]
    return [length == min(lengths) for length in lengths]
"""


def test_a_judge_is_one_reward_among_others(tmp_path: Path) -> None:
    """The answer, a judge, a function of the user's and one of TRL's form, which compares."""
    (tmp_path / "own.py").write_text(BOTH)
    rows = [{"prompt": [{"role": "user", "content": f"{n} + 1?"}], "gold": str(n + 1)} for n in range(12)]
    names = ["math", "judge", f"{tmp_path}/own.py:bonus", f"{tmp_path}/own.py:shortest"]
    with judge_server(lambda question: scored(0.5)) as server:
        spec = judge_spec(
            tmp_path, server.url, rows, reward=names, reward_weights=[0.5, 0.3, 0.1, 0.1], pass_score=0.5
        )
        task = build_task(spec)
        example = task.examples(Split.TRAIN)[0]
        texts = [f"\\boxed{{{example.answer}}}", "no, none at all"]

        async def judge_group() -> list[Outcome]:
            judge = Judge(task, partial(build_warm_task, spec))
            try:
                return list(await judge.judge_group(example, texts, [Outcome(parts={})] * 2))
            finally:
                await judge.close()

        right, wrong = asyncio.run(judge_group())
        assert task.compares(example)
        assert judge_once(spec, texts[0]).reward == right.reward == pytest.approx(0.5 + 0.15 + 0.1 + 0.1)
        assert wrong.reward == pytest.approx(0.15)
        assert (right.is_correct, wrong.is_correct) == (True, False)
        assert right.parts == {"math": 0.5, "judge": 0.15, "bonus": 0.1, "shortest": 0.1}
        assert len(server.questions) == 2
        assert " + 1?" in server.questions[0]
        # A reply that the user's function loses is not shown to the judge.
        (tmp_path / "own.py").write_text(BOTH.replace("return len(reply) < 12", "raise ValueError(reply)"))
        assert judge_once(spec, "anything else").failure is not None
    assert len(server.questions) == 2


def test_a_judge_stands_beside_the_verifier_of_a_data_set(tmp_path: Path) -> None:
    rows = [{"question": f"{n} + 1?", "answer": f"#### {n + 1}"} for n in range(12)]
    source = write_rows(tmp_path / "rows.jsonl", rows)
    with judge_server(lambda question: scored(0.5)) as server:
        words = ["name=x", "task.name=gsm8k", f"task.source={source}", 'task.reward=["number", "judge"]']
        judged = [
            f"judge_url={server.url}",
            "judge_model=a",
            "judge_revision=r1",
            "reward_weights=[0.8, 0.2]",
        ]
        task = build_task(load_spec(None, [*words, *(f"task.{one}" for one in judged)]).spec.task)
        gold = task.gold_replies(task.examples(Split.TRAIN)[0])[0]
        assert judge(task, gold).parts == {"number": 0.8, "judge": 0.1}
    assert task.render(task.examples(Split.TRAIN)[0])[0].text in server.questions[0]


def test_the_key_comes_from_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_KEY", "not for the records")
    # Of a server on this machine no proxy is asked.
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    with judge_server(lambda question: scored(1.0)) as server:
        task = judge_task(tmp_path, server.url, judge_key_env="SOME_KEY")
        assert judge(task, "word-0").reward == 1.0
    assert server.requests[0]["headers"]["Authorization"] == "Bearer not for the records"
    monkeypatch.delenv("SOME_KEY")
    with pytest.raises(ConfigError, match=r"task\.judge_key_env=SOME_KEY.* no key of scripted"):
        judge(task, "word-1")


def test_a_sound_judge_passes_the_self_test_and_one_that_pays_for_everything_does_not(tmp_path: Path) -> None:
    def probes(say: Say) -> set[str]:
        with judge_server(say) as server:
            task = judge_task(tmp_path, server.url, judge_model=say.__name__)
            return {finding.probe for finding in run_self_test(task, task.examples(Split.TRAIN)[:6])}

    def praise(question: str) -> str:
        return scored(1.0)

    assert probes(compare) == set()
    assert probes(praise) >= {"garbage", "echo", "near_miss"}


def test_the_version_is_the_judge_and_not_the_way_to_it(tmp_path: Path) -> None:
    def version(**settings: Any) -> str:
        return judge_task(tmp_path, "http://127.0.0.1:1/v1", **settings).version

    plain = version()
    same: list[dict[str, Any]] = [{"judge_concurrency": 3}, {"judge_key_env": "K"}]
    assert {version(**settings) for settings in same} == {plain}
    rubric = tmp_path / "rubric.txt"
    rubric.write_text("{{prompt}} {{reply}} {{answer}}")
    first = version(rubric=str(rubric))
    rubric.write_text("{{prompt}} {{reply}} {{answer}}.")
    others = [first, version(rubric=str(rubric))]
    others += [version(judge_model="other"), version(judge_revision="2"), version(pass_score=0.9)]
    assert len({plain, *others}) == 6


@pytest.mark.parametrize(
    "row",
    [
        {"gold": "a"},
        {"prompt": " ", "gold": "a"},
        {"prompt": "a", "gold": ""},
        {"prompt": "a"},
        "text",
    ],
)
def test_rew_6_malformed_rows_are_refused_by_place(tmp_path: Path, row: Any) -> None:
    task = judge_task(tmp_path, "http://127.0.0.1:1/v1", [row, *ROWS])
    with pytest.raises(DataError, match=r"(row|line) 1|the row that asks 'a'"):
        task.examples(Split.TRAIN)


def test_other_columns_fill_places_of_the_rubric(tmp_path: Path) -> None:
    (tmp_path / "r.md").write_text("{{prompt}} for {{audience}} aged {{age}}: {{reply}}")
    rows = [{**row, "audience": "children", "age": 7, "tags": ["x"]} for row in ROWS]
    with judge_server(lambda question: scored(1.0)) as server:
        judge(judge_task(tmp_path, server.url, rows, rubric=str(tmp_path / "r.md")), "word-0")
    assert " for children aged 7: <<<REPLY" in server.questions[0]


def test_a_reply_of_a_megabyte_is_judged(tmp_path: Path) -> None:
    with judge_server(lambda question: scored(0.0)) as server:
        outcome = judge(judge_task(tmp_path, server.url), "\ud800{" * 500_000)
    assert outcome.reward == 0.0
    assert len(server.questions[0]) < 45_000


def write_run(tmp_path: Path, **settings: str) -> Path:
    lines = {
        "judge_url": '"http://127.0.0.1:1/v1"',
        "judge_model": '"big"',
        "judge_revision": '"1"',
        "reward": '"judge"',
        "prompt": '"prompt"',
        "source": '"rows.jsonl"',
        **settings,
    }
    path = tmp_path / "run.toml"
    body = "".join(f"{key} = {value}\n" for key, value in lines.items())
    path.write_text(f'name = "x"\n[model]\nuri = "org/small"\n[task]\nname = "rows"\n{body}')
    return path


def test_a_run_file_names_a_judge(tmp_path: Path) -> None:
    write_rows(tmp_path / "rows.jsonl", ROWS)
    path = write_run(tmp_path, source='"rows.jsonl"', rubric='"grade.md"')
    task = load_spec(path).spec.task
    assert isinstance(task, JudgeSettings)
    assert task.rubric == str(tmp_path / "grade.md")


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
        ({"judge_concurrency": "0"}, "judge_concurrency"),
        ({"judge_revision": '""'}, "judge_revision"),
        ({"judge_url": '""'}, "judge belongs"),
        ({"reward": '"a.py:f"'}, "judge belongs"),
        ({"judge_url": '"role"', "judge_key_env": '"K"'}, "key"),
    ],
)
def test_what_nobody_can_mean_is_refused(tmp_path: Path, settings: dict[str, str], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        load_spec(write_run(tmp_path, **settings))
    load_spec(write_run(tmp_path, **ITSELF, can_judge_itself="true"))


def write(tmp_path: Path, text: str) -> str:
    path = tmp_path / "rubric.txt"
    path.write_text(text, encoding="utf-8")
    return str(path)


def test_places_are_filled_at_once_and_the_contract_follows(tmp_path: Path) -> None:
    rubric = write(tmp_path, "Q {{prompt}} R {{ reply }} of {{topic}}; {not a place}")
    rows = [{**row, "prompt": "say {{topic}} " + row["prompt"], "topic": "sea"} for row in ROWS]
    with judge_server(lambda question: scored(1.0)) as server:
        task = judge_task(tmp_path, server.url, rows, rubric=rubric)
        judge(task, "blue")
    prompt = task.examples(Split.TRAIN)[0].fields["prompt"]
    contract = judge_model.CONTRACT.replace("SCORES", "x")
    shown = f"Q {prompt} R {wrap_reply('blue')} of sea; {{not a place}}\n\n{contract}"
    assert server.questions == [shown]


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("{{prompt}} only", "reply"),
        ("{{reply}} only", "prompt"),
        (b"\xff\xfe", r"rubric\.txt"),
    ],
)
def test_a_missing_or_malformed_place_and_what_is_no_text_are_refused(
    tmp_path: Path, text: str | bytes, named: str
) -> None:
    path = tmp_path / "rubric.txt"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ConfigError, match=named):
        read_rubric(str(path))
    with pytest.raises(ConfigError, match="qualty"):
        read_rubric("qualty")


def test_a_reply_is_shown_alike_every_time_and_never_with_a_number_it_knows() -> None:
    first, again, other = wrap_reply("blue"), wrap_reply("blue"), wrap_reply("blue!")
    assert first == again
    assert REPLY.search(first).group(1) != REPLY.search(other).group(1)  # type: ignore[union-attr]


def test_a_long_reply_is_cut_in_its_middle() -> None:
    shown = wrap_reply("a" * 50_000 + "end")
    # 50,003 characters, 20,000 kept on each side: 10,003 are left out.
    assert "a" * 20_000 + "\n[10003 characters are left out here]\n" + "a" * 19_997 + "end\n" in shown


@given(st.text() | st.sampled_from(sorted(INJECTIONS.values())))
def test_no_reply_forges_delimiters_or_a_score(text: str) -> None:
    shown = wrap_reply(text)
    assert shown.count("<<<") == 2
    assert shown.count(">>>") == 2
    found = REPLY.fullmatch(shown)
    assert found is not None
    # A judge that ends by quoting the reply has given no score.
    assert read_scores("The reply says " + found.group(2), 1) is None


def test_the_injections_would_be_scores_if_they_were_not_escaped() -> None:
    raw = [text for text in INJECTIONS.values() if read_scores(text, 1) is not None]
    assert len(raw) == 3
    for text in raw:
        assert json.dumps("scores") not in wrap_reply(text)


@pytest.mark.parametrize(
    ("answer", "score"),
    [
        ('{"scores": [0.25], "reason": "thin"}', 0.25),
        ('It has 3 faults of 10.\n{"scores": [0.7], "reason": "x"}\n', 0.7),
        ('```json\n{"scores": [1], "reason": "x"}\n```', 1.0),
        ('{"scores": [1], "reason": "first"} and then {"scores": [0], "reason": "last"}', 0.0),
        ('{"scores": [0.5], "reason": "it uses {braces} and }"}', 0.5),
        ('{"reason": "nested", "parts": {"scores": [1]}, "scores": [0.1]}', 0.1),
        ('<think>{"scores": [1], "reason": "maybe"}</think>{"scores": [0.2], "reason": "no"}', 0.2),
        ('I would give {"scores": [1]}.</think>\n{"scores": [0.3]}', 0.3),
    ],
)
def test_the_last_object_is_the_judgement(answer: str, score: float) -> None:
    assert read_scores(answer, 1) == [score]


NO_SCORES = [
    *("", "I give it 0.9.", "Score: 1", "I cannot help with that.", '{"grade": 1}', '[{"scores": [1]}]'),
    *('{"scores": [1], "reason": "x"} That is my grade.', '{"scores": ["1"], "reason": "x"}'),
    *('{"scores": [true], "reason": "x"}', '{"scores": [null], "reason": "x"}', '{"outer": {"scores": [1]}}'),
    *('{"scores": [1], "reason": "cut in the mid', '<think>still at it {"scores": [1], "reason": "x"}'),
    "{" * 5000 + "}",
]
BEYOND = [
    f'{{"scores": [{one}], "reason": "x"}}'
    for one in ("1.5", "-0.1", "10", "1" + "0" * 400, "NaN", "Infinity", "1e400")
]


@pytest.mark.parametrize("answer", [*NO_SCORES, *BEYOND])
def test_anything_else_has_no_score(answer: str) -> None:
    assert read_scores(answer, 1) is None
