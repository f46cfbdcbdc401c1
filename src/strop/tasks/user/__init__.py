"""Tasks that a user brings: rows with reward functions, and task classes.

Their code is looked at in a process of its own before a run (`user_code`) and judges in workers that are
killed at a limit (`tasks.judging`); what it returns is checked here.
"""
