"""How a run gets to other machines: as a job of a scheduler or SageMaker.

`contract` has the types and the one seam, `Backend`; `launcher` has the verbs over any backend. The job
directory is the run's: `job/` holds the submitted files (`job_dir`), `attempts/NAME/` those of each attempt.
The backends are `local`, `slurm` and `sagemaker`; `node` runs on every node. The job itself runs
the room `run`.
"""
