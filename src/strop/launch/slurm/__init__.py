"""Jobs on a Slurm cluster, submitted from its login node: one batch script, one agent per node.

`backend` implements `launch.contract.Backend` for the sites and jobs of `options`; `script` with `job.sh.j2`
writes the batch script; `queries` runs Slurm's programs, and `states` reads their output. Covered: arrays,
heterogeneous jobs, preemption, requeue, node loss. Not covered: federations, and clusters reached by ssh or
REST. Tried with Slurm 22.05.8; for other versions only their output was tried.
"""
