"""Jobs on this machine: detached from the terminal, supervised, requeued after an orderly end.

`supervisor` is the parent program of the agents, also in a container; `backend` starts and queries it.
"""
