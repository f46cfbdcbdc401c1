"""Run files from configurations of PRIME-RL."""

from strop.run.prime_rl.writing import Imported, ImportRequest, import_prime_rl

__all__ = ["ImportRequest", "Imported", "import_prime_rl"]
