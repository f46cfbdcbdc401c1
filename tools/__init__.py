"""Checks of this repository, run by `make check`. Not part of the package.

Each file is one check with its own command line: sizes, links, the commands of the README, and
paths that only exist on one machine. Nothing here is imported by strop.
"""
