"""Roles of a run as actors on Ray, on one machine or on all nodes of a job.

`ranks` and `workers` have the roles; `placement` starts and stops them all. `node` keeps one Ray node and
is a program of its own; `runtime` is its owner's side, on the head. Ray is an optional extra (`strop[ray]`),
imported inside functions of this room and nowhere else.
"""
