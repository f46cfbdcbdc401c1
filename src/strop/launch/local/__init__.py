"""Jobs on this machine: detached from the terminal, supervised, requeued after an orderly end.

`supervisor` is the parent program of the agents; `backend` starts and queries it.
"""
