"""Tasks whose replies must follow instructions that a program can check.

Four data sets share the checkers: IFEval and IFBench for evaluation, RLVR-IFeval and multi-constraint
sets for training. A checker is one small function per instruction id; an id or argument that cannot be
judged is refused when the row is read. Nothing is downloaded. Not here: judging the content of a reply.
"""
