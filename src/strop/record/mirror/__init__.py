"""The copy of a run directory in the run's store, made while the run trains, and the way back.

    <store>/checkpoints/<run dir name>/
      latest.json                  who may write here, and which checkpoint is the newest
      <run>_step<N>/               one record: model/ state/ run/ COMPLETE
      <run>_final/                 one record: the model alone, once every step is trained
      traces/                      metrics, events, rollouts, logs, run.json, spec.toml, eval

The run directory is the queue: the uploader (`python -m strop.record.mirror`) keeps nothing that it
could not find out again, so it may be killed and started at any moment. Every remote state can be gone
on from: a record has beside the learner's state the curve up to its step (`run/`), `latest.json` names
it only when it is whole, and older ones go only after that.

Covered: kill of uploader, trainer or machine at any moment; a store that is down, slow or refuses;
checkpoints that the trainer prunes meanwhile; two attempts of a run at once, on two machines; clocks.
Not covered: an attempt that falls asleep within one request and wakes up after a newer one has begun to
send the same step: its file may replace the newer one's, which a reader sees by the digest and goes on
from the record before.
"""
