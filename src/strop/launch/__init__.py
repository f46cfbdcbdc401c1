"""How a run gets where it runs: composing it here, and saying beforehand what it will cost.

`local` puts the parts of a run together and runs them on this machine. `plan` estimates memory,
time and length and shows the rendered prompt, without importing torch and without effects.
"""
