"""Run files from configurations of PRIME-RL."""

from strop.run.prime_rl.writing import ROLES, Imported, ImportRequest, import_prime_rl

__all__ = ["ROLES", "ImportRequest", "Imported", "import_prime_rl"]
