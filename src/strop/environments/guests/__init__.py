"""Environments of other packages, each in a Python environment and a process of its own.

Their pins are their own, and their imports take seconds: `host.py` runs there, imports nothing of strop, and
serves one package's worlds (`for_textarena.py`, `for_verifiers.py`); `Guest` asks it. One process serves all
attempts of a run, and ends with it.
"""
