"""Run files from configurations of PRIME-RL: what is understood takes effect, the rest is named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from strop.cli import main
from strop.spec import RunSpec, load_spec
from strop.spec.parts import PartedSection

pytestmark = pytest.mark.usefixtures("away_from_home")
RL = """max_steps = 20
seq_len = 2048
max_async_level = 2
[deployment]
num_train_gpus = 1
num_infer_gpus = 2
[model]
name = "Qwen/Qwen3-0.6B"
[wandb]
project = "reverse-text"
name = "Reverse Text"
[ckpt]
interval = 5
keep_last = 3
[orchestrator]
batch_size = 128
group_size = 16
seed = 7
[orchestrator.train.sampling]
temperature = 0.8
max_completion_tokens = 60
[[orchestrator.train.env]]
name = "reverse-text"
taskset = { id = "primeintellect/reverse_text@0.1.0" }
[orchestrator.eval]
interval = 10
num_examples = -1
rollouts_per_example = 4
[orchestrator.buffer]
online_difficulty_filtering = true
[trainer.optim]
lr = 3e-6
betas2 = 0.98
max_norm = 0.5
[trainer.scheduler]
type = "cosine"
warmup_steps = 4
min_lr = 3e-7
[trainer.model.ac]
[trainer.model.lora]
rank = 16
alpha = 64.0
target_modules = ["q_proj", "v_proj", "experts"]
[trainer.loss]
ipo_mask_high = 0.3
[inference]
gpu_memory_utilization = 0.8
[inference.model]
enforce_eager = true
max_model_len = 4096
[inference.parallel]
dp = 2
[inference.vllm_extra]
max_num_seqs = 96
"""
UNKNOWN = """[trainer]
enable_router_replay = true
dist_timeout_seconds = 900
[trainer.model]
attn = "flash_attention_2"
tp = 2
optimization_dtype = "bfloat16"
[trainer.optim]
type = "muon"
[trainer.loss]
kl_tau = 0.01
[orchestrator]
max_off_policy_steps = 8
oversampling_factor = 2.0
[orchestrator.buffer]
easy_threshold = 0.9
[orchestrator.sampling]
min_tokens = 5
repetition_penalty = 1.1
[[orchestrator.filters]]
type = "gibberish"
[[orchestrator.env]]
id = "gsm8k"
[orchestrator.env.args]
num_train_examples = 100
num_eval_examples = -1
colour = "blue"
[inference.server]
port = 8000
[slurm]
partition = "gpu"
template_path = "x.j2"
[log]
level = "debug"
"""


def write(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def bring(path: Path, capsys: pytest.CaptureFixture[str], *words: str) -> tuple[RunSpec, list[str]]:
    """Import with the command, and return the spec of what it wrote, and its notices."""
    assert main(["import", "prime-rl", str(path), *words, "--json"]) == 0
    said: dict[str, Any] = json.loads(capsys.readouterr().out)
    return load_spec(said["path"]).spec, said["notices"]


def test_a_whole_configuration_becomes_a_run_that_loads_and_plans(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spec, notices = bring(write(tmp_path, "rl.toml", RL), capsys)
    assert (spec.name, spec.seed, spec.model.uri) == ("reverse-text", 7, "Qwen/Qwen3-0.6B")
    train = spec.train
    assert (train.steps, train.prompts_per_step, train.group_size, train.max_staleness) == (20, 8, 16, 2)
    assert (train.micro_batch_tokens, train.activation_checkpointing) == (2048, True)
    assert (train.checkpoint_every, train.keep_checkpoints) == (5, 3)
    assert (spec.task.name, spec.task.max_reply_tokens, spec.sampling.temperature) == (
        "reverse-text",
        60,
        0.8,
    )
    optimizer = spec.optimizer
    assert (optimizer.lr, optimizer.beta2, optimizer.max_grad_norm) == (3e-6, 0.98, 0.5)
    assert (optimizer.schedule, optimizer.warmup_steps) == ("cosine", 4)
    assert optimizer.final_frac == pytest.approx(0.1)
    # PRIME-RL's own, where nothing is said.
    assert (optimizer.weight_decay, spec.algorithm.name) == (0.01, "dppo")
    assert (spec.algorithm.clip_high, spec.algorithm.zero_variance) == (0.3, "resample")
    assert (spec.lora.rank, spec.lora.alpha, spec.lora.targets) == (16, 64.0, "q_proj,v_proj")
    assert (spec.eval.every, spec.eval.num_examples, spec.eval.num_samples) == (10, None, 4)
    engine = spec.engine
    assert (engine.kind, engine.gpu_memory_frac, engine.is_eager) == ("vllm", 0.8, True)
    assert (engine.max_model_tokens, engine.max_num_seqs) == (4096, 96)
    # Placement and engines follow from the GPUs.
    assert (spec.placement.kind, spec.placement.engines) == (None, None)
    assert (spec.job.train_gpus, spec.job.infer_gpus) == (1, 2)
    assert [one.partition(",")[0] for one in notices] == [
        "wandb.project",
        "trainer.model.lora.target_modules",
        "engine.max_model_tokens: 4096 (inference.model.max_model_len",
    ]
    assert main(["plan", str(tmp_path / "rl-strop.toml")]) == 0


def test_every_key_without_an_equivalent_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    spec, notices = bring(write(tmp_path, "rl.toml", UNKNOWN), capsys)
    assert (spec.task.name, spec.task.num_train) == ("gsm8k", 100)
    assert spec.output.log_level == "debug"
    assert {one.partition(",")[0] for one in notices if "," in one} == {
        "trainer.enable_router_replay",
        "trainer.dist_timeout_seconds",
        "trainer.model.attn",
        "trainer.model.tp",
        "trainer.model.optimization_dtype",
        "trainer.optim.type",
        "trainer.loss.kl_tau",
        "orchestrator.max_off_policy_steps",
        "orchestrator.oversampling_factor",
        "orchestrator.buffer.easy_threshold",
        "orchestrator.sampling.min_tokens",
        "orchestrator.sampling.repetition_penalty",
        "orchestrator.filters",
        "orchestrator.env",
        "inference.server.port",
        "slurm.partition",
        "slurm.template_path",
        "rollouts_per_example = 1: strop compares the rollouts of one prompt",
        "max_steps is not given: PRIME-RL goes on without end",
    }
    assert any("args.colour" in one for one in notices)
    # They stand in the run file too.
    text = (tmp_path / "rl-strop.toml").read_text()
    assert all(f"# {one}" in text for one in notices)


def test_files_of_the_roles_and_what_they_extend(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path, "base.toml", 'max_steps = 10\n[model]\nname = "org/base"\n')
    trainer = write(
        tmp_path, "train.toml", 'toml_files = ["base.toml"]\nmax_steps = 500\n[optim]\nlr = 1e-6\n'
    )
    orchestrator = write(
        tmp_path,
        "orch.toml",
        "batch-size = 1024\nseq_len = 8192\nrollouts_per_example = 8\nmax_steps = 500\n"
        '[model]\nname = "org/base"\n[environment]\nid = "hendrycks-math"\n'
        "[sampling]\ntemperature = 0.6\nmax_tokens = 1024\n",
    )
    inference = write(tmp_path, "infer.toml", "[parallel]\ntp = 2\n[model]\nmax_model_len = 8192\n")
    words = [f"trainer={trainer}", f"orchestrator={orchestrator}", f"inference={inference}"]
    out = tmp_path / "run.toml"
    settings = ["job.train_gpus=2", "job.infer_gpus=4", "name=Stage 1", "output.dir=x", "optimizer.lr=1e-7"]
    assert main(["import", "prime-rl", *words, *settings, "job.cpus_per_gpu=6", "--out", str(out)]) == 0
    spec = load_spec(out).spec
    assert (spec.name, spec.model.uri, spec.train.steps) == ("stage-1", "org/base", 500)
    assert (spec.task.name, spec.task.max_reply_tokens) == ("math", 1024)
    assert (spec.train.prompts_per_step, spec.engine.tensor_parallel) == (128, 2)
    assert (spec.job.train_gpus, spec.job.infer_gpus, spec.job.cpus_per_gpu) == (2, 4, 6)
    assert spec.output.dir == str(Path("x").absolute())
    # A setting that is given wins over the configuration, and the file says so.
    assert spec.optimizer.lr == 1e-7
    assert "optimizer.lr: 1e-07 (override) over 1e-06" in out.read_text()
    capsys.readouterr()
    # As the old file of a launcher names devices; and options own the whole group.
    old = 'inference_gpu_ids = [0,1,2]\ntrainer_gpu_ids = [6]\n[[orchestrator.env]]\nid = "gsm8k"\n'
    spec, notices = bring(write(tmp_path, "old.toml", old), capsys)
    assert (spec.job.train_gpus, spec.job.infer_gpus) == (1, 3)
    assert any("trainer_gpu_ids" in one for one in notices)
    spec, _ = bring(tmp_path / "old.toml", capsys, "job.single_gpu=true", "--out", str(tmp_path / "one.toml"))
    assert (spec.job.single_gpu, spec.job.train_gpus) == (True, None)


def test_several_environments_are_a_mixture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = (
        '[orchestrator.buffer]\nenv_ratios = [0.75, 0.25]\n[[orchestrator.env]]\nid = "gsm8k"\n'
        '[[orchestrator.env]]\nid = "reasoning-gym"\nargs = { gym = "spell_backward" }\n'
    )
    spec, _ = bring(write(tmp_path, "rl.toml", text), capsys)
    assert isinstance(spec.task, PartedSection)
    parts = spec.task.read_parts()
    weights = {label: part.model_dump()["weight"] for label, part in parts.items()}
    assert weights == {"gsm8k": 0.75, "reasoning-gym": 0.25}
    assert parts["reasoning-gym"].task.model_dump()["dataset"] == "spell_backward"


def test_a_data_set_of_ones_own_is_not_taken_for_the_tasks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = (
        "seq_len = 8192\n[orchestrator.sampling]\nmax_tokens = 8192\n"
        '[[orchestrator.env]]\nid = "math-env"\n[orchestrator.env.args]\ndataset_name = "org/problems"\n'
        'dataset_subset = "default"\nquestion_key = "problem"\nmath_verify_timeout = 60\n'
    )
    spec, notices = bring(write(tmp_path, "rl.toml", text), capsys)
    task = spec.task.model_dump()
    assert (task["name"], task["source"], task["answer"], task["reward"]) == (
        *("rows", "org/problems", "answer"),
        ("math",),
    )
    assert task["prompt"].format(problem="1 + 1?").startswith("1 + 1?\n\nPut the final answer in \\boxed{}")
    assert task["max_reply_tokens"] == 8192
    # No prompt would fit beside such a reply.
    assert (spec.train.micro_batch_tokens, spec.engine.max_model_tokens) == (None, None)
    assert any("args.math_verify_timeout" in one for one in notices)


def test_nodes_that_learn_and_nodes_that_generate(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = (
        '[deployment]\ntype = "multi_node"\nnum_train_nodes = 1\nnum_infer_nodes = 1\ngpus_per_node = 8\n'
        '[[orchestrator.env]]\nid = "gsm8k"\n[inference.parallel]\ntp = 2\n'
    )
    spec, _ = bring(write(tmp_path, "rl.toml", text), capsys)
    assert (spec.job.nodes, spec.job.infer_nodes, spec.job.gpus) == (2, 1, 8)
    assert main(["plan", str(tmp_path / "rl-strop.toml")]) == 0


def test_supervised_fine_tuning(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = (
        'max_steps = 100\n[model]\nname = "org/base"\n[data]\nname = "org/rows"\nbatch_size = 32\n'
        "seq_len = 4096\n"
        "[data.loss_mask]\nuser = true\nassistant = true\n[optim]\nlr = 2e-5\n[deployment]\nnum_gpus = 2\n"
    )
    path = write(tmp_path, "sft.toml", text)
    assert main(["import", "prime-rl", str(path)]) == 2
    assert "no environment is named" in capsys.readouterr().err
    spec, notices = bring(path, capsys, "task.name=arithmetic")
    assert (spec.train.terms, spec.sft.rows_per_step, spec.sft.train_on) == ("sft", 32, "all")
    assert (spec.sft.source, spec.job.gpus) == (str(tmp_path / "rows.jsonl"), 2)
    assert any(one.startswith("data.name") for one in notices)


@pytest.mark.parametrize(
    ("text", "words", "message"),
    [
        (
            '[[orchestrator.env]]\nid = "wiki-search"\n',
            (),
            "the environment wiki-search is no task of strop's",
        ),
        ("max_steps = 3\n", (), "no environment is named"),
        ('toml_files = ["rl.toml"]\n', (), "extends itself"),
        ('toml_files = ["none.toml"]\n', (), "none.toml does not exist"),
        ("max_steps = \n", (), "cannot be read as TOML"),
        ('max_steps = "many"\n', ("task.name=gsm8k",), "train.steps='many'"),
        ("max_steps = 3\n", ("task.name=nonsense",), "nonsense"),
        ("max_steps = 3\n", ("task.name=gsm8k", "job.gpus=2"), "job.gpus for a configuration of RL"),
        ("max_steps = 3\n", ("task.name=gsm8k", "other.toml"), "one CONFIG.toml, not 2"),
        ("max_steps = 3\n", ("task.name=gsm8k", "train.step=1"), "train.step"),
        ("max_steps = 3\n", ("task.name=gsm8k", "a..b=1"), "is not understood"),
        ("max_steps = 3\n", ("task.name=gsm8k", "job.train_gpus=all"), "job.train_gpus='all' is no number"),
        (
            '[data]\nname = "x.jsonl"\n',
            ("task.name=gsm8k", "job.single_gpu=true"),
            "job.single_gpu for a configuration of SFT",
        ),
    ],
)
def test_bad_configurations_are_refused_and_leave_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, words: tuple[str, ...], message: str
) -> None:
    path = write(tmp_path, "rl.toml", text)
    assert main(["import", "prime-rl", str(path), *words]) == 2
    assert message in capsys.readouterr().err
    assert [one.name for one in tmp_path.iterdir()] == ["rl.toml"]


def test_a_newer_file_for_fine_tuning_is_evaluated_on_its_own_task(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = (
        'max_steps = 100\n[model]\nname = "org/base"\n[data]\nbatch_size = 32\n'
        '[[data.source]]\ndataset = "mine.jsonl"\n[[data.source]]\ndataset = "more.jsonl"\n'
        '[[eval.source]]\nname = "words"\nenv.taskset.id = "org/reverse_text-v1"\n'
        "[deployment]\nnum_train_gpus = 1\nnum_infer_gpus = 1\n"
    )
    spec, notices = bring(write(tmp_path, "sft.toml", text), capsys)
    assert (spec.train.terms, spec.task.name) == ("sft", "reverse-text")
    assert (spec.sft.source, spec.job.gpus) == (str(tmp_path / "mine.jsonl"), 1)
    assert any("more.jsonl" in one for one in notices)
    assert any("num_infer_gpus" in one for one in notices)


def test_a_run_file_that_is_there_stays(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path, "rl.toml", RL)
    write(tmp_path, "rl-strop.toml", "mine")
    assert main(["import", "prime-rl", str(path)]) == 2
    assert "rl-strop.toml exists already" in capsys.readouterr().err
    assert main(["import", "prime-rl"]) == 2
    assert "there is nothing to import" in capsys.readouterr().err
