"""Jobs on a SLURM cluster whose login node this is: one batch script, one agent per node.

`backend.py` keeps the seam; `script.py` with `job.sh.j2` writes what is handed over, from the settings of
`options.py`; `queries.py` asks and `states.py` says what the answers mean. Covered: arrays, heterogeneous
jobs, preemption, requeue, node loss. Not covered: federations, and clusters reached by ssh or REST. Tried
with Slurm 22.05.8; other versions are known by their output alone.
"""

from strop.launch.slurm.backend import SlurmBackend

__all__ = ["SlurmBackend"]
