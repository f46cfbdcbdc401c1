"""A user's own tasks: rows with reward functions, and task classes.

A separate process inspects their code before a run (`user_code`), workers that are killed at a limit run it
(`tasks.judging`), and this room checks their return values.
"""
