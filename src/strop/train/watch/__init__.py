"""Watches of a running training: bounds on one step, trends over many, and the process. Import by path."""
