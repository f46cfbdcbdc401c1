"""How a run is put together on this machine: training, evaluation, sampling, judging stored replies again.

`training` takes directory and GPUs, and composes a training there; `held_out` is how it evaluates itself.
`inference` asks a model; `evaluation` evaluates one, or judges its kept replies again, `harness` by lm-eval,
`shares` by a file and several processes; `following` evaluates a run's checkpoints while it trains.
`from_python` is `strop.train`. Not here: what a run would take (plan), other machines (launch).
"""
