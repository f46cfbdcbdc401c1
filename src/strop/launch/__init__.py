"""How a run gets to other machines: as a job of a scheduler, a container host or SageMaker.

`contract` has the words and the one seam, `Backend`; `launcher` is the eight verbs over any backend. The
home of a job is the run's own directory: `job/` holds what was submitted, `attempts/NAME/` what each life
of it left. One backend each: `local`, `container`, `slurm`, `sagemaker`; `node` runs on every node.
Not here: what the job does there (run).
"""
