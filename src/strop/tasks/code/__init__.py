"""Problems answered by a program, which is run against tests.

`extraction` finds the program in a reply, and `judge` runs the tests in a fresh sandbox: in a runner, which
exchanges only plain values with the separate process of the candidate. Exiting, printing, patching built-ins
and objects that equal everything earn nothing, because no code of the program runs in the runner.
`problems` reads published data sets, `row_tests` the tests that rows bring. Not here: isolation (`sandbox`).
"""
