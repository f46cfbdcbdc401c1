"""Sandboxes as a service: a controller that clients ask, and an agent on each node that makes them.

Clients are OpenHands' own, unchanged. The controller answers from memory and writes a journal; a node holds
each sandbox's address, relays to what listens inside, and cleans up. It runs on one machine, as a job or as a
pool of jobs. What a sandbox is, and how well it contains, is `sandbox`'s business.
"""
