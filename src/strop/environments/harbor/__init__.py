"""Task directories of Harbor: their reader, and their environment."""
