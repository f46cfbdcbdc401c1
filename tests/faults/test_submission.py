"""What a node would refuse is refused before the queue, and messages say what differs and what travels."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import pytest

from strop.audit import PROBE_IDS
from strop.errors import EXIT_DONE, EXIT_REFUSED, EXIT_USAGE
from strop.spec.train import AUDIT_PROBES
from tests.fixtures.commands import Run

LOCAL = ("--on", "local", "--no-snapshot")


def write_demonstrations(folder: Path, num_words: int) -> None:
    lines = [
        {
            "messages": [
                {"role": "user", "content": f"{n}?"},
                {"role": "assistant", "content": "a " * num_words},
            ]
        }
        for n in range(6)
    ]
    (folder / "demos.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


@pytest.mark.parametrize("command", ["submit", "submit --check", "plan", "train"])
@pytest.mark.parametrize(
    ("words", "shown"),
    [
        (("train.accept=weihgts: toy",), ("weihgts", "weights")),
        (("train.accept=audit.gould: toy",), ("audit.gould", "audit.gold")),
        (("eval.num_examples=5000",), ("eval.num_examples", "5000", "100")),
        (("train.terms=sft", "sft.source=demos.jsonl"), ("demos.jsonl", "6 of 6")),
    ],
)
def test_refused_on_the_node_is_refused_here(
    folder: Path, run: Run, command: str, words: tuple[str, ...], shown: tuple[str, ...]
) -> None:
    """Misspelt checks, too many examples and too long demonstrations were refused only on the node."""
    write_demonstrations(folder, num_words=5000)
    name, *option = command.split()
    ended = run(name, "run.toml", *option, *words, *(LOCAL if name == "submit" else ()))
    assert ended.code == EXIT_USAGE
    assert all(text in ended.err for text in shown), ended.err
    assert not list(folder.glob("runs/*"))


def test_every_probe_can_be_accepted() -> None:
    """A misspelt probe was found only on the node: names of probes are checked as a file is read."""
    assert set(PROBE_IDS) == set(AUDIT_PROBES)


def test_gpus_for_no_environments_are_refused(folder: Path, run: Run) -> None:
    """A task without environments was given GPUs for them."""
    ended = run("submit", "run.toml", "job.env_gpus=1", "job.gpus=1", *LOCAL)
    assert ended.code == EXIT_USAGE
    assert "job.env_gpus=1" in ended.err


def test_two_names_are_a_conflict(folder: Path, run: Run) -> None:
    """Of `name=foo --job-name bar` one was dropped without a word."""
    ended = run("submit", "run.toml", "name=foo", "--job-name", "bar", "--dry-run", *LOCAL)
    assert ended.code == EXIT_USAGE
    assert "--job-name together with name=" in ended.err


@pytest.mark.parametrize("device", ["MIG-11111111-2222-3333-4444-555555555555", "GPU-11111111"])
def test_absent_device_is_refused(
    folder: Path, run: Run, monkeypatch: pytest.MonkeyPatch, device: str
) -> None:
    """A run whose CUDA_VISIBLE_DEVICES names a slice that does not exist computed on the processor."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", device)
    ended = run("train", "run.toml")
    assert ended.code in (EXIT_REFUSED, EXIT_USAGE)
    assert device in ended.err


def test_dry_run_shows_what_would_be_submitted(folder: Path, run: Run) -> None:
    """`--dry-run` without --output-dir wrote and showed nothing."""
    ended = run("submit", "run.toml", "optimizer.lr=0.125", "--dry-run", *LOCAL)
    assert ended.code == EXIT_DONE
    assert "lr = 0.125" in ended.out
    assert "strop.cli train" in ended.out
    assert not list(folder.glob("runs/*"))


def test_removed_setting_of_a_site_has_its_default(folder: Path, run: Run) -> None:
    """`site.secrets=none` was refused as an invalid tuple."""
    (folder / "strop-sites.toml").write_text(
        '[sites.here]\nbackend = "local"\nsecrets = ["MY_TOKEN"]\n[sites.here.env]\nMY_WORD = "1"\n'
    )
    words = ("submit", "run.toml", "--on", "here", "--no-snapshot", "--dry-run", "--json")
    assert run(*words).code == EXIT_USAGE
    ended = run(*words, "site.secrets=none", "site.env=none")
    assert ended.code == EXIT_DONE
    plan = json.loads(ended.out)
    assert (plan["profile"]["secrets"], plan["profile"]["env"]) == ([], {})


def test_plan_shows_short_steps(folder: Path, run: Run) -> None:
    """The plan of a small model printed a step of `0.0 s ()`."""
    ended = run("plan", "run.toml")
    assert ended.code == EXIT_DONE
    assert "()" not in ended.out
    assert "0.0 s" not in ended.out


def sleeping_job(folder: Path) -> tuple[str, ...]:
    """Return the words of a job that a site's interpreter lets end at once."""
    (folder / "strop-sites.toml").write_text(
        f'[sites.here]\nbackend = "local"\npython = "{sys.executable}"\n'
    )
    return ("submit", "run.toml", "--on", "here", "--no-snapshot", "job.preflight=none")


@pytest.mark.slow
def test_other_plan_is_named(folder: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of another plan of the same name the refusal showed two hashes."""
    words = sleeping_job(folder)
    monkeypatch.setenv("MY_WORD", "one")
    assert run(*words, "--env", "MY_WORD").code == EXIT_DONE
    for changed, shown in (
        (("optimizer.lr=0.125",), ("optimizer.lr", "0.125", "1e-05")),
        (("job.max_requeue=1",), ("job.max_requeue", "1 here")),
        (("seed=7",), ("seed", "7 here")),
    ):
        ended = run(*words, "--env", "MY_WORD", *changed)
        assert ended.code == EXIT_REFUSED
        assert all(text in ended.err for text in shown), ended.err
        assert "roles" not in ended.err
    monkeypatch.setenv("MY_WORD", "two")
    ended = run(*words, "--env", "MY_WORD")
    assert ended.code == EXIT_REFUSED
    assert "variables.MY_WORD" in ended.err
    assert "one" not in ended.err.split("MY_WORD", 1)[1].split(".")[0]
    run("cancel", "tiny")


@pytest.mark.slow
def test_only_named_variables_travel(folder: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every variable of the login shell, keys among them, reached trainer and judges."""
    seen = folder / "seen.json"
    reward = "import json, os\ndef score(reply, answer):\n    return 0.0\n"
    reward += f"with open({str(seen)!r}, 'w') as file:\n    json.dump(dict(os.environ), file)\n"
    (folder / "reward.py").write_text(reward)
    rows = [{"question": f"{n}?", "answer": str(n)} for n in range(40)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    task = (
        *("task.name=rows", "task.source=rows.jsonl", "task.prompt=question", "task.answer=answer"),
        *("task.reward=reward.py:score", "task.max_reply_tokens=8", "eval.num_examples=1"),
    )
    words = sleeping_job(folder)
    for name in ("WANDB_API_KEY", "MY_UNDECLARED", "OPENAI_API_KEY", "MY_WORD", "MY_TOKEN"):
        monkeypatch.setenv(name, f"value of {name}")
    monkeypatch.setenv("LANG", "C.UTF-8")
    ended = run(*words, *task, "--env", "MY_WORD", "--env", "MY_TOKEN")
    assert ended.code == EXIT_DONE, ended.err
    assert "MY_WORD" in ended.err
    assert "MY_TOKEN (secret)" in ended.err
    # The submission itself looks at the reward too.
    seen.unlink(missing_ok=True)
    deadline = time.monotonic() + 240.0
    while not (seen.exists() and "STROP_ATTEMPT" in (text := seen.read_text()) and text.endswith("}")):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    found = json.loads(text)
    run("cancel", "tiny")
    assert not {"WANDB_API_KEY", "MY_UNDECLARED", "OPENAI_API_KEY"} & found.keys()
    assert found["MY_WORD"] == os.environ["MY_WORD"]
    assert found["MY_TOKEN"] == os.environ["MY_TOKEN"]
    assert found["LANG"] == "C.UTF-8"
