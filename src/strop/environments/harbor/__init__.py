"""Task directories of Harbor: how they are read, their images, and the environment that they make."""
