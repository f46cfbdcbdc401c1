"""Commands that are run in this process."""

from tests.fixtures.commands import folder, run

__all__ = ["folder", "run"]
