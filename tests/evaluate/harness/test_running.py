"""What lm-eval is told and what is read of it, with a program that stands for it."""

from __future__ import annotations

import csv
import hashlib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from strop.cli import main
from strop.evaluate.harness import LM_EVAL, PROTOCOLS, HarnessResult
from strop.store.python_environment import STAMP_NAME
from tests.fixtures.tiny_model import tiny_model

# Writes what it was told, and the results that the test made.
PROGRAM = """import json, os, sys
from pathlib import Path
here = Path(__file__).parent
words = sys.argv[2:]
told = {"words": words, "offline": os.environ.get("HF_HUB_OFFLINE"), "cwd": os.getcwd()}
told["rows"] = os.environ.get("HF_DATASETS_CACHE")
(here / "told.json").write_text(json.dumps(told))
made = json.loads((here / "made.json").read_text())
out = Path(words[words.index("--output_path") + 1]) / "model"
out.mkdir()
for name, text in made["files"].items():
    (out / name).write_text(text)
Path(os.environ["STROP_HARNESS_ENDS"]).write_text(made["ends"])
print(made["said"], flush=True)
sys.exit(made["code"])
"""
Edit = Callable[[dict[str, Any]], object]


def sample(name: str, number: int, settings: dict[str, Any]) -> dict[str, Any]:
    """Return a line of lm-eval's samples."""
    arguments = {"gen_args_0": {"arg_0": f"{name} {number}", "arg_1": settings}}
    return {"doc_id": number, "doc_hash": f"{name}{number}", "arguments": arguments, "resps": [["7"]]}


def key_of(line: dict[str, Any]) -> str:
    """Return lm-eval's key of a sample's request."""
    words = ["generate_until", *line["arguments"]["gen_args_0"].values()]
    return hashlib.sha256(json.dumps(words).encode()).hexdigest()


class Harness:
    """The program, and what it answers."""

    def __init__(self, folder: Path, model: Path) -> None:
        self.folder, self.model, self.out = folder, model, folder / "out"
        self.settings: dict[str, Any] = {"until": ["\n"], "max_gen_toks": 16}
        self.samples = {"hats": [sample("hats", number, self.settings) for number in range(4)]}
        metrics = {"exact_match,none": 0.5, "exact_match_stderr,none": 0.1, "alias": "x"}
        config = {"output_type": "generate_until", "generation_kwargs": self.settings}
        self.content: dict[str, Any] = {
            "results": {"hats": metrics},
            "configs": {"hats": config},
            "versions": {"hats": 1.0},
            "n-shot": {"hats": 2},
            "n-samples": {"hats": {"effective": 4}},
        }
        self.ends = [f"{key_of(line)} {number % 2}" for number, line in enumerate(self.samples["hats"])]
        self.code, self.said = 0, "done"

    def run(self, *words: str, task: str = "hats") -> int:
        """Evaluate; return the exit code."""
        files = {
            f"samples_{name}_x.jsonl": "".join(json.dumps(line) + "\n" for line in lines)
            for name, lines in self.samples.items()
        }
        files["results_x.json"] = json.dumps(self.content)
        made = {"files": files, "ends": "\n".join(self.ends), "code": self.code, "said": self.said}
        (self.folder / "made.json").write_text(json.dumps(made))
        asked = ["eval", str(self.model), "--harness", "lm-eval", "--task", task, "--out", str(self.out)]
        engine = () if any(word.startswith("harness.engine=") for word in words) else ("harness.engine=hf",)
        return main([*asked, *engine, *words])

    @property
    def result(self) -> HarnessResult:
        """The only result that was written."""
        (path,) = self.out.glob("*.json")
        return HarnessResult.model_validate_json(path.read_bytes())

    @property
    def told(self) -> dict[str, Any]:
        """What it was told."""
        found: dict[str, Any] = json.loads((self.folder / "told.json").read_text())
        return found

    def value_of(self, flag: str) -> str:
        """Return the last value of an option that it was told."""
        words = list(reversed(self.told["words"]))
        return str(words[words.index(flag) - 1])


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with room for every budget."""
    return tiny_model(tmp_path_factory.mktemp("model") / "model", max_position_embeddings=65536)


@pytest.fixture
def harness(tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> Harness:
    """A program in the place of lm-eval's interpreter."""
    monkeypatch.setenv("STROP_CACHE", str(tmp_path / "cache"))
    LM_EVAL.python.parent.mkdir(parents=True)
    (tmp_path / "program.py").write_text(PROGRAM)
    LM_EVAL.python.write_text(f'#!/bin/sh\nexec {sys.executable} {tmp_path / "program.py"} "$@"\n')
    LM_EVAL.python.chmod(0o755)
    (LM_EVAL.path / STAMP_NAME).write_text(json.dumps({"stamp": LM_EVAL.stamp}))
    return Harness(tmp_path, model)


def test_every_setting_is_handed_over(harness: Harness) -> None:
    words = (
        *("harness.num_few_shot=2", "harness.max_reply_tokens=9", "harness.max_model_tokens=48"),
        *("harness.seed=7", "model.dtype=float32", "harness.model_args=trust_remote_code=true"),
        'harness.arguments=["--fewshot_as_multiturn", "true", "--batch_size", "16"]',
        f"harness.include={harness.folder}",
    )
    assert harness.run("--limit", "4", *words) == 0
    for flag, value in (
        ("--tasks", "hats"),
        ("--num_fewshot", "2"),
        ("--gen_kwargs", "max_gen_toks=9"),
        ("--limit", "4"),
        ("--seed", "7"),
        ("--fewshot_as_multiturn", "true"),
        ("--batch_size", "16"),
        ("--include_path", str(harness.folder)),
    ):
        assert harness.value_of(flag) == value
    # Data sets below it go before the hub's, with the rows that they have now.
    assert harness.told["cwd"] == str(harness.folder)
    assert Path(harness.told["rows"]).is_relative_to(harness.out)
    given = json.loads(harness.value_of("--model_args"))
    assert given == {
        "pretrained": str(harness.model),
        "dtype": "float32",
        "max_length": 48,
        "trust_remote_code": "true",
    }
    # A score that was asked for otherwise says so.
    assert len(harness.result.arguments) == 4


@pytest.mark.parametrize("name", ["gsm8k", "mbpp", "mmlu"])
def test_published_conditions_are_the_defaults(name: str, harness: Harness) -> None:
    shots, budget = PROTOCOLS[name]
    harness.run("--confirm-run-unsafe-code", task=name)
    assert harness.value_of("--num_fewshot") == str(shots)
    assert ("--gen_kwargs" in harness.told["words"]) is (budget is not None)
    harness.run("--confirm-run-unsafe-code", "harness.num_few_shot=1", task=name)
    assert harness.value_of("--num_fewshot") == "1"


def test_any_task_is_asked_as_the_harness_has_it(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    assert harness.run() == 0
    words = harness.told["words"]
    assert not {"--num_fewshot", "--gen_kwargs", "--limit", "--include_path"} & set(words)
    assert harness.told["offline"] is None
    monkeypatch.setenv("STROP_OFFLINE", "1")
    assert harness.run("harness.seed=1") == 0
    assert harness.told["offline"] == "1"


def test_what_the_harness_says_is_read_and_kept(harness: Harness) -> None:
    assert harness.run() == 0
    result = harness.result
    assert {name: (one.value, one.stderr) for name, one in result.metrics.items()} == {
        "exact_match,none": (0.5, 0.1)
    }
    assert (result.num_examples, result.num_fewshot, result.max_reply_tokens) == (4, 2, 16)
    # Two of four by its ends.
    assert result.truncated_frac == 0.5
    assert (result.engine, result.stops, result.parts) == ("hf", ("\n",), {})
    # The same command again asks nobody.
    (harness.folder / "told.json").unlink()
    assert harness.run() == 0
    assert not (harness.folder / "told.json").exists()
    # Another evaluation stands beside it.
    assert harness.run("harness.seed=3") == 0
    assert len(list(harness.out.glob("*.json"))) == 2


def test_one_unknown_end_makes_the_share_unknown(harness: Harness) -> None:
    # Of a line that a kill left unfinished, and one that is not there.
    harness.ends = [*harness.ends[:2], harness.ends[2][:20]]
    assert harness.run() == 0
    assert harness.result.truncated_frac is None


def test_choices_are_cut_by_no_budget(harness: Harness) -> None:
    harness.content["configs"]["hats"] = {"output_type": "multiple_choice"}
    for line in harness.samples["hats"]:
        line["resps"] = [[["-1.5", "False"]], [["-2.5", "False"]]]
    assert harness.run() == 0
    assert (harness.result.max_reply_tokens, harness.result.truncated_frac) == (None, None)


def test_choices_without_log_probabilities_are_no_score(harness: Harness) -> None:
    """Taken as they come, each choice would be certain, and the first one chosen."""
    harness.content["configs"]["hats"] = {"output_type": "multiple_choice"}
    for line in harness.samples["hats"]:
        line["resps"] = [[["0.0", "True"]], [["0.0", "True"]]]
    assert harness.run() == 1
    assert not list(harness.out.glob("*.json"))


def test_a_group_has_its_parts(harness: Harness) -> None:
    harness.samples["caps"] = [sample("caps", 0, harness.settings)]
    for kind in ("results", "configs", "versions", "n-shot"):
        harness.content[kind]["caps"] = harness.content[kind]["hats"]
    harness.content["n-samples"]["caps"] = {"effective": 1}
    harness.content["results"]["both"] = {"exact_match,none": 0.25}
    harness.ends.append(f"{key_of(harness.samples['caps'][0])} 1")
    assert harness.run(task="both") == 0
    result = harness.result
    assert result.num_examples == 5
    assert result.truncated_frac == pytest.approx(3 / 5)
    assert result.metrics["exact_match,none"].value == 0.25
    assert {name: part.num_examples for name, part in result.parts.items()} == {"hats": 4, "caps": 1}


def test_prompts_that_the_harness_cut_are_counted(harness: Harness) -> None:
    long = "x" * 600
    harness.samples["hats"][0]["arguments"]["gen_args_0"]["arg_0"] = long
    assert harness.run("harness.max_model_tokens=512") == 0
    assert harness.result.num_cut_prompts == 1


@pytest.mark.parametrize(
    "edit",
    [
        lambda made: made["n-shot"].update(hats=8),
        lambda made: made["n-samples"]["hats"].update(effective=2),
        lambda made: made["results"].clear(),
        lambda made: made["configs"].clear(),
        lambda made: made.pop("versions"),
    ],
)
def test_other_results_than_were_asked_for_are_not_believed(harness: Harness, edit: Edit) -> None:
    edit(harness.content)
    assert harness.run("harness.num_few_shot=2") == 1
    assert not list(harness.out.glob("*.json"))


@pytest.mark.parametrize("lines", [[], [{}], [5]])
def test_samples_that_are_missing_or_broken_are_not_believed(harness: Harness, lines: list[Any]) -> None:
    harness.samples["hats"] = lines
    assert harness.run() == 1
    assert not list(harness.out.glob("*.json"))


def test_a_harness_that_fails_is_told_with_its_log(
    harness: Harness, capsys: pytest.CaptureFixture[str]
) -> None:
    harness.code, harness.said = 3, "the harness is unwell"
    assert harness.run() == 1
    said = " ".join(capsys.readouterr().err.split())
    assert "ended with 3" in said
    assert "the harness is unwell" in said
    assert (harness.out / "lm-eval-hats-step-000000.log").exists()
    # What was answered is kept for the next start.
    assert list(harness.out.glob("*.replies-*/ends.txt"))
    harness.code = 0
    assert harness.run() == 0
    assert not list(harness.out.glob("*.replies-*"))


@pytest.mark.parametrize(
    ("task", "words", "named"),
    [
        ("gsm8k", ["mode=strict"], "mode"),
        ("gsm8k", ["sampling.temperature=0.6"], "sampling.temperature"),
        ("gsm8k", ["model.prompt_format=chat"], "model.prompt_format"),
        ("gsm8k", ["seed=3"], "seed"),
        ("gsm8k", ["harness.gpu_memory_frac=0.5"], "harness.gpu_memory_frac"),
        ("gsm8k", ["harness.num_fewshot=8"], "harness.num_fewshot"),
        ("gsm8k", ['harness.arguments=["--num_fewshot", "8"]'], "--num_fewshot"),
        ("gsm8k", ['harness.arguments=["--num_few=8"]'], "--num_few=8"),
        ("gsm8k", ["harness.model_args=dtype=float16"], "dtype"),
        ("gsm8k", ["engine.kind=vllm"], "engine.kind"),
        ("gsm8k", ["--samples", "2"], "samples"),
        ("gsm8k", ["--split", "held_out"], "--split"),
        ("gsm8k,gsm8k", [], "gsm8k"),
        ("no task", [], "no task"),
        ("", [], "''"),
        ("mbpp", [], "--confirm-run-unsafe-code"),
    ],
)
def test_what_would_not_take_effect_is_refused(
    harness: Harness, task: str, words: list[str], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert harness.run(*words, task=task) == 2
    assert named in capsys.readouterr().err
    assert not (harness.folder / "told.json").exists()


def test_a_budget_beyond_the_model_and_a_model_that_is_not_there(harness: Harness) -> None:
    assert harness.run("harness.max_reply_tokens=70000") == 76
    harness.model = harness.folder / "nowhere"
    assert harness.run() == 2


def test_an_environment_that_is_not_there(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    (LM_EVAL.path / STAMP_NAME).unlink()
    monkeypatch.setenv("STROP_OFFLINE", "1")
    assert harness.run() == 1
    assert not (harness.folder / "told.json").exists()


def test_a_file_is_evaluated_by_the_harness_beside_the_users_own_baselines(harness: Harness) -> None:
    assert harness.run() == 0
    file = harness.folder / "mine.toml"
    file.write_text(
        f'model.uri = "{harness.model}"\nharness.tasks = ["hats"]\nharness.engine = "hf"\n'
        'eval.baselines = ["base=out"]\n'
    )
    out = harness.folder / "file"
    assert main(["eval", "--config", str(file), "--out", str(out)]) == 0
    with (out / "mine-step-000000.csv").open() as table:
        (row,) = csv.DictReader(table)
    assert (row["task"], row["baseline_of"], row["same_protocol"]) == ("hats", "base", "True")
    assert (row["value"], row["baseline"], row["difference"]) == ("50.0", "50.0", "0.0")
    assert (out / "mine.lm-eval-hats-step-000000.json").exists()
    # A second process would have nothing to do.
    assert main(["eval", "--config", str(file), "--out", str(out), "--workers", "2"]) == 2


def test_vllm_takes_all_gpus_memory_and_its_own_arguments(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("strop.evaluate.harness.read_gpus", lambda: [None] * 8)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3")
    # It says what it was told, and ends.
    python = harness.folder / "vllm-python"
    python.write_text(f'#!/bin/sh\necho "$@" > {harness.folder}/vllm.txt\nexit 3\n')
    python.chmod(0o755)
    words = ("harness.engine=vllm", "engine.kind=vllm", f"engine.python={python}", "model.dtype=float32")
    settings = ("harness.tensor_parallel=2", "harness.gpu_memory_frac=0.5", "harness.max_model_tokens=64")
    assert harness.run(*words, *settings, "harness.model_args=max_num_seqs=64,enforce_eager=true") == 1
    told = (harness.folder / "vllm.txt").read_text().split()
    for flag, value in (
        ("--tensor-parallel-size", "2"),
        ("--data-parallel-size", "2"),
        ("--gpu-memory-utilization", "0.5"),
        ("--max-model-len", "64"),
        ("--max-num-seqs", "64"),
        ("--generation-config", "vllm"),
    ):
        assert told[told.index(flag) + 1] == value
    assert "--enforce-eager" in told
    assert not (harness.folder / "told.json").exists()
