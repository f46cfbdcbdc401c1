"""Task directories of Harbor: how they are read, and the environment that they make."""
