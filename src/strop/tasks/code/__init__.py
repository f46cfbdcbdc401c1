"""Problems answered by a program, which is run against tests.

`extraction` finds the program in a reply and makes an outcome of the tests that it passed, `python_judge`
runs them in a sandbox. Each other module is a data set: its prompt and its tests. Not here: isolation
(`sandbox`).
"""
