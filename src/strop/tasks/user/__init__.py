"""Tasks that a user brings: rows with reward functions, and task classes.

A process of its own inspects their code before a run (`user_code`), workers that are killed at a limit run it
(`tasks.judging`), and what it returns is checked here.
"""
