"""The mirror of a run directory in the run's store, made while the run trains, and its restoration.

    <store>/checkpoints/<run dir name>/
      latest.json                  the attempt that may write here, and the newest checkpoint
      <run>_step<N>/               one record: model/ state/ run/ COMPLETE
      <run>_final/                 one record: the model alone, once every step is trained
      traces/                      metrics, events, rollouts, logs, run.json, spec.toml, eval

The run directory is the queue: the uploader (`python -m strop.record.mirror`) has no other state, so it may
be killed and started at any moment. A run can be resumed from every remote state: a record has the learner's
state and the curve up to its step (`run/`), `latest.json` names it only when it is complete, and older
records are removed only after that.

Covered: kill of uploader, trainer or machine at any moment; a store that is down, slow or refuses;
checkpoints that the trainer prunes meanwhile; two attempts of a run at once, on two machines; wrong clocks.
Not covered: an attempt that is suspended within one request and wakes up after a newer one has begun to send
the same step: its file may replace the newer one's; a reader notices this by the digest and uses the record
before.
"""
