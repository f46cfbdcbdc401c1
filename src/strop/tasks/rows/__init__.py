"""Read examples from the rows of data, and judge replies to them by rewards.

`layout` finds the files of both splits, `files` reads one; `row_task` is the base of tasks made of rows, and
`judged_rows` of those that add rewards up; `demonstrations` reads SFT rows.
"""
