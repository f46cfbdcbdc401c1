"""The research suite: offline tasks for agents, each with a sealed judge and a known best score.

`suite.make_instance(task, seed)` makes an instance: a starter workspace, a statement, the marks of its scale
(floor, baseline, ceiling), and the judge of its artefact, the one file that is graded. Each kind of task has
a file; they share `contract`. Attempts run in `environment`.
"""
