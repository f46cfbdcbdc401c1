"""Tasks of MLGym, from a checkout of the user's: read, and attempted in sandboxes of strop's own."""
