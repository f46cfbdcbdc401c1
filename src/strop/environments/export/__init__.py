"""Environments and tasks of strop's as packages of verifiers v1.

`writing` writes a package. Its module, a copy of `taskset`, imports nothing of strop and runs where verifiers
does; `playing` is strop's side of it, asked by `guests.host`'s protocol.
"""
