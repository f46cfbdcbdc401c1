"""vLLM as an engine: it runs in a Python environment of its own, and serves strop's app there.

`environment` says which interpreter has vLLM and what is refused before vLLM starts, and is all that strop's
own process imports. `serve` is what that interpreter runs: `engine.VllmEngine` over vLLM's AsyncLLM, behind
the app of `strop.engine.server`, for the client of `strop.engine.remote`. `weights` is what vLLM's workers
run when new weights come. Only light modules of strop are imported there: that environment has vLLM's pins,
not strop's.
"""
