"""From the files of a data set to examples.

`layout` finds the files of both splits and reads their rows, `row_task` turns rows into examples, counts or
refuses the others, and is the base of tasks made of rows; `demonstrations` reads SFT rows.
"""
