"""Problems with one right value: a number, an integer or a formula.

`answers` finds what a reply answers, `equivalence` says whether two answers are one value: by
spelling (`normal_form`), as numbers, then by algebra (`symbolic`, which can hang and is therefore run
where it can be killed). Each other module is a data set: its prompt, its limits, its way to answer.
"""
