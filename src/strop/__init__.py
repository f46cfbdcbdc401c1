"""strop takes a language model and a verifiable task, and makes the model better at it.

Importing this package loads nothing heavy: no torch, no disk, no network, no device.
"""

__version__ = "0.1.0"

__all__ = ["__version__"]
