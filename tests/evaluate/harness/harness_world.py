"""Jobs over the rows of these tests, and what lm-eval makes of recorded replies to them."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from strop.evaluate.harness import GENERATING, LM_EVAL, PROTOCOLS, HarnessJob
from strop.evaluate.harness.result import HarnessOutput, read_output
from strop.evaluate.harness.run import (
    harness_command,
    harness_variables,
    stage_rows,
    write_code_metric,
    write_task_files,
)
from strop.rollout import Example, Split
from strop.run.inference import read_setup
from strop.spec import TaskSpec
from strop.tasks import build_task
from tests.evaluate.harness.harness_replies import (
    FORMULA_FORMS,
    HUMANEVAL_FORMS,
    MBPP_FORMS,
    NUMBER_FORMS,
    code_reply,
    instruction_cases,
)
from tests.evaluate.harness.harness_rows import write_data
from tests.fixtures.sandboxed import best_level

NUM_ROWS = 210
"""Held-out rows of every task; 7 subjects of 30 rows. ifeval has more, one for each of its replies."""


def make_spec(name: str, data: Mapping[str, Path], **settings: str) -> TaskSpec:
    """Return the section of the task behind one of the harness's, on our data."""
    protocol = PROTOCOLS[name]
    words = [f"task.source={data[protocol.own_task]}"]
    if protocol.runs_code:
        words.append(f"task.min_isolation={best_level()}")
    words += [f"task.{key}={value}" for key, value in settings.items()]
    spec = read_setup(protocol.own_task, words, Split.HELD_OUT).spec.task
    return spec.model_copy(update=dict(protocol.own_settings))


def make_job(name: str, data: Mapping[str, Path], model_path: Path, **changes: Any) -> HarnessJob:
    fields: dict[str, Any] = {
        "protocol": PROTOCOLS[name],
        "task": build_task(make_spec(name, data)),
        "model_path": model_path,
        "model_digest": "m",
        "step": 0,
        "dtype": "float32",
        "max_positions": 65536,
        "num_examples": None,
    }
    return HarnessJob(**(fields | changes))


@dataclass(frozen=True, kw_only=True)
class RecordedRun:
    """What the harness made of recorded replies."""

    job: HarnessJob
    output: HarnessOutput
    samples: Sequence[Mapping[str, Any]]
    shown: Mapping[str, Sequence[Mapping[str, Any]]]
    """The examples that task files show, by the harness's name of the task, in the harness's columns."""

    def verdicts(self, metric: str, filter_name: str = "none") -> dict[str, Any]:
        """Return the harness's verdict of each example."""
        return {row["doc"]["example_id"]: row[metric] for row in self.samples if row["filter"] == filter_name}

    @property
    def replies(self) -> dict[str, str]:
        """Return what was judged, as the harness stored it."""
        return {row["doc"]["example_id"]: row["resps"][0][0] for row in self.samples}

    @property
    def prompts(self) -> dict[str, str]:
        return {row["doc"]["example_id"]: row["arguments"]["gen_args_0"]["arg_0"] for row in self.samples}


@dataclass(frozen=True, kw_only=True)
class Recording:
    """All that one process of the harness said."""

    verdicts: Mapping[str, RecordedRun]
    """By the harness's task, with its own number of shown examples."""
    prompts: Mapping[tuple[str, int], RecordedRun]
    """By task and number of shown examples; nothing is judged in those that are not in `verdicts`."""


@dataclass(frozen=True, kw_only=True)
class _Wish:
    """One run of the harness."""

    job: HarnessJob
    replies: Mapping[str, str]
    """By example id. Without any, prompts are written and nothing is judged."""
    work_dir: Path

    def stage(self, python: Path) -> tuple[dict[str, Any], list[str]]:
        """Write what the harness is given; return its run, and the names of its tasks."""
        self.work_dir.mkdir()
        stage_rows(self.job, self.work_dir)
        names = write_task_files(self.job.protocol, self.work_dir, LM_EVAL.path)
        write_code_metric(self.work_dir)
        _be_patient(self.work_dir / "code_eval" / "program.py")
        replies_path = self.work_dir / "replies.json"
        replies_path.write_text(json.dumps(self.replies), encoding="utf-8")
        words = harness_command(self.job, self.work_dir)[2:]
        words[words.index("--model") + 1] = "recorded"
        words[words.index("--model_args") + 1] = json.dumps({"path": str(replies_path)})
        words += [] if self.replies else ["--predict_only"]
        return {"arguments": words, "cwd": str(self.work_dir)}, names


def _be_patient(path: Path) -> None:
    """Give the programs that have an end a minute: an interpreter starts late on a busy machine."""
    text, limited = path.read_text(encoding="utf-8"), "_wait(child.pid, limit_s)"
    assert text.count(limited) == 1
    patient = "_wait(child.pid, limit_s if 'while True' in program else 60.0)"
    path.write_text(text.replace(limited, patient), encoding="utf-8")


def record(folder: Path, model_path: Path, python: Path, human_eval: str) -> Recording:
    """Run every protocol over our rows and replies in one process of the harness.

    Asked are the prompts with the protocol's number of shown examples and with none. `human_eval`: source
    of the published problems, which are asked beside ours under the name 'published'.
    """
    cases = instruction_cases()
    data = write_data(folder / "data", num_rows=NUM_ROWS, calls=[calls for calls, _ in cases])
    wishes: dict[tuple[str, int | str], _Wish] = {}
    for name, protocol in GENERATING.items():
        job = make_job(name, data, model_path)
        replies = write_replies(job, [reply for _, reply in cases])
        judged = replace(job, num_examples=len(replies))
        wishes[name, "judged"] = _Wish(job=judged, replies=replies, work_dir=folder / f"{name}-judged")
        for num_fewshot in {protocol.num_fewshot, 0}:
            if num_fewshot == protocol.num_fewshot and len(replies) == len(job.examples):
                continue
            asked = replace(job, protocol=replace(protocol, num_fewshot=num_fewshot))
            work_dir = folder / f"{name}-{num_fewshot}"
            wishes[name, num_fewshot] = _Wish(job=asked, replies={}, work_dir=work_dir)
    published = make_job("humaneval", data | {"humaneval": Path(human_eval)}, model_path)
    wishes["humaneval", "published"] = _Wish(job=published, replies={}, work_dir=folder / "published")
    staged = {key: wish.stage(python) for key, wish in wishes.items()}
    shown = _run([run for run, _ in staged.values()], folder, python, published)
    runs = {key: _read(wishes[key], names, shown) for key, (_, names) in staged.items()}
    verdicts = {str(name): run for (name, kind), run in runs.items() if kind == "judged"}
    prompts = {(name, kind): run for (name, kind), run in runs.items() if isinstance(kind, int)}
    for name, run in verdicts.items():
        prompts.setdefault((name, PROTOCOLS[name].num_fewshot), run)
    prompts["published", 0] = runs["humaneval", "published"]
    return Recording(verdicts=verdicts, prompts=prompts)


def write_replies(job: HarnessJob, instructed: Sequence[str]) -> dict[str, str]:
    """Return a reply for each example, or for the first ones where a verdict takes long, by example id.

    Of code each form once; else all forms in turn. `instructed`: the replies to ifeval's rows.
    """
    own_task, examples = job.protocol.own_task, job.examples
    forms: Sequence[str]
    if own_task == "ifeval":
        replies = list(instructed)
    elif job.protocol.runs_code:
        forms = MBPP_FORMS if own_task == "mbpp" else HUMANEVAL_FORMS
        replies = [_fill_code(form, example) for form, example in zip(forms, examples, strict=False)]
    else:
        forms = NUMBER_FORMS if own_task == "gsm8k" else FORMULA_FORMS
        replies = [
            forms[number % len(forms)].format(*[example.answer] * 3)
            for number, example in enumerate(examples)
        ]
    return {example.example_id: reply for example, reply in zip(examples, replies, strict=False)}


def _fill_code(form: str, example: Example) -> str:
    name = example.fields["names"][0] if example.task == "mbpp" else example.fields["entry_point"]
    number = int(name.removeprefix("times").removeprefix("add"))
    return code_reply(form, (example.answer or "").rstrip("\n"), name, number)


def _run(
    runs: Sequence[Mapping[str, Any]], folder: Path, python: Path, any_job: HarnessJob
) -> Mapping[str, Any]:
    """Run the harness; return the examples that its task files show."""
    (folder / "runs.json").write_text(json.dumps(runs), encoding="utf-8")
    script = Path(__file__).with_name("recorded_replies.py")
    command = [str(python), str(script), str(folder / "runs.json"), str(folder / "shown.json")]
    done = subprocess.run(
        command,
        env=harness_variables(any_job, folder),
        capture_output=True,
        text=True,
        check=False,
        errors="replace",
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found: Mapping[str, Any] = json.loads((folder / "shown.json").read_bytes())
    return found


def _read(wish: _Wish, names: list[str], shown: Mapping[str, Any]) -> RecordedRun:
    output = read_output(wish.job, wish.work_dir / "out", names, "d")
    samples = [json.loads(line) for line in output.samples.splitlines()]
    return RecordedRun(job=wish.job, output=output, samples=samples, shown=shown)
