"""Small research tasks with known optima, which need no data: a file is there, and is to become better.

The work is one file. Data is scored here; a program is run in the grader's sandbox for given arguments, and
what it answers is scored here as data, so nothing that it prints, writes or patches earns anything else.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import car
import people
import symbols
from instance import Instance

from strop.environments import ToolError, Workspace
from strop.tasks import TaskLimits

TASKS = {"car": car, "people": people, "symbols": symbols}
FIRST_TRAINED = 1_000_000
"""Number of the first instance to train on; held-out ones begin with 0."""
MAX_BYTES = 100_000
ANSWER = """
import json, sys
names = {"__name__": "artefact"}
exec(open(sys.argv[1]).read(), names)
print(json.dumps([names["act"](*arguments) for arguments in json.load(sys.stdin)]))
"""


@dataclass
class Settings:
    """The settings of the run file."""

    tasks: tuple[str, ...] = tuple(TASKS)
    """Which take turns."""
    num_evaluations: int = 5
    """How often an attempt may score its work on hidden development data."""
    num_instances: int = 20
    """Of each task, to train on; a tenth as many are held out."""


@lru_cache(maxsize=64)
def instance_of(task: str, number: int) -> Instance:
    """Make an instance, or return it from the cache: a group's attempts share one."""
    return TASKS[task].make(number)


class Research(Workspace):
    """Improve a file. Reward: 0 for its first version, 1 for the best known work."""

    max_turns = 20
    limits = TaskLimits(max_reply_tokens=2048)

    def __init__(self, settings: Settings) -> None:
        if unknown := sorted({*settings.tasks} - {*TASKS}):
            raise ValueError(f"there is no task {unknown[0]}; there are {', '.join(TASKS)}")
        self.settings = settings
        self.num_left = settings.num_evaluations

    def examples(self, split: str) -> list[dict[str, object]]:
        """Return instances, the tasks taking turns."""
        tasks, num = self.settings.tasks, self.settings.num_instances
        first, num = (FIRST_TRAINED, num) if split == "train" else (0, max(1, num // 10))
        count = num * len(tasks)
        return [{"task": tasks[n % len(tasks)], "number": first + n // len(tasks)} for n in range(count)]

    @property
    def instance(self) -> Instance:
        """What this attempt works on."""
        return instance_of(self.example.fields["task"], self.example.fields["number"])

    def opening(self, example: Any, seed: int) -> str:
        """Return the task, and the rules of an attempt."""
        task = TASKS[example.fields["task"]]
        return (
            f"{task.STATEMENT}\n\n{task.ARTEFACT} is there already, and is to become better. Work"
            " with the tools; Python has its standard library, and there is no network. evaluate scores the"
            f" file on hidden development data, up to {self.settings.num_evaluations} times. submit ends the"
            " work, and the file alone is then scored on other hidden data."
        )

    async def prepare(self, example: Any, seed: int) -> None:
        """Write the files of the instance."""
        self.carried = (TASKS[example.fields["task"]].ARTEFACT,)
        for path, text in self.instance.files.items():
            await self.sandbox.write(path, text.encode())

    async def evaluate(self) -> str:
        """Score the file as it is, on hidden development data; the number of evaluations is limited."""
        if not self.num_left:
            raise ToolError("no evaluation is left")
        self.num_left -= 1
        try:
            score = await self._score(self.sandbox, "dev")
        except ValueError as error:
            raise ToolError(f"{error} ({self.num_left} evaluations left)") from error
        return f"The score is {score:.3f}; higher is better. {self.num_left} evaluations left."

    async def grade(self, sandbox: Any) -> float:
        """Score the file on the final draws, as a share of the way from its first version to the best one."""
        instance = self.instance
        try:
            score = await self._score(sandbox, "final")
        except ValueError:
            return 0.0
        progress = (score - instance.first_score) / (instance.best_score - instance.first_score)
        # More than honest work can have stays above full marks: strop takes it for a leak and never pays.
        return min(1.0, max(0.0, progress)) if score <= instance.limit else progress

    async def _score(self, sandbox: Any, phase: str) -> float:
        """Score the file as it is in a sandbox. Raises: ValueError if it cannot be scored."""
        (path,), questions = self.carried, self.instance.questions
        program = [*sandbox.python_argv, "-I", "-c", ANSWER, path]
        result = await sandbox.exec(
            ["head", "-c", str(MAX_BYTES), path] if questions is None else program,
            stdin=json.dumps(questions or []).encode(),
            wall_limit_s=10,
        )
        if result.exit_code:
            said = result.stderr.decode(errors="replace").strip().rpartition("\n")[2]
            raise ValueError(f"{path} cannot be scored: {said[:200]}")
        return self.instance.score(result.stdout.decode(errors="replace"), phase)

    def gold_replies(self, example: Any) -> list[list[str]]:
        """Return the best known work."""
        task, number = example.fields["task"], example.fields["number"]
        work = {"path": TASKS[task].ARTEFACT, "text": instance_of(task, number).best}
        calls = [("create", work), ("submit", {})]
        named = [json.dumps({"name": name, "arguments": arguments}) for name, arguments in calls]
        return [[f"```tool_call\n{call}\n```" for call in named]]
