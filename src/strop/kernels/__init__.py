"""C for the loops that PyTorch would run on a CPU as many small passes through memory.

`library` compiles kernels.c with the machine's C compiler once and keeps the result in the user's
cache; `calls` offers its functions on tensors. Each function also exists in plain PyTorch in a room above,
which runs where there is no compiler, and which the tests compare with.
"""

from __future__ import annotations

from strop.kernels.library import KernelStatus, kernel_status

__all__ = ["KernelStatus", "kernel_status"]
