"""The part of the check that sends weights from device to device, to another process.

On one GPU by handles of CUDA IPC; where there are two, by NCCL as well. On a CPU the handles are left out,
and gloo stands in for NCCL: the same code, with nothing to measure.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time

import torch
import torch.distributed

from benchmarks.gpu.result import PartResult, Setting
from strop.policy import device_wires
from strop.policy.device_wires import DeviceSender, Wire, device_digest

RECEIVER = """
import sys, torch
from strop.policy import device_wires
if not torch.cuda.is_available():
    group = torch.distributed.ProcessGroupGloo
    device_wires.make_group = lambda store, rank, limit: group(store, rank, 2, limit)
found = device_wires.receive_on_device(sys.argv[1], limit_s=60.0)
print({tensor.device.type for tensor in found.values()}, device_wires.device_digest(found.items()))
"""
LIMIT_S = 60.0


def run_wires(setting: Setting) -> PartResult:
    """Send tensors over every wire that can be tried here, and compare their digests."""
    result = PartResult()
    is_gpu = setting.device.type == "cuda"
    num_values = (1 << 26 if setting.is_quick else 1 << 28) if is_gpu else 1 << 16
    tensors = {
        f"layer-{index}": torch.randn(num_values // 8, device=setting.device).to(torch.bfloat16)
        for index in range(8)
    }
    digest = device_digest(tensors.items())
    on_cpu = device_digest((name, tensor.cpu()) for name, tensor in tensors.items())
    result.check("a digest is the same on device and CPU", digest == on_cpu, digest[:20])
    num_bytes = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    begun = time.perf_counter()
    device_digest(tensors.items())
    result.measure("digest on the device", num_bytes / (time.perf_counter() - begun) / 1e9, "GB/s")
    wires: list[Wire] = ["ipc"] if is_gpu else []
    if not is_gpu or torch.cuda.device_count() > 1:
        wires.append("nccl")
    else:
        result.details["left_out"] = "NCCL: it takes two GPUs"
    made = device_wires.make_group
    if not is_gpu:
        device_wires.make_group = lambda store, rank, limit: torch.distributed.ProcessGroupGloo(
            store, rank, 2, limit
        )
    try:
        for wire in wires:
            _send(result, wire, tensors, digest, num_bytes)
    finally:
        device_wires.make_group = made
    return result


def _send(
    result: PartResult, wire: Wire, tensors: dict[str, torch.Tensor], digest: str, num_bytes: int
) -> None:
    sender = DeviceSender("127.0.0.1", limit_s=LIMIT_S)
    variables = dict(os.environ)
    if wire == "nccl" and torch.cuda.is_available():
        # As an engine of its own GPU sees it.
        variables["CUDA_VISIBLE_DEVICES"] = "1"
    receiver = subprocess.Popen(
        [sys.executable, "-c", RECEIVER, sender.address(wire, "v1")],
        stdout=subprocess.PIPE,
        text=True,
        env=variables,
    )
    begun = time.perf_counter()
    num_sent = sender.send(wire, "v1", iter(tensors.items()), 1)
    result.measure(
        f"sent by {wire}, its start included", num_bytes / (time.perf_counter() - begun) / 1e9, "GB/s"
    )
    said = receiver.communicate(timeout=LIMIT_S)[0].strip()
    result.check(f"weights arrive by {wire}", num_sent == 1 and said.endswith(digest), said[:60])
