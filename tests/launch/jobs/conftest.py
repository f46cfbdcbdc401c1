"""What tests of jobs may ask for."""

from tests.fixtures.jobs import world

__all__ = ["world"]
