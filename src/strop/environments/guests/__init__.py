"""Environments of other packages, each in a separate Python environment and process.

They have other pinned versions, and their imports take seconds: `host.py` runs there, imports nothing of
strop, and serves one package (`for_verifiers.py`, `for_verifiers_v0.py`); `Guest` is its client. One process
serves all attempts of a run, and ends with it.
"""
