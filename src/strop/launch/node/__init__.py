"""What runs on a node of a job: the agent, which starts the job's processes and answers for them.

`agent.run_node` is one life of one node: lease, code, environment, preflight, roles, one exit code. Every
backend ends here, so that a job behaves the same under a scheduler, in a container and on a desk.
Not here: how an agent gets onto a node (backends), and what happens after its end (their supervisors).
"""
