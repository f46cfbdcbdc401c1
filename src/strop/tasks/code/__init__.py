"""Problems answered by a program, which is run against tests.

`extraction` finds the program in a reply and converts test results to an outcome; `python_judge` runs the
tests in a sandbox; `code_task` describes the data sets. Not here: isolation (`sandbox`).
"""
