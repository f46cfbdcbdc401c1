"""Sandboxes as a service: a controller answers clients, and an agent on each node makes the sandboxes.

Clients are OpenHands' own, unchanged. The controller answers from memory and writes a journal; a node holds
the addresses of its sandboxes, relays to the servers inside, and cleans up. The service runs on one machine,
or as a job. The sandboxes themselves, and their isolation, are the room `sandbox`.
"""
