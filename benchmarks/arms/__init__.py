"""One long-lived worker program per system under test, all speaking the protocol of `worker.py`.

A rival's arm runs with the rival's own interpreter and imports nothing of strop.
"""
