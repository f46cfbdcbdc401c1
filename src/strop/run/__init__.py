"""Compose runs on this machine: training, evaluation, sampling, judging kept replies again.

`training` opens the run's directory, takes GPUs and composes a training; `held_out` evaluates it on the way.
`inference` samples from a model; `evaluation` evaluates one or judges its kept replies again, `harness`
evaluates by lm-eval, `shares` by a file in several processes; `following` evaluates the checkpoints of a run
while it trains.
`from_python` is `strop.train`. Not here: predictions of time and memory (plan), other machines (launch).
"""
