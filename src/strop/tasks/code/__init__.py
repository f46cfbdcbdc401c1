"""Problems answered by a program, which is run against tests.

`extraction` finds the program in a reply, `python_judge` runs it in a sandbox and says which tests it
passed, `outcome` makes a score of that. Each other module is a data set: its prompt and its tests.
Not here: what holds a program in (`sandbox`).
"""
