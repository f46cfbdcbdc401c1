"""Read examples from the files of a data set.

`layout` finds the files of both splits and reads their rows; `row_task` converts rows to examples, counts or
refuses the others, and is the base of tasks made of rows; `demonstrations` reads SFT rows.
"""
