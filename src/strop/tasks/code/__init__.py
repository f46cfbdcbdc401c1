"""Problems answered by a program, which is run against tests.

`extraction` finds the program in a reply and converts test results to an outcome; `python_judge` runs the
tests in a sandbox. Each other module is a data set: its prompt and its tests. Not here: isolation
(`sandbox`).
"""
