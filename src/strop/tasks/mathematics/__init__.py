"""Answers to problems of mathematics: a number, an integer or a formula.

`answers` finds the answer in a reply, `equivalence` compares two: by spelling (`normal_form`), as numbers,
then by algebra (`symbolic`, which can hang and therefore runs in a process that can be killed).
"""
