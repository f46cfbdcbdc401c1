"""What the replies of a step look like beside each other, whatever they earned.

What no reward shows: one reply that many different prompts get (`common_reply_frac`), replies that could
answer any prompt (`prompt_dependence`), and those that answer and go on to a question of their own making
(`runaway_frac`).
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from strop.record.events import Event
from strop.rollout import Group, Rollout
from strop.tasks.answers import text_after_thinking
from strop.train.watch.tripwires import MAX_IDS

_MAX_CHARS = 8000
"""How far a reply is searched for a question behind its answer: who goes on, begins early."""
_MAX_PROMPTS, _MAX_EACH = 16, 8
"""Prompts of a step whose replies are compared with each other, and replies of each."""
_MAX_BYTES = 1024
"""Of a reply, that are."""
_NUM_BUCKETS = 4096
_MAX_ANSWER_CHARS = 80
_NUM_OPENING_WORDS = 4
_NUM_QUESTION_WORDS = 3
_MAX_SAMPLE_CHARS = 160

# Linear in the text: each quantifier is over one character class, and what follows it is not in the class.
_ANSWERED = re.compile(r"####\s*\S+|\\boxed\{[^{}]*\}|</answer>|\banswer(?: is|:)\s*\S+", re.IGNORECASE)
_BARE_NUMBER = re.compile(r"\s*[-+$(]*\d[\d.,/%]*\)?[.,]?(?=\s|$)")
# Where a sentence may begin: on a new line, and behind a mark that ends one, a colon or a number.
_START = re.compile(r"\n\s*|(?<=[.!?:>\d*])[ \t]+")
_LABEL = re.compile(
    r"\W{0,4}(?:(?:next|new|another|more|practice|sample|test)\s+)?"
    r"(?:questions?|q|problems?|exercises?|puzzles?|tasks?|quiz|riddles?|quer(?:y|ies)|challenges?|prompt"
    r"|instructions?|user|human|student|teacher)\b"
    r"(?:\s{0,2}(?:no\.?|number|#)?\s{0,2}\d+\W{0,2}(?=\s)|[^\S\n]{0,2}(?:\W{0,2}[:>]|(?=\n)))",
    re.IGNORECASE,
)
_SPACE = re.compile(r"\s*")
_WORD = re.compile(r"[^\W\d_]+|\d+")
_EDGES = " \t\r\n.,;:!?\"'`*"


def measure_replies(groups: Sequence[Group]) -> dict[str, float]:
    """Return how alike and how talkative the replies of a step are; nothing without replies.

    `common_reply_frac`: the share of replies that are one and the same text (but for case and punctuation
    around it) and not right, given to at least two prompts. 0 where every wrong reply is one prompt's own.
    `distinct_reply_frac`: the number of different texts by the number of replies.
    `prompt_dependence`: how well the most similar other reply identifies the prompt, see there.
    `runaway_frac`: the share that goes on to another question behind its answer.
    """
    replied = _list_replied(groups)
    if not replied:
        return {}
    texts = [_reply_key(rollout) for rollout in replied]
    metrics = {
        "common_reply_frac": len(_find_common(replied)) / len(replied),
        "distinct_reply_frac": len(set(texts)) / len(replied),
        "runaway_frac": sum(map(_runs_on, replied)) / len(replied),
    }
    compared = [one for group in groups[:_MAX_PROMPTS] for one in _list_replied([group])[:_MAX_EACH]]
    dependence = prompt_dependence([one.turns[0].text for one in compared], list(map(_reply_key, compared)))
    return metrics if dependence is None else {**metrics, "prompt_dependence": dependence}


def prompt_dependence(prompts_S: Sequence[str], replies_S: Sequence[str]) -> float | None:
    """Return how much better than by chance a reply's nearest other reply tells which prompt it answers.

    1: every reply is most like one to its own prompt. 0: it is as often most like one to any other, as where
    replies do not depend on what was asked. None where there are no two prompts with two replies each.
    Two texts are as alike as their runs of three bytes, by the cosine; of equally near ones each counts in
    part. Shapes: S replies.
    """
    _, owner_S = np.unique(np.array(prompts_S, dtype=object), return_inverse=True)
    counts = np.bincount(owner_S)
    kept = counts[owner_S] > 1
    if np.count_nonzero(counts > 1) < 2:
        return None
    owner_S = owner_S[kept]
    texts = [text for text, is_kept in zip(replies_S, kept, strict=True) if is_kept]
    near_S_S = _alike(texts)
    np.fill_diagonal(near_S_S, -1.0)
    is_nearest_S_S = near_S_S >= near_S_S.max(axis=1, keepdims=True) - 1e-6
    is_own_S_S = owner_S[:, None] == owner_S[None, :]
    told_S = (is_nearest_S_S & is_own_S_S).sum(axis=1) / is_nearest_S_S.sum(axis=1)
    by_chance_S = (is_own_S_S.sum(axis=1) - 1) / (len(owner_S) - 1)
    return float((told_S.mean() - by_chance_S.mean()) / (1.0 - by_chance_S.mean()))


def _alike(texts_S: Sequence[str]) -> NDArray[np.float32]:
    """Return the cosine of each pair of texts, by the runs of three bytes that they hold. Shapes: S x S."""
    held_S_B = np.zeros((len(texts_S), _NUM_BUCKETS), dtype=np.float32)
    for row_B, text in zip(held_S_B, texts_S, strict=True):
        data = np.frombuffer(f" {text} ".encode(errors="replace")[:_MAX_BYTES], dtype=np.uint8)
        first, second, third = (data[at : len(data) - 2 + at].astype(np.int64) for at in range(3))
        row_B[(first * 961 + second * 31 + third) % _NUM_BUCKETS] = 1.0
    norm_S = np.linalg.norm(held_S_B, axis=1).clip(min=1e-6)
    alike: NDArray[np.float32] = held_S_B @ held_S_B.T / (norm_S[:, None] * norm_S[None, :])
    return alike


def with_samples(alarms: Sequence[Event], groups: Sequence[Group]) -> list[Event]:
    """Return alarms about replies with one of them, and the examples that show it."""
    found = []
    replied = _list_replied(groups)
    for alarm in alarms:
        shown: list[Rollout] = []
        if alarm.cause == "runaway":
            shown = [rollout for rollout in replied if _runs_on(rollout)]
        elif alarm.cause == "reply_collapse":
            shown = _find_common(replied)
        if shown:
            assert shown[0].reply is not None
            text = shown[0].reply.text[:_MAX_SAMPLE_CHARS]
            ids = tuple(dict.fromkeys(rollout.example.example_id for rollout in shown))[:MAX_IDS]
            alarm = replace(alarm, detail=f"{alarm.detail}; for example {text!r}", example_ids=ids)
        found.append(alarm)
    return found


def _list_replied(groups: Sequence[Group]) -> list[Rollout]:
    return [rollout for group in groups for rollout in group.rollouts if rollout.reply is not None]


def _reply_key(rollout: Rollout) -> str:
    """Return what makes a reply the same as another one."""
    assert rollout.reply is not None
    return rollout.reply.text.strip(_EDGES).casefold()


def _find_common(replied: Sequence[Rollout]) -> list[Rollout]:
    """Return the largest set of replies that are one wrong text and answer different prompts."""
    by_text: dict[str, list[Rollout]] = defaultdict(list)
    for rollout in replied:
        if rollout.outcome.is_correct is not True:
            by_text[_reply_key(rollout)].append(rollout)
    # By what was asked, not by example: a task may ask one thing many times.
    common = [same for same in by_text.values() if len({one.turns[0].text for one in same}) > 1]
    return max(common, key=len, default=[])


def _runs_on(rollout: Rollout) -> bool:
    assert rollout.reply is not None
    text = text_after_thinking(rollout.reply.text)
    return text is not None and runs_on(rollout.turns[0].text, text, rollout.example.answer)


def runs_on(prompt: str, reply: str, answer: str | None) -> bool:
    """Whether a reply holds another question behind its answer: the model goes on to talk to itself.

    An answer is the right one, one in a form that tasks ask for, or a number that the reply begins with. A
    question is announced by a label in any numbering, begins as the prompt's own does, or ends with a
    question mark and is answered. One that says the prompt's own again is none.
    """
    reply = reply[:_MAX_CHARS].rstrip()
    answered = _end_of_answer(reply, answer)
    if answered is None:
        return False
    asked = _plain(prompt)
    openings = {words for line in prompt.splitlines() if (words := _opening(line))}
    for start in _START.finditer(reply, max(answered - 1, 0)):
        at = start.end()
        if at < answered:
            continue
        label = _LABEL.match(reply, at)
        space = _SPACE.match(reply, at if label is None else label.end())
        begin = at if space is None else space.end()
        end = reply.find("\n", begin)
        line = reply[begin : end if end >= 0 else len(reply)]
        question, mark, behind = line.partition("?")
        is_answered = bool(mark) and (end >= 0 or bool(behind.strip()))
        is_question = is_answered and len(_WORD.findall(question)) >= _NUM_QUESTION_WORDS
        is_new = bool(line) and _plain(question if is_question else line) not in asked
        if is_new and (label is not None or is_question or _opening(line) in openings):
            return True
    return False


def _end_of_answer(reply: str, answer: str | None) -> int | None:
    """Return where the first answer of a reply ends, None where it gives none."""
    found = [_ANSWERED.search(reply), _BARE_NUMBER.match(reply)]
    if answer and len(answer) <= _MAX_ANSWER_CHARS:
        # Where a sentence ends with it: inside one it may be a number on the way.
        found.append(re.search(rf"(?<!\w){re.escape(answer)}(?!\w)\W{{0,2}}(?=\n|$|(?<=[.!])\s)", reply))
    return min((match.end() for match in found if match is not None), default=None)


def _opening(line: str) -> tuple[str, ...]:
    """Return the words that a line begins with, numbers as one word; none of a short line."""
    words = ["0" if word.isdigit() else word.casefold() for word in _WORD.findall(line[:_MAX_ANSWER_CHARS])]
    return tuple(words[:_NUM_OPENING_WORDS]) if len(words) >= _NUM_OPENING_WORDS else ()


def _plain(text: str) -> str:
    """Return a text without white space and case: 'What is 3+4' is in 'what is 3 + 4?'."""
    return "".join(text.casefold().split())
