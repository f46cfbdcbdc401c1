"""Roles of a run as actors on Ray, on one machine or on all nodes of a job.

`ranks` and `workers` have the roles; `placement` starts and stops them all. `node` is a program that runs one
Ray node; `runtime` starts and connects the cluster, on the head. Ray is an optional extra (`strop[ray]`),
imported inside functions of this room and nowhere else.
"""
