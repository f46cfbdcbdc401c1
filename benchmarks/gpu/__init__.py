"""What strop does on a GPU: is it right, and how fast is it for this device?

`python -m benchmarks.gpu_check` runs it; nothing beside PyTorch, transformers and what strop imports is
needed, and no network. Every part runs in a process of its own.
"""
