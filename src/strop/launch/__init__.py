"""How a run gets to other machines: as a job of a scheduler, a container host or SageMaker.

`contract` has the types and the one seam, `Backend`; `launcher` has the verbs over any backend. The job
directory is the run's own: `job/` holds what was submitted (`job_dir`), `attempts/NAME/` what each attempt
left. One backend each: `local`, `container`, `slurm`, `sagemaker`; `node` runs on every node.
Not here: what the job does there (run).
"""
