"""From the files of a data set to examples.

`layout` finds the files of both splits and reads their rows, `reading` turns rows into examples and
counts or refuses those that it cannot use, `row_task` is what tasks made of rows have in common.
"""
