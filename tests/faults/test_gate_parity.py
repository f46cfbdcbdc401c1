"""The gate refused environments of several turns, and agents with several conversations, as unequal engines.

A reply was weighed behind the first prompt of its attempt, not behind what the engine was given before it.
"""

from __future__ import annotations

import json
import string
import sys
from pathlib import Path

import pytest

from strop.record import RunDir
from tests.fixtures.commands import Run

WORLD = """
class Talk:
    max_turns = 8

    def examples(self, split):
        return [{"goal": number + 100 * (split == "train")} for number in range(1, 21)]

    def reset(self, example, seed):
        return f"Count to {example.fields['goal']}."

    def step(self, text):
        return "A wholly different matter: name rivers, lakes, seas; be as brief as you can."

    def score(self):
        return 0.5
"""
AGENT = """
import json, os, sys, urllib.request

def ask(*messages):
    request = urllib.request.Request(
        os.environ["OPENAI_BASE_URL"] + "/chat/completions",
        json.dumps({"model": "m", "messages": messages}).encode(),
        {"authorization": "Bearer " + os.environ["OPENAI_API_KEY"]},
    )
    return json.load(urllib.request.urlopen(request))["choices"][0]["message"]["content"]

first = ask(*json.load(sys.stdin)["messages"])
summed = ask({"role": "system", "content": "Sum up what others say."}, {"role": "user", "content": first})
print(ask({"role": "user", "content": "Which one is right? " + summed}))
"""
# Every mark ends a reply: a random model would talk until its limit, which ends the attempt.
MARKS = string.ascii_letters + string.digits + string.punctuation
SETTINGS = {
    "turns": 'name = "world.py:Talk"\nmax_reply_tokens = 24\nstop = ' + json.dumps([*MARKS]),
    "conversations": 'name = "arithmetic"\nmax_reply_tokens = 12\nagent = '
    + json.dumps(f"'{sys.executable}' agent.py"),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", SETTINGS)
def test_replies_are_weighed_behind_what_the_engine_was_given(folder: Path, run: Run, kind: str) -> None:
    (folder / "world.py").write_text(WORLD)
    (folder / "agent.py").write_text(AGENT)
    text = (folder / "run.toml").read_text().replace('name = "arithmetic"', SETTINGS[kind])
    text = text.replace("steps = 2", "steps = 1").replace('test"', 'test; audit: any"')
    text = text.replace("num_examples = 4\nnum_samples = 2", 'num_examples = 1\nnum_samples = "none"')
    (folder / "run.toml").write_text(text + "[sampling]\ntemperature = 0.4\n")
    ended = run("train", "run.toml")
    assert ended.code == 0, ended.err
    (state,) = folder.glob("runs/*/run.json")
    assert "prefix_break" not in [event.cause for event in RunDir.open(state.parent).events.read()]
