"""lm-eval and a running server: what is asked of it, what is refused, and what a killed run asks again.

vLLM's own server (0.32, on a CPU) was tried beside: likelihoods as lm-eval's transformers to 1e-5, the same
replies but for bytes of unfinished characters.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

import pytest

from strop.cli import main
from strop.engine.openai import KEY_VARIABLE
from strop.evaluate.harness import FreeJob, HarnessResult, driver
from strop.evaluate.harness.engine import choose_engine
from strop.evaluate.harness.run import harness_command, harness_variables
from strop.spec.harness import HarnessSpec
from strop.tokenizer import Tokenizer
from tests.evaluate.harness.test_arguments import write_rows
from tests.fixtures.completions_server import KEY, NAME, TEXT, CompletionsServer, completions_server, logprob
from tests.fixtures.ray_traces import descendants

CHOICES = (" 7", " 42", " none")
NUM_SHOTS = 1
GROUP = """group: both
task: [hats, caps]
aggregate_metric_list:
  - metric: acc
    weight_by_size: true
"""
TASK = """task: {name}
dataset_path: json
dataset_kwargs:
  data_files:
    train: {folder}/train.jsonl
    test: {folder}/test.jsonl
training_split: train
test_split: test
fewshot_split: train
doc_to_text: "Q: {{{{question}}}}\\nA:"
metadata:
  version: 1.0
"""
GENERATED = """output_type: generate_until
doc_to_target: "42"
generation_kwargs:
  until: ["\\n"]
  max_gen_toks: 8
metric_list:
  - metric: exact_match
    aggregation: mean
    higher_is_better: true
"""
CHOSEN = """output_type: multiple_choice
doc_to_choice: ["7", "42", "none"]
doc_to_target: 0
metric_list:
  - metric: acc
    aggregation: mean
    higher_is_better: true
"""


def write_tasks(folder: Path) -> Path:
    write_rows(folder)
    (folder / "hats.yaml").write_text(TASK.format(name="hats", folder=folder) + GENERATED)
    (folder / "caps.yaml").write_text(TASK.format(name="caps", folder=folder) + CHOSEN)
    (folder / "both.yaml").write_text(GROUP)
    return folder


def ask(url: str, model: Path, out: Path, task: str, *words: str) -> int:
    asked = ["eval", f"{url}#{model}", "--harness", "lm-eval", "--task", task, "--split", "held_out"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("STROP_OFFLINE", "1")
        return main([*asked, "--out", str(out), *words])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("model.dtype=float32",), "model.dtype with a running server. Allowed: what the server was"),
        (
            ("engine.kind=vllm", "engine.python=/usr/bin/python3"),
            "engine.kind, engine.python with a running server",
        ),
        (("placement.threads=2",), "placement.threads with a running server"),
        (("harness.engine=hf",), "harness.engine=hf with a running server"),
        (("harness.gpu_memory_frac=0.5",), "harness.gpu_memory_frac=0.5 with a running server"),
        (("harness.tensor_parallel=2",), "harness.tensor_parallel=2 with a running server"),
        (("harness.batch_size=auto",), "harness.batch_size=auto with a running server, which batches by"),
        (("harness.max_model_tokens=401",), "harness.max_model_tokens=401 with the server at"),
    ],
)
def test_what_means_nothing_to_a_server_is_refused(
    words: tuple[str, ...],
    message: str,
    tiny_model_dir: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with completions_server() as server:
        assert ask(server.url, tiny_model_dir, tmp_path / "out", "hellaswag", *words) == 2
    assert message in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "out").exists()


def test_a_server_that_is_not_there_and_one_that_wants_a_key(
    tiny_model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv(KEY_VARIABLE, raising=False)
    with completions_server(key=KEY) as server:
        assert ask(server.url, tiny_model_dir, tmp_path / "out", "hellaswag") == 1
        assert (
            f"answers 401: it wants a key. Allowed: the key of the server in the variable {KEY_VARIABLE}"
            in (" ".join(capsys.readouterr().err.split()))
        )
        monkeypatch.setenv(KEY_VARIABLE, "another key")
        assert ask(server.url, tiny_model_dir, tmp_path / "out", "hellaswag") == 1
        assert "answers 401: the key is not its own" in " ".join(capsys.readouterr().err.split())
    assert ask(server.url, tiny_model_dir, tmp_path / "out", "hellaswag") == 1
    said = " ".join(capsys.readouterr().err.split())
    assert "/v1/models does not answer (ConnectError: " in said
    assert "Next: start it, or correct the address" in said
    assert "another key" not in said


@pytest.mark.parametrize("address", ["http://ann:secret@127.0.0.1:1/v1", "http://127.0.0.1:1/v1?key=secret"])
def test_an_address_with_a_secret_is_refused(
    address: str, tiny_model_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert ask(address, tiny_model_dir, tmp_path, "hellaswag") == 2
    said = " ".join(capsys.readouterr().err.split())
    assert "has a name, a password or a query" in said
    assert "secret" not in said


@pytest.mark.parametrize("argument", ["api_key=secret", "auth_token=secret"])
def test_a_key_is_no_argument(
    argument: str, tiny_model_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with completions_server() as server:
        code = ask(server.url, tiny_model_dir, tmp_path, "hellaswag", f"harness.model_args={argument}")
    said = capsys.readouterr().err
    assert (code, "secret" in said) == (2, False)
    assert f"with {argument.partition('=')[0]}. Allowed: a key in the variable" in " ".join(said.split())


def make_job(server_url: str, model: Path, **settings: Any) -> FreeJob:
    wanted = HarnessSpec(**settings)
    engine = choose_engine(wanted, None, url=server_url, served_name="of no importance")
    return FreeJob(
        name="both",
        model_path=model,
        model_digest="m",
        step=0,
        dtype=None,
        max_positions=99,
        num_examples=None,
        settings=wanted,
        engine=engine,
    )


def test_the_key_is_a_variable_and_nobody_elses_is_sent(
    tiny_model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(KEY_VARIABLE, KEY)
    monkeypatch.setenv("OPENAI_API_KEY", "the user's at another place")
    with completions_server(key=KEY) as server:
        job = make_job(server.url, tiny_model_dir)
    words = harness_command(job, tmp_path)
    arguments = json.loads(words[words.index("--model_args") + 1])
    # The only model of the server; of the length lm-eval takes one away.
    assert (arguments["model"], arguments["max_length"]) == (NAME, 100)
    assert not any(KEY in word for word in words)
    assert harness_variables(job, tmp_path)["OPENAI_API_KEY"] == KEY
    monkeypatch.delenv(KEY_VARIABLE)
    assert "OPENAI_API_KEY" not in harness_variables(job, tmp_path)


class Server:
    """What the driver needs of lm-eval's class, as it stands there."""

    @staticmethod
    def parse_logprobs(outputs: Any, tokens: Any = None, ctxlens: Any = None) -> str:
        return "believed"

    @staticmethod
    def parse_generations(outputs: Any) -> str:
        return "believed"


class CacheHook:
    kept: ClassVar[list[str]] = []

    def add_partial(self, attr: str, request: Any, answer: Any) -> None:
        self.kept.append(request)


@pytest.fixture
def checked(monkeypatch: pytest.MonkeyPatch) -> type[Server]:
    """Return the class with the driver's checks."""
    own = type("Own", (Server,), {"parse_logprobs": Server.parse_logprobs})
    for name, content in (
        ("lm_eval", {}),
        ("lm_eval.api", {}),
        ("lm_eval.models", {}),
        ("lm_eval.api.model", {"CacheHook": CacheHook}),
        ("lm_eval.models.openai_completions", {"LocalCompletionsAPI": own}),
    ):
        module = ModuleType(name)
        vars(module).update(content)
        monkeypatch.setitem(sys.modules, name, module)
    driver._require_answers()
    return own


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        # Taken as they come, each choice would be certain, and the first one chosen.
        ({"echoes": False}, "1 log-probabilities and 1 lists of likely tokens, to a text of 3 tokens"),
        ({"gives_logprobs": False}, "0 log-probabilities and 0 lists .* Tasks that choose among answers"),
    ],
)
def test_a_server_without_likelihoods_is_not_believed(
    checked: type[Server], changes: dict[str, Any], message: str
) -> None:
    server = CompletionsServer(url="")
    call = {"prompt": [[5, 6, 7]], "echo": True}
    assert checked.parse_logprobs(server.answer(call), tokens=[[5, 6, 7]], ctxlens=[2]) == "believed"
    answer = replace(server, **changes).answer(call)
    with pytest.raises(driver._NoAnswer, match=message):
        checked.parse_logprobs(answer, tokens=[[5, 6, 7]], ctxlens=[2])
    with pytest.raises(driver._NoAnswer, match="1 choices to 2 texts"):
        checked.parse_logprobs(server.answer(call), tokens=[[5, 6, 7], [8]], ctxlens=[2, 1])


def test_no_text_is_not_an_empty_one(checked: type[Server]) -> None:
    server = CompletionsServer(url="")
    assert checked.parse_generations(server.answer({"prompt": [[5]]})) == "believed"
    server.gives_text = False
    with pytest.raises(driver._NoAnswer, match="a choice without a text"):
        checked.parse_generations(server.answer({"prompt": [[5]]}))


def test_a_window_of_a_longer_text_is_not_kept(checked: type[Server]) -> None:
    """lm-eval failed there: loglikelihood_rolling of a server, with a cache."""
    CacheHook.kept.clear()
    CacheHook().add_partial("loglikelihood", None, 1.0)
    CacheHook().add_partial("loglikelihood", "text", 1.0)
    assert CacheHook.kept == ["text"]


# The real lm-eval 0.4.13 from here on, in its own environment.


def kill_harness() -> None:
    """Kill the lm-eval that this process has started."""
    for pid in descendants(os.getpid()):
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        if any(word.endswith(b"harness/driver.py") for word in words) and b"-c" not in words:
            os.kill(pid, signal.SIGKILL)


@pytest.mark.slow
@pytest.mark.usefixtures("harness_python")
def test_a_killed_evaluation_by_a_server_goes_on_where_it_stopped(
    tmp_path: Path, tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(KEY_VARIABLE, KEY)
    out = tmp_path / "out"
    # One after another, so that it is known what was answered.
    one_by_one = "harness.model_args=num_concurrent=1"
    words = (f"harness.include={write_tasks(tmp_path)}", f"harness.num_few_shot={NUM_SHOTS}", one_by_one)
    with completions_server(key=KEY) as server:

        def kill(number: int) -> None:
            if number == 7:
                kill_harness()

        server.before = kill
        assert ask(server.url, tiny_model_dir, out, "both", *words) == 1
        assert "lm-eval ended with -9 on both" in " ".join(capsys.readouterr().err.split())
        server.before = lambda number: None
        assert ask(server.url, tiny_model_dir, out, "both", *words) == 0
        # Three questions with three choices, and three replies. What the kill interrupted is asked again, and
        # what was answered just before it may not have reached the disk.
        num_asked = Counter(server.prompts)
        assert len(num_asked) == 12
        assert sum(num_asked.values()) <= 14
        # Finished: nobody is asked.
        assert ask(server.url, tiny_model_dir, out, "both", *words) == 0
        assert Counter(server.prompts) == num_asked
        assert ask(server.url, tiny_model_dir, out, "both", *words, "harness.seed=7") == 76
        assert "is of another evaluation: seed 42 there and 7 now" in " ".join(
            capsys.readouterr().err.split()
        )
    assert server.keys == {KEY}
    stem = out / "lm-eval-both-step-000000"
    result = HarnessResult.read(stem.with_suffix(".json").read_bytes())
    assert (result.engine, result.dtype, result.num_fewshot) == ("server", None, NUM_SHOTS)
    assert result.parts["hats"].metrics["exact_match,none"].value == 1.0
    tokenizer = Tokenizer.load(tiny_model_dir)
    likelihoods = [sum(map(logprob, tokenizer.encode(choice).tolist())) for choice in CHOICES]
    for line in stem.with_suffix(".samples.jsonl").read_text(encoding="utf-8").splitlines():
        found = json.loads(line)["resps"]
        said = [TEXT] if "exact_match" in line else [[str(one), "False"] for one in likelihoods]
        assert [one[0] for one in found] == said
    # The likeliest is the first.
    assert max(likelihoods) == likelihoods[0]
    assert result.parts["caps"].metrics["acc,none"].value == 1.0
    assert not any(KEY.encode() in path.read_bytes() for path in out.rglob("*") if path.is_file())
