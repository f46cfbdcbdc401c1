"""Repositories with an issue that is to be solved: rows, the workspace, and how a log of tests is read."""
