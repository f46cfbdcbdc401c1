"""Export of environments and tasks as packages of verifiers v1, which strop plays in a process of its own."""
