"""vLLM as an engine: an actor of Ray whose process has an interpreter of its own.

`environment` says which interpreter has vLLM, and starts it; it is all that strop's own process imports.
There `engine.load_vllm` makes a `VllmEngine` over vLLM's AsyncLLM, and `weights` is what vLLM's workers run
when new weights come. Only light modules of strop are imported there: that interpreter has vLLM's pins, not
strop's.
"""
