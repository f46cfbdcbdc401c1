"""The agent of a node, which starts the job's processes there and reports their end.

`agent.run_node` is one node of one attempt: lease, code, environment, preflight, roles, one exit code. Every
backend ends here, so that a job behaves the same under a scheduler, in a container and on a workstation.
Not here: how an agent gets onto a node (backends), and what happens after its end (their supervisors).
"""
