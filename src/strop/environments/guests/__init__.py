"""Environments of other packages, each played in a process of its own Python, which serves all attempts."""
