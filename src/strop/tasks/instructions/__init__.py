"""Tasks whose replies must follow instructions that a program can check.

RLVR-IFeval and multi-constraint sets, for training, share the checkers. A checker is one small function per
instruction id; an id or argument that cannot be judged is refused when the row is read. IFEval and IFBench,
for evaluation, are judged by the package if-verifiable, whose verdicts are the published ones. Nothing is
downloaded. Not here: judging the content of a reply.
"""
