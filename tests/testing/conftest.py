"""What tests of stand-ins may ask for."""

from tests.fixtures.scripted_jobs import world

__all__ = ["world"]
