"""Speed and memory of strop beside its rivals, measured alternately on one machine.

`python -m benchmarks` runs the cases of `cases.py`; `docs/benchmarks.md` explains how to read the
results, which are kept in `benchmarks/results/`. Not part of the installed package.
"""
