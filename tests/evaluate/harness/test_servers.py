"""The real lm-eval 0.4.13: running servers, what is refused or unknown, and a killed run."""

from __future__ import annotations

import os
import signal
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from strop.cli import main
from strop.engine.openai import KEY_VARIABLE
from strop.engine.vllm.environment import VLLM
from strop.tokenizer import Tokenizer
from tests.conftest import require_system_part
from tests.evaluate.harness.asking import CUT, ENDED, STOPPED, ask, samples_of, talking_model, write_tasks
from tests.fixtures.completions_server import KEY, TEXT, CompletionsServer, completions_server, logprob
from tests.fixtures.ray_traces import descendants

QUESTIONS = ("One?", "Two?", "Three?")


def begin(url: str, model: Path, out: Path, task: str, *words: str) -> int:
    """Evaluate; return the exit code."""
    asked = ["eval", f"{url}#{model}", "--harness", "lm-eval", "--task", task, "--out", str(out)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("STROP_OFFLINE", "1")
        return main([*asked, *words])


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (("model.dtype=float32",), "model.dtype with a running server"),
        (("engine.kind=vllm",), "engine.kind with a running server"),
        (("placement.threads=2",), "placement.threads with a running server"),
        (("harness.engine=hf",), "harness.engine=hf with a running server"),
        (("harness.gpu_memory_frac=0.5",), "harness.gpu_memory_frac=0.5 with a running server"),
        (("harness.tensor_parallel=2",), "harness.tensor_parallel=2 with a running server"),
        (("harness.model_args=api_key=secret",), "harness.model_args with api_key"),
    ],
)
def test_what_means_nothing_to_a_server_is_refused(
    words: tuple[str, ...],
    named: str,
    tiny_model_dir: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with completions_server() as server:
        assert begin(server.url, tiny_model_dir, tmp_path / "out", "hellaswag", *words) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert named in said
    assert "secret" not in said


def test_a_server_that_is_not_there_and_one_that_wants_a_key(
    tiny_model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv(KEY_VARIABLE, raising=False)
    with completions_server(key=KEY) as server:
        assert begin(server.url, tiny_model_dir, tmp_path / "out", "hellaswag") == 1
        assert KEY_VARIABLE in capsys.readouterr().err
        monkeypatch.setenv(KEY_VARIABLE, "another key")
        assert begin(server.url, tiny_model_dir, tmp_path / "out", "hellaswag") == 1
        assert "another key" not in capsys.readouterr().err
    assert begin(server.url, tiny_model_dir, tmp_path / "out", "hellaswag") == 1
    assert "ConnectError" in capsys.readouterr().err


@pytest.fixture
def server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, harness_python: Path
) -> Iterator[CompletionsServer]:
    """A server for the real lm-eval 0.4.13."""
    monkeypatch.setenv(KEY_VARIABLE, KEY)
    write_tasks(tmp_path, QUESTIONS)
    with completions_server(key=KEY) as server:
        yield server


@pytest.mark.slow
def test_a_killed_evaluation_goes_on_where_it_stopped(
    server: CompletionsServer, tmp_path: Path, tiny_model_dir: Path
) -> None:
    out = tmp_path / "out"
    # One after another, so that it is known what was answered.
    words = (f"harness.include={tmp_path}", "harness.num_few_shot=1", "harness.model_args=num_concurrent=1")
    server.finish_reason = "length"

    def kill(number: int) -> None:
        if number == 7:
            for pid in descendants(os.getpid()):
                line = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
                if any(word.endswith(b"lm_eval_models.py") for word in line) and b"-c" not in line:
                    os.kill(pid, signal.SIGKILL)

    server.before = kill
    assert begin(server.url, tiny_model_dir, out, "both", *words) == 1
    server.before = lambda number: None
    result = ask(f"{server.url}#{tiny_model_dir}", out, "both", *words)
    # Three questions with three choices, and three replies. What the kill interrupted is asked again, and
    # what was answered just before it may not have reached the disk.
    num_asked = Counter(server.prompts)
    assert len(num_asked) == 12
    assert sum(num_asked.values()) <= 14
    assert server.keys == {KEY}
    assert (result.engine, result.dtype, result.num_fewshot) == ("server", None, 1)
    assert result.truncated_frac == 1.0
    assert set(result.parts) == {"hats", "caps"}
    tokenizer = Tokenizer.load(tiny_model_dir)
    likelihoods = [sum(map(logprob, tokenizer.encode(choice).tolist())) for choice in (" 7", " 42", " none")]
    assert max(likelihoods) == likelihoods[0]
    assert result.parts["caps"].metrics["acc,none"].value == 1.0
    assert [sample["resps"] for sample in samples_of(out, "both") if "exact_match" in sample] == [
        [[TEXT]]
    ] * 3
    # Finished: nobody is asked.
    assert ask(f"{server.url}#{tiny_model_dir}", out, "both", *words) == result
    assert Counter(server.prompts) == num_asked
    assert not list(out.glob("*.replies-*"))
    assert not any(KEY.encode() in path.read_bytes() for path in out.rglob("*") if path.is_file())


@pytest.mark.slow
def test_a_server_without_echo_gives_no_score(
    server: CompletionsServer, tmp_path: Path, tiny_model_dir: Path
) -> None:
    """Taken as they come, each choice would be certain, and the first one chosen."""
    server.gives_logprobs = False
    word = f"harness.include={tmp_path}"
    assert begin(server.url, tiny_model_dir, tmp_path / "out", "caps", word) == 1
    assert not list((tmp_path / "out").glob("*.json"))


@pytest.mark.slow
@pytest.mark.usefixtures("frugal_vllm", "harness_python")
def test_a_cut_reply_of_vllm_is_seen_and_a_terminator_and_a_stop_string_are_no_cut(tmp_path: Path) -> None:
    """Incident: texts were encoded again, to fewer tokens than were generated, and the table said 0.0 %."""
    require_system_part("vLLM (make vllm-deps)", VLLM.is_ready())
    words = (f"harness.include={write_tasks(tmp_path, [CUT, ENDED, STOPPED])}", "harness.engine=vllm")
    result = ask(talking_model(tmp_path), tmp_path / "out", "hats", *words, "model.dtype=float32")
    replies = [sample["resps"][0][0] for sample in samples_of(tmp_path / "out", "hats")]
    assert replies == ["thethethethethet", "", ""]
    assert result.truncated_frac == pytest.approx(1 / 3)
    assert result.max_reply_tokens == 16
