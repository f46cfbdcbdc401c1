"""Environments of the package verifiers, played in a process of its own Python, which serves all attempts."""
