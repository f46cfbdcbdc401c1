"""Read examples from the rows of data, and judge replies to them by rewards.

`layout` finds and reads the files of both splits, and rows of demonstrations; `row_task` is the base of
tasks made of rows, and `judged_rows` of those that add rewards up.
"""
