"""Fakes for tests, and for users who try a site profile.

Engines (`dummy_engine`, `simulated_engine` on `virtual_time`), an environment (`scripted_environment`), a
scheduler (`scripted_backend`), a node of the sandbox service (`scripted_node`), GPUs (`nvidia_smi`), and
SageMaker (`sagemaker`: its API, and its container contract on this machine). No other room imports this one.
"""
