"""Export a trained model from its run, after a test that other programs load it.

The export fails unless transformers and, where it is installed, vLLM load the copy and give a text the same
log-probabilities. Each runs in a separate process, whose memory is free afterwards.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from strop.engine.vllm.environment import CPU_KV_CACHE_BYTES, find_python
from strop.errors import CheckRefused, ConfigError, CorruptRecord
from strop.io import AtomicDirectory, verify_directory
from strop.plan.known import Checkpoint, find_checkpoint
from strop.store.model_files import check_model_dir
from strop.tokenizer import Tokenizer

TEXT = "The quick brown fox jumps over the lazy dog. Two and three make five, and water is wet."
MAX_IDS = 48
MAX_DIFFERENCE_NATS = 0.02
"""Mean absolute difference of a token's log-probability, all in float32."""
# Each writes the log-probabilities of all ids but the first to a file, because vLLM prints to stdout.
_BY_TRANSFORMERS = """
import json, sys
import torch
from transformers import AutoModelForCausalLM
path, ids = sys.argv[1], json.loads(sys.argv[2])
model, info = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, output_loading_info=True)
wrong = {name: sorted(map(str, info[name])) for name in ("missing_keys", "unexpected_keys") if info[name]}
if wrong:
    sys.exit(f"the names of tensors are not those that the model has: {wrong}")
with torch.no_grad():
    logits = model(torch.tensor([ids])).logits[0, :-1].float().log_softmax(-1)
found = [float(logits[place, one]) for place, one in enumerate(ids[1:])]
open(sys.argv[4], "w").write(json.dumps(found))
"""
_BY_VLLM = """
import json, sys
if __name__ == "__main__":
    from vllm import LLM, SamplingParams
    path, ids = sys.argv[1], json.loads(sys.argv[2])
    model = LLM(model=path, dtype="float32", enforce_eager=True, max_model_len=len(ids) + 8,
                max_num_seqs=1, **json.loads(sys.argv[3]))
    asked = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)
    (found,) = model.generate([{"prompt_token_ids": ids}], asked, use_tqdm=False)
    rows = zip(found.prompt_logprobs[1:], ids[1:])
    open(sys.argv[4], "w").write(json.dumps([row[one].logprob for row, one in rows]))
"""


def export_checkpoint(
    source: Path, target: Path, *, load: Callable[[Path], Sequence[str]] | None = None
) -> tuple[Checkpoint, Sequence[str]]:
    """Copy the model of a checkpoint, or of a run's newest checkpoint, to a new directory.

    The bytes are verified first; the copy appears complete or not at all. `load` tests that it loads, and
    returns lines for the user; None: `prove_loading`.
    Raises: ConfigError if the source is no run and no checkpoint; CheckRefused if the target exists;
        CorruptRecord if the checkpoint is damaged or does not load; StoreError if the disk fails.
    """
    checkpoint = find_checkpoint(source)
    if checkpoint is None:
        raise ConfigError(
            f"{source} is no run and no checkpoint",
            allowed="a run directory, or checkpoints/step-NNNNNN inside one",
            next_step="`strop ls` lists the runs here",
        )
    if target.exists():
        raise CheckRefused(
            f"{target} exists",
            allowed="a directory that does not exist yet",
            next_step="choose another name, or remove it",
        )
    verify_directory(checkpoint.path)
    check_model_dir(checkpoint.model_path)
    facts = {"run": checkpoint.run_path.name, "step": checkpoint.step}
    with AtomicDirectory(target, facts=facts) as partial:
        # Adapters included, if the run trained some.
        shutil.copytree(checkpoint.model_path, partial, copy_function=shutil.copyfile, dirs_exist_ok=True)
        lines = (load or prove_loading)(partial)
    return checkpoint, lines


def prove_loading(path: Path) -> Sequence[str]:
    """Load a model by transformers and, where it is installed, by vLLM; return a line for each.

    Raises: CorruptRecord if one of them does not load it, or their log-probabilities of a text differ.
    """
    ids = [int(token_id) for token_id in Tokenizer.load(path).encode(TEXT)][:MAX_IDS]
    by_transformers = _score(Path(sys.executable), _BY_TRANSFORMERS, "transformers", path, ids)
    line = f"loaded by transformers: {len(ids)} tokens scored"
    try:
        python = find_python(None)
    except ConfigError:
        return [line, "not loaded by vLLM, which is not installed here"]
    by_vllm = _score(python, _BY_VLLM, "vLLM", path, ids)
    mean = sum(abs(a - b) for a, b in zip(by_vllm, by_transformers, strict=True)) / len(by_vllm)
    if not mean <= MAX_DIFFERENCE_NATS:
        raise CorruptRecord(
            f"vLLM and transformers score a text of {path} differently, by {mean:.3g} nats a token",
            allowed=f"{MAX_DIFFERENCE_NATS} nats at most, in float32",
            next_step="keep the checkpoint, and name both versions when you report this",
        )
    return [line, f"loaded by vLLM: scores within {mean:.1g} nats of these"]


def _score(python: Path, script: str, name: str, path: Path, ids: Sequence[int]) -> list[float]:
    """Return the log-probability of every id but the first, computed by a script in another process."""
    import torch

    # On a CPU vLLM's default is nine tenths of the machine's memory.
    options = {} if torch.cuda.is_available() else {"kv_cache_memory_bytes": CPU_KV_CACHE_BYTES}
    variables = {**os.environ, "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    variables["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # Three processes would each import it.
    with tempfile.TemporaryDirectory(prefix="strop-export-") as folder:
        written = Path(folder) / "scores.json"
        words = [str(python), "-c", script, str(path), json.dumps(ids), json.dumps(options), str(written)]
        done = subprocess.run(
            words, capture_output=True, text=True, errors="replace", env=variables, check=False
        )
        logprobs: list[float] = json.loads(written.read_bytes()) if written.is_file() else []
    if done.returncode or len(logprobs) != len(ids) - 1:
        last = done.stderr.strip().splitlines()[-3:]
        raise CorruptRecord(
            f"{name} does not load {path} (exit code {done.returncode}): {' / '.join(last)}",
            allowed="a model that it loads as it stands",
            next_step="--no-load-test exports it all the same; the checkpoint is as it was",
        )
    return logprobs
