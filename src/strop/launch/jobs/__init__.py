"""Runs as jobs: what is submitted, where it goes, how it stands.

`contract` has the words and the one seam, `Backend`; `launcher` is the eight verbs over any backend. The
home of a job is the run's own directory: `job/` holds what was submitted, `attempts/NAME/` what each life
of it left. Not here: what one backend does (`local`, `container`, `slurm`, `sagemaker`), and what runs on
a node (`node`).
"""
