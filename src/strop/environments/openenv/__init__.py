"""Environments that an OpenEnv server has: the connection to it, and attempts on it."""
