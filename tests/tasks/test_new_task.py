"""A built-in task is one file: dropped into the room, it is listed, explained, planned, posed and judged."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

DOUBLING = '''
"""Twice a number."""

from typing import Literal

from pydantic import Field

from strop.rollout import Message, make_example
from strop.spec.task import TaskSection
from strop.tasks.contract import TaskLimits, right_or_wrong
from strop.tasks.registry import built_in


class DoublingSpec(TaskSection):
    """Doubling of whole numbers."""

    name: Literal["doubling"]
    num_train: int = Field(default=8, ge=1, description="Numbers to train on.")
    num_held_out: int = Field(default=4, ge=1, description="Numbers to evaluate on.")


@built_in(
    "doubling", DoublingSpec,
    "What is twice a number?"
    " Needs no data.",
)
class Doubling:
    name = "doubling"
    version = "1"
    limits = TaskLimits(max_reply_tokens=8)

    def __init__(self, spec):
        self._spec = spec

    def examples(self, split):
        size = self._spec.num_train if split == "train" else self._spec.num_held_out
        first = 0 if split == "train" else 1000
        numbers = range(first, first + size)
        return [make_example("doubling", {"n": n}, answer=str(2 * n)) for n in numbers]

    def render(self, example):
        return (Message(role="user", content=f"Twice {example.fields['n']}?"),)

    def verify(self, example, text):
        return right_or_wrong(text == example.answer, format_ok=True, extracted=text)

    def gold_replies(self, example):
        return (example.answer,)

    def wrong_replies(self, example):
        return ("x",)
'''


PROGRAM = """
import io, json, sys
from contextlib import redirect_stdout
import strop.tasks
strop.tasks.__path__.append(sys.argv[1])
from strop.cli import main
from strop.rollout import Split
from strop.spec import load_spec

def says(*words):
    with redirect_stdout(io.StringIO()) as said:
        assert main(list(words)) == 0
    return said.getvalue()

task = strop.tasks.build_task(load_spec("run.toml").spec.task)
example = task.examples(Split.TRAIN)[1]
print(json.dumps({
    "listed": json.loads(says("tasks", "ls", "--json")),
    "names": says("explain", "task.name"),
    "origin": says("explain", "task.num_train", "run.toml"),
    "plan": json.loads(says("plan", "run.toml", "--json")),
    "rewards": [task.verify(example, text).reward for text in "23"],
}))
"""


def run_fresh(*words: str, cwd: Path) -> str:
    ended = subprocess.run([sys.executable, *words], cwd=cwd, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def test_a_file_with_a_task_is_all_that_a_new_one_needs(tmp_path: Path, tiny_model_dir: Path) -> None:
    (tmp_path / "room" / "family").mkdir(parents=True)
    (tmp_path / "room" / "family" / "doubling.py").write_text(DOUBLING)
    (tmp_path / "run.toml").write_text(
        f'name = "new"\n[model]\nuri = {json.dumps(str(tiny_model_dir))}\n[task]\n'
        'name = "doubling"\nnum_train = 6\n[train]\nprompts_per_step = 3\n'
    )
    said = json.loads(run_fresh("-c", PROGRAM, str(tmp_path / "room"), cwd=tmp_path))
    assert said["listed"]["doubling"] == "What is twice a number? Needs no data."
    assert "'doubling'" in said["names"]
    assert "run.toml:6" in said["origin"]
    assert said["plan"]["schedule"]["num_train_examples"] == 6
    assert "Twice " in json.dumps(said["plan"]["prompt"])
    assert said["rewards"] == [1.0, 0.0]


def test_a_run_file_imports_the_module_of_its_own_task_alone(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text('name = "one"\n[task]\nname = "gsm8k"\nsource = "./rows"\n')
    code = (
        "import sys; from strop.spec import load_spec, write_spec; write_spec(load_spec('run.toml'));"
        " print(*sorted(name for name in sys.modules if name.startswith('strop.tasks.')))"
    )
    loaded = run_fresh("-c", code, cwd=tmp_path).split()
    assert "strop.tasks.mathematics.gsm8k" in loaded
    names = ("code", "generated.arithmetic", "instructions", "mixture", "llm_judge")
    assert not {f"strop.tasks.{name}" for name in names} & set(loaded)
