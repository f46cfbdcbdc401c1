"""Export of environments and tasks as packages of verifiers v1.

`writing` writes a package. Its module, a copy of `taskset`, imports nothing of strop and runs in verifiers'
process; `playing` is the process on strop's side, which speaks the protocol of `guests.host`.
"""
