"""The research suite: offline tasks for agents, each with a sealed judge and a known best.

`suite.make_instance(task, seed)` makes an instance: a starter workspace, what is asked, the marks of its
scale (floor, baseline, ceiling), and the judge of the one file that an attempt leaves behind. Each kind of
task has a file; `contract` is what they share. Not here: where attempts run.
"""
