"""The answers of the fake nvidia-smi, as a program that needs only Python, because it is run often.

python -I -S nvidia_smi_answers.py STATE -L
"""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

_WRONG_QUESTION = 6


def main(words: Sequence[str]) -> int:
    """Answer one question about the GPUs of a state file, named first; return the exit code."""
    path, *question = words
    state = json.loads(Path(path).read_text())
    if question == ["-L"]:
        lines = []
        for gpu in state["gpus"]:
            lines.append(f"GPU {gpu['index']}: {gpu['name']} (UUID: {gpu['uuid']})\n")
            lines += [
                f"  MIG {profile:<15} Device {number:>2}: (UUID: {uuid})\n"
                for number, (profile, uuid) in enumerate(gpu["slices"])
            ]
        sys.stdout.writelines(lines)
        return 0
    if question == ["-q", "-x"]:
        sys.stdout.write(_describe_all(state["gpus"]))
        return 0
    kinds = {"--query-gpu=": "gpus", "--query-compute-apps=": "users"}
    for prefix, key in kinds.items():
        if question[1:] != ["--format=csv,noheader,nounits"] or not question[0].startswith(prefix):
            continue
        names = question[0].removeprefix(prefix).split(",")
        if all(name in row for row in state[key] for name in names):
            for row in state[key]:
                sys.stdout.write(", ".join(row[name] for name in names) + "\n")
            return 0
    sys.stderr.write(f"Invalid combination of input arguments: {shlex.join(question)}\n")
    return _WRONG_QUESTION


def _describe_all(gpus: Sequence[Mapping[str, Any]]) -> str:
    """Return the part of nvidia-smi's XML that strop reads."""
    lines = ['<?xml version="1.0" ?>', '<!DOCTYPE nvidia_smi_log SYSTEM "nvsmi_device_v12.dtd">']
    lines.append("<nvidia_smi_log>")
    for gpu in gpus:
        lines.append(
            f"<gpu><uuid>{gpu['uuid']}</uuid><minor_number>{gpu['index']}</minor_number><mig_devices>"
        )
        lines += [
            f"<mig_device><index>{number}</index><gpu_instance_id>{number + 7}</gpu_instance_id>"
            "<compute_instance_id>0</compute_instance_id></mig_device>"
            for number in range(len(gpu["slices"]))
        ]
        lines.append("</mig_devices></gpu>")
    return "\n".join([*lines, "</nvidia_smi_log>", ""])


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
