"""The agent of a node, which starts the job's processes on it and reports their end.

`agent.run_node` runs one node of one attempt: lease, code, environment, preflight, roles, one exit code. All
backends use it, so that a job behaves the same under a scheduler, in a container and on a workstation.
Backends start the agent, and their supervisors act on its end.
"""
