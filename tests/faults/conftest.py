"""Commands that are run in this process."""

from tests.fixtures.commands import finished_run, folder, run, trained_runs

__all__ = ["finished_run", "folder", "run", "trained_runs"]
