"""Generated problems: they need no data, in any number."""
