"""A program that computes a product with a known sum on one device.

    python -P -m strop.hardware.gpu_probe --device cuda

prints one line of JSON: the sum, and whether bytes came back from the device unchanged. The parent never
imports torch, and a device that hangs stops only this process.
"""

from __future__ import annotations

import argparse
import json
import sys

from strop.hardware.tuning import importing

SIZE = 1024
"""Rows and columns of both factors. The product has integers below 2**24, so float32 is exact."""
CHECKSUM = 32_212_178_127
"""The expected weighted sum of the product."""
_COPIED_BYTES = 1 << 24


def main() -> None:
    """Compute, copy, print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", choices=("cuda", "cpu"), required=True)
    options = parser.parse_args()
    with importing():
        import torch

    if options.device == "cuda" and not torch.cuda.is_available():
        sys.stdout.write(json.dumps({"error": f"torch {torch.__version__} sees no GPU"}))
        return
    device = torch.device(options.device)
    numbers = torch.arange(SIZE)
    left = (3 * numbers[:, None] + 5 * numbers[None, :]) % 7
    right = (2 * numbers[:, None] + 7 * numbers[None, :]) % 5
    weights = (numbers[:, None] + 2 * numbers[None, :]) % 11
    product = left.to(device, torch.float32) @ right.to(device, torch.float32)
    checksum = int((product.cpu().to(torch.int64) * weights).sum())
    sent = torch.arange(_COPIED_BYTES // 8)
    is_same = bool(torch.equal(sent.to(device).cpu(), sent))
    sys.stdout.write(json.dumps({"checksum": checksum, "is_copied": is_same}))


if __name__ == "__main__":
    main()
