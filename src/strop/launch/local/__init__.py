"""Jobs on this machine: detached from the terminal, supervised, requeued after an orderly end.

`supervisor` is the program above the agents, also inside a container; `backend` starts it and asks for it.
"""
