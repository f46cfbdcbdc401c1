"""vLLM as an engine: an actor of Ray whose process has an interpreter of its own.

`environment` says which interpreter has vLLM and what is refused before vLLM starts, and with `interpreter`,
which starts it, is all that strop's own process imports. There `loading` makes `engine.VllmEngine` over
vLLM's AsyncLLM (`core`); `weights` is what vLLM's workers run when new weights come.
"""
