"""Examples of README.md and docs/ could not be trained, or named commands and settings that are not there.

The programs of README.md, environments.md and tasks.md are run here; those of other pages say why not.
"""

from __future__ import annotations

import io
import json
import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import pytest
import typer

from strop.cli.program import app
from strop.launch.sites import PROJECT_FILE, find_site
from strop.spec import load_spec
from tests.fixtures.commands import Run
from tests.fixtures.recipes import ROOT

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.DOTALL | re.MULTILINE)


@dataclass(frozen=True)
class Example:
    page: str
    line: int
    language: str
    text: str


EXAMPLES = [
    Example(page.name, page.read_text()[: found.start()].count("\n") + 1, found[1], found[2])
    for page in PAGES
    for found in FENCE.finditer(page.read_text())
]


def examples(*languages: str) -> pytest.MarkDecorator:
    """Parametrize over the examples in some languages."""
    chosen = [one for one in EXAMPLES if one.language in languages]
    return pytest.mark.parametrize("example", chosen, ids=lambda one: f"{one.page}:{one.line}")


def code(page: str, word: str, language: str = "python") -> str:
    """Return the program or settings of a page that have a word."""
    (text,) = (
        one.text for one in EXAMPLES if (one.page, one.language) == (page, language) and word in one.text
    )
    return text


@examples("toml")
def test_settings_that_a_page_shows_are_read(example: Example, folder: Path, run: Run) -> None:
    text = example.text
    if "[sites." in text:
        (folder / PROJECT_FILE).write_text(text)
        find_site(re.findall(r"\[sites\.(\w+)\]", text)[0], folder, {})
        return
    if "bf16_tflops" in text:
        (folder / "device.toml").write_text(text)
        ended = run("plan", "run.toml", "--hardware", "device.toml")
        assert ended.code == 0, ended.err
        return
    head = "" if re.search(r"^name", text.partition("[")[0], re.MULTILINE) else 'name = "shown"\n'
    head += "" if "model.uri" in text else f'model.uri = "{folder}"\n'
    if not re.search(r"^(\[task|\[environment|task\.)", text, re.MULTILINE):
        head += 'task.name = "arithmetic"\n'
    path = folder / "shown.toml"
    path.write_text(head + text)
    load_spec(path)


def commands_of(text: str) -> list[list[str]]:
    """Return the words of each command of strop's, without those of the shell."""
    lines = [line.strip().removeprefix("$ ") for line in text.replace("\\\n", " ").splitlines()]
    found = []
    for line in lines:
        line = line.rpartition("| ")[2]
        if line.startswith("strop ") and '"SELECT' not in line:
            plain = re.sub(r"\[(-[^]]*)\]", r"\1", line)
            found.append([word for word in shlex.split(plain, comments=True)[1:] if not word.startswith("[")])
    return found


@examples("", "console", "bash")
def test_commands_that_a_page_shows_exist(example: Example) -> None:
    for words in commands_of(example.text):
        parse(words)


def parse(words: Sequence[str]) -> None:
    """Parse a command of strop's as its program does. Raises: click's error for an unknown option."""
    command: Any = typer.main.get_command(app)
    rest = list(words)
    context = click.Context(command, info_name="strop")
    while isinstance(command, click.Group):
        name = rest.pop(0)
        command = command.get_command(context, name)
        assert command is not None, words
    command.make_context(words[0], rest, parent=context)


RUN = """name = "shown"
[model]
uri = "{model}"
dtype = "float32"
{task}
[train]
steps = 1
prompts_per_step = 1
group_size = 2
accept = "weights: random; audit: beside the point; parity: few tokens of a random model"
[eval]
num_examples = 1
num_samples = "none"
[placement]
threads = 1
"""
ROWS = [{"question": f"Is {n} A, B, C or D? Say it.", "answer": "ABCD"[n % 4]} for n in range(20)]


PYTHON = sys.executable
CLASS = '[task]\nname = "own.py:{}"\n'
SHOWN = {
    "README.md rows": ("reward.py", code("README.md", "def score"), code("README.md", '"rows"', "toml")),
    "README.md class": ("own.py", code("README.md", "class Doubling"), CLASS.format("Doubling")),
    "tasks.md rows": (
        "reward.py",
        code("tasks.md", "splitlines"),
        code("tasks.md", '"questions.jsonl" ', "toml"),
    ),
    "tasks.md class": (
        "my_task.py",
        code("tasks.md", "class Doubling"),
        code("tasks.md", "my_task.py", "toml"),
    ),
    "environments.md tools": ("own.py", code("environments.md", "Counting"), CLASS.format("Counting")),
    "environments.md agent": (
        "agent.py",
        code("environments.md", "Is that right?"),
        f'[task]\nname = "arithmetic"\nmax_value = 3\nnum_held_out = 8\nagent = "{PYTHON} agent.py"\n',
    ),
}


@pytest.mark.slow
@pytest.mark.usefixtures("few_attempts")
@pytest.mark.parametrize("name", SHOWN)
def test_an_example_is_trained_evaluated_and_sampled(
    name: str, run: Run, folder: Path, roomy_model_dir: Path
) -> None:
    file, text, task = SHOWN[name]
    (folder / file).write_text(text)
    (folder / "questions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    task += "max_reply_tokens = 8\n"
    (folder / "run.toml").write_text(RUN.format(model=roomy_model_dir, task=task))
    ended = run("train", "run.toml")
    assert ended.code == 0, ended.err
    (metrics,) = (folder / "runs").glob("*/metrics.jsonl")
    assert json.loads(metrics.read_text())["failed_frac"] == 0.0
    if "agent" in task:
        return
    spec = load_spec("run.toml").spec.task.model_dump(mode="json", exclude_defaults=True)
    words = [f"{key}={json.dumps(value)}" for key, value in spec.items() if key != "name"]
    which = ("--task", spec.get("name", "arithmetic"), *words, "model.dtype=float32")
    measured = run("eval", roomy_model_dir, *which, "--split", "held_out", "--limit", "1", "--out", "evals")
    assert measured.code in (0, 76), measured.err
    (result,) = (json.loads(path.read_text()) for path in (folder / "evals").glob("*.json"))
    assert result["greedy"]["num_unscored"] == 0
    shown = run("sample", roomy_model_dir, *which, "num=1")
    assert shown.code == 0, shown.err


def test_the_workspace_of_the_page_pays_for_the_repair_alone(
    run: Run, folder: Path, bubblewrap: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "repair.py").write_text(code("environments.md", "class Repair"))
    right = "def total(numbers):\\n    return sum(numbers)\\n"
    for lines, score in ((f'/bash command=printf "{right}" > total.py\n/submit\n', 1), ("/submit\n", 0)):
        monkeypatch.setattr(sys, "stdin", io.StringIO(lines))
        ended = run("envs", "run", "repair.py:Repair")
        assert ended.code == 0, ended.err
        assert f"score: {score}, " in ended.out


@pytest.mark.slow
@pytest.mark.parametrize("page", ["README.md", "tasks.md"])
def test_a_training_from_python_works_as_the_page_shows_it(
    page: str, folder: Path, tiny_model_dir: Path
) -> None:
    text = re.sub(
        r'"[^"]*(SmolLM2-135M-Instruct|smollm2==0.1.2)"', f'"{tiny_model_dir}"', code(page, "strop.train")
    )
    small = '{"steps": 1, "prompts_per_step": 2, "group_size": 2, "accept": "weights: random"}, '
    small += 'eval={"num_examples": 1, "num_samples": "none"}, placement={"threads": 1}'
    (folder / "first.py").write_text(
        text.replace('{"steps": 20}', small).replace('tokens": 32', 'tokens": 8')
    )
    done = subprocess.run([sys.executable, "first.py"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    path = Path(done.stdout.splitlines()[-1].split()[0])
    assert json.loads((path / "metrics.jsonl").read_text())["failed_frac"] == 0.0
