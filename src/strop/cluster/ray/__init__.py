"""Roles of a run as actors on Ray, on one machine or on all nodes of a job.

`node` keeps one Ray node and is a program of its own; `runtime` is its owner's side, on the head;
`placement` starts the roles and stops them all. Ray is an optional extra (`strop[ray]`), imported inside
functions of this room and nowhere else.
"""
