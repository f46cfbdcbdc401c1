"""Whether strop and TRL train the same way: the gradients of both for one batch, side by side.

A ratio of step times says something only if both arms do the same work. Both get the same rollouts,
token ids and advantages, and return the gradient that their trainers would hand to the optimizer.
Not a measurement of speed: the arms run one after the other, on a machine of any load.
"""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from safetensors.torch import load_file

from benchmarks.arms.gradient_order import count_tokens, write_groups
from benchmarks.arms.strop_gradient import sample_groups
from benchmarks.cases import CASES, Case
from benchmarks.figures import Figure, Measured
from benchmarks.harness import ROOT, Arm, ArmFailed, Protocol, worker_environment
from benchmarks.rivals import rival_arm, settled_dtype, strop_arm

CASE = CASES["grpo-32-forced"]
WANTED_COSINE = 0.999
DTYPES = ("bfloat16", "float32")
MODULES = {"strop": "benchmarks.arms.strop_gradient", "trl": "benchmarks.arms.trl_gradient"}

Gradient = Mapping[str, torch.Tensor]
"""By parameter name, float32."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GradientMatch:
    """How alike two gradients of one batch are."""

    left: str
    right: str
    """Arm and type of each, for example 'strop float32'."""
    cosine: float
    """Of all parameters as one vector."""
    norm_ratio: float
    """Length of the left gradient divided by that of the right one."""
    lowest_cosine: float
    lowest_name: str
    """The parameter whose gradients are least alike."""


def match_gradients(gradients: Mapping[str, Gradient], left_name: str, right_name: str) -> GradientMatch:
    """Compare two gradients by parameter name, in float64.

    Raises: ArmFailed if they are not of the same parameters.
    """
    ours, rival = gradients[left_name], gradients[right_name]
    if ours.keys() != rival.keys():
        raise ArmFailed(f"gradients of different parameters: {sorted(ours.keys() ^ rival.keys())[:4]}")
    products, cosines = torch.zeros(3, dtype=torch.float64), {}
    for name, tensor in ours.items():
        left, right = tensor.double().flatten(), rival[name].double().flatten()
        parts = torch.stack([left @ right, left @ left, right @ right])
        products += parts
        cosines[name] = _cosine(parts)
    lowest = min(cosines, key=lambda name: cosines[name])
    return GradientMatch(
        left=left_name,
        right=right_name,
        cosine=_cosine(products),
        norm_ratio=float((products[1] / products[2]).sqrt()),
        lowest_cosine=cosines[lowest],
        lowest_name=lowest,
    )


def _cosine(parts: torch.Tensor) -> float:
    """Return <a, b> / (|a| |b|) of the three products; 1 for two gradients of zero."""
    product, left, right = parts.tolist()
    return 1.0 if left == right == 0.0 else product / max((left * right) ** 0.5, 1e-300)


def compute_gradient(arm: Arm, case: Case, protocol: Protocol, dtype: str, work_dir: Path) -> Path:
    """Have an arm write its gradient of `work_dir/rollouts.json`; return the file.

    Raises: ArmFailed with the worker's last output if it wrote none.
    """
    path, log_path = work_dir / f"{arm.name}-{dtype}.safetensors", work_dir / f"{arm.name}-{dtype}.log"
    command = [str(arm.python), "-m", MODULES[arm.name], "--case", case.to_json()]
    command += ["--model", str(protocol.model_dir), "--rollouts", str(work_dir / "rollouts.json")]
    command += ["--gradient", str(path), "--dtype", dtype, "--threads", str(protocol.threads)]
    with log_path.open("w") as log:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            cwd=ROOT,
            env=worker_environment(arm, protocol.threads),
            check=False,
        )
    if done.returncode != 0 or not path.exists():
        tail = "".join(log_path.read_text().splitlines(keepends=True)[-30:])
        raise ArmFailed(f"arm {arm.name} gave no gradient, its code is {done.returncode}:\n{tail}")
    return path


def measure_gradient_cosine(*, is_quick: bool, model_dir: Path) -> Measured:
    """Compare strop's gradient with TRL's, in each type; in float32 alone where runs compute in it.

    Where both types are: each arm's bfloat16 beside its own float32, too, which says how much is rounding.
    Raises: ArmFailed if a worker fails.
    """
    case = replace(CASE, num_prompts=4, group_size=4) if is_quick else CASE
    protocol = Protocol(model_dir=model_dir)
    arms = (strop_arm(), rival_arm("trl", protocol.threads))
    # Emulated products would take hours, and nobody trains so.
    dtypes = DTYPES if settled_dtype() in DTYPES[:1] else DTYPES[1:]
    with tempfile.TemporaryDirectory(prefix="strop-bench-") as folder:
        groups = sample_groups(case, protocol.model_dir, dtypes[0])
        write_groups(Path(folder) / "rollouts.json", groups)
        gradients = {
            f"{arm.name} {dtype}": load_file(compute_gradient(arm, case, protocol, dtype, Path(folder)))
            for dtype in dtypes
            for arm in arms
        }
    pairs = [(f"strop {dtype}", f"trl {dtype}") for dtype in dtypes]
    if len(dtypes) > 1:
        pairs += [(f"{arm.name} bfloat16", f"{arm.name} float32") for arm in arms]
    matches = [match_gradients(gradients, *pair) for pair in pairs]
    figures = [
        Figure(
            name=f"cosine of {match.left} and {match.right}",
            unit="",
            value=match.cosine,
            measured=(match.cosine,),
            at_least=WANTED_COSINE,
        )
        for match in matches
    ]
    details = {"num_tokens": count_tokens(groups), "matches": [asdict(match) for match in matches]}
    return Measured(figures=figures, details={"case": asdict(case), **details})
