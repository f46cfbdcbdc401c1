"""How a run is put together on this machine: training, evaluation, sampling, judging stored replies anew.

Each module composes one of them from the rooms below: `training`, `evaluation`, `inference`, `rescoring`,
`following` (evaluate a run's checkpoints while it goes on), `harness`, `audit`, `stage`, `doctor`.
`from_python` is `strop.train`. Not here: what it would take (plan), other machines (launch).
"""
