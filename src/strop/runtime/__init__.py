"""Sandboxes as a service: a service answers clients, and hosts own the sandboxes.

Clients are OpenHands' own, unchanged. On one machine the service holds a host itself; on several nodes hosts
are actors of Ray. The sandboxes themselves, and their isolation, are the room `sandbox`.
"""
