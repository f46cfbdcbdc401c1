"""Tasks whose replies must follow instructions that a program can check.

For training, RLVR-IFeval and multi-constraint sets share the rules here; IFEval and IFBench, for evaluation,
are judged by the package if-verifiable. Nothing is downloaded, and the content of a reply is not judged.
"""
