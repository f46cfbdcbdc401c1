"""How a run is put together on this machine: training, evaluation, sampling, judging stored replies again.

`training` composes a training, in the directory and on the GPUs that `claim` takes; `inference` asks a model;
`evaluation` evaluates one, also by a foreign harness, or judges its kept replies again; `following` evaluates
a run's checkpoints while it trains. `from_python` is `strop.train`. Not here: what a run would take (plan),
other machines (launch).
"""
