"""Agent programs of users, which run unmodified and ask the model over OpenAI's protocol.

`task.agent` is a command. Each attempt has a separate address and key (`face`). Its calls are recorded as
exact ids, and the task judges the program's answer (`task`).
Not here: how calls become the turns of a rollout (`environments.recording`).
"""
