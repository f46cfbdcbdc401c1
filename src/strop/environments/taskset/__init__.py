"""The folder that makes `strop_taskset` known to verifiers: its PYTHONPATH names it."""
