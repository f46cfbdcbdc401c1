"""A folder of runs with everything that a page can show, written by the real writers."""

from __future__ import annotations

import random
import shutil
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from strop.record import Event, EventKind, MetricsLog, RunDir
from strop.record.rollouts import StoredRollout, write_rollouts
from strop.record.run_dir import TOKENIZER_NAME
from strop.rollout import (
    FailureOwner,
    FinishReason,
    FloatArray,
    Outcome,
    Rollout,
    Sampling,
    Turn,
    make_example,
)
from strop.tokenizer import Tokenizer
from tests.fixtures.records import RecordSize, make_metrics, make_record
from tests.fixtures.tiny_tokenizer import tiny_tokenizer

SIZE = RecordSize(num_steps=30, num_rollouts=24, num_reply_tokens=40, num_metrics=34, num_evaluations=4)
LAST = SIZE.num_steps
HOSTILE = "<script>document.title='caught'</script><img src=x onerror=\"document.title='caught'\">"
ESCAPES = "\x1b[2J\x1b]0;caught\x07red"
REVERSED = "abc\u202edef\u202c \u2066ghi\u2069"
TOOL_CALL = '<tool_call>\n{"name": "calculator", "arguments": {"expression": "17*23"}}\n</tool_call>'
NOTE = "Learning rate was halved at step 12, *by hand*."
ALARMS = {
    "zero_variance": "zero_variance_frac is 0.97, above tripwires.max_zero_variance_frac = 0.95",
    "reply_collapse": "common_reply_frac is 0.40: different prompts get one wrong reply",
    "logprob_drift": f"drift_mean_nats is 0.09 {HOSTILE}",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class RichRuns:
    """Where the runs are; each is in `root`."""

    root: Path
    whole: RunDir
    """Finished. Its last rollouts are those of `last_rollouts`; of the step before two were discarded."""
    other: RunDir
    """Finished too: another seed, another learning rate, and better."""
    imitated: RunDir
    """Learned from demonstrations, so it has no rollouts."""
    begun: RunDir
    """Has not finished a step."""


def make_runs(root: Path) -> RichRuns:
    """Write the runs below `root`."""
    whole, other = (make_record(root, SIZE, name=name, seed=seed) for seed, name in enumerate("ab"))
    with whole, whole.begin_attempt().log_path.open("w") as log:
        log.write("the log of an attempt\n")
        tell_events(whole)
    tokenizer = Tokenizer.load(tiny_tokenizer(root / "tokenizer"))
    shutil.copy(root / "tokenizer" / "tokenizer.json", whole.path / TOKENIZER_NAME)
    # Written anew: the other steps are links to the first ones.
    last = whole.rollouts_path(LAST)
    last.unlink()
    rollouts = last_rollouts(tokenizer)
    write_rollouts(last, rollouts)
    discarded = whole.discarded_path(LAST - 1)
    discarded.parent.mkdir()
    write_rollouts(discarded, [replace(one, advantages=(), status="filtered") for one in rollouts[:2]])
    (whole.path / "notes.md").write_text(f"# Note\n\n{NOTE} {HOSTILE}\n")
    spec = other.spec_path.read_text()
    other.spec_path.write_text(spec + "lr = 2e-5\n")
    return RichRuns(root=root, whole=whole, other=other, imitated=_imitate(root), begun=_begin(root))


def tell_events(run: RunDir) -> None:
    """Write alarms of several causes, a resume and a notice."""
    for number, (cause, detail) in enumerate(ALARMS.items()):
        run.events.append(
            Event(
                kind=EventKind.TRIPWIRE,
                step=10 + number,
                cause=cause,
                detail=detail,
                example_ids=tuple(f"{one:016x}" for one in range(3)),
            )
        )
    run.events.append(
        Event(kind=EventKind.GATE, step=0, cause="gold", detail="20 of 20 gold answers are right")
    )
    run.events.append(
        Event(kind=EventKind.RESUME, step=20, cause="checkpoint", detail="goes on from step 20")
    )
    run.events.append(Event(kind=EventKind.NOTICE, step=20, cause="software", detail="numpy is another one"))


def last_rollouts(tokenizer: Tokenizer) -> list[StoredRollout]:
    """Return a group of single turns, one with a conversation, one that was lost, one of hostile texts."""
    rng = random.Random(0)
    long = "x" * 1_000_000
    sums = [
        _attempt(tokenizer, rng, 0, "What is 5 + 7?", [f"the answer is {answer}."], reward=reward)
        for answer, reward in (("12", 1.0), ("13", 0.0), ("zwölf 🎉", 0.0), ("12", 1.0))
    ]
    talk = ["What is 17 * 23?", TOOL_CALL, "<|start|>tool\n391<|end|>\n<|start|>assistant\n", "It is 391."]
    conversation = [_attempt(tokenizer, rng, 1, talk[0], talk[1:], reward=1.0) for _ in range(2)]
    lost = [
        _attempt(tokenizer, rng, 2, "Write a program.", ["while True: pass"], reward=None, status="failed")
    ]
    texts = [HOSTILE, ESCAPES, REVERSED, f"{long[:4000]} {HOSTILE}"]
    hostile = [
        _attempt(tokenizer, rng, 3, f"{HOSTILE} {ESCAPES}", [text], reward=0.0, status="skipped")
        for text in texts
    ]
    return [*sums, *conversation, *lost, *hostile, _tell_long(hostile[-1], long)]


def _tell_long(like: StoredRollout, text: str) -> StoredRollout:
    """Return a rollout whose prompt is one line of a megabyte."""
    prompt = Turn(role="prompt", text=text, token_ids=np.arange(4, dtype=np.int32))
    rollout = replace(like.rollout, turns=(prompt, like.rollout.turns[-1]))
    return replace(like, rollout=rollout)


def _attempt(
    tokenizer: Tokenizer,
    rng: random.Random,
    number: int,
    prompt: str,
    told: list[str],
    *,
    reward: float | None,
    status: str = "trained",
) -> StoredRollout:
    """Return an attempt: `told` alternates between the policy and what it was told."""
    turns = [Turn(role="prompt", text=prompt, token_ids=tokenizer.encode(prompt))]
    advantages: list[FloatArray | None] = [None]
    for index, text in enumerate(told):
        ids = tokenizer.encode(text)
        if index % 2:
            turns.append(Turn(role="prompt", text=text, token_ids=ids))
            advantages.append(None)
            continue
        logprobs = np.log([1.0 - 0.95 * rng.random() for _ in ids]).astype(np.float32)
        credit = np.full(len(ids), 0.5 if reward else -0.5, dtype=np.float32)
        # One token with the strongest colours.
        logprobs[0], credit[0] = -12.0, 8.0 * credit[0]
        turns.append(
            Turn(
                role="assistant",
                text=text,
                token_ids=ids,
                logprobs=logprobs,
                policy_version=LAST - 1,
                finish_reason=FinishReason.EOS,
            )
        )
        advantages.append(credit)
    outcome = (
        Outcome.lost(FailureOwner.INFRA, "timeout", "the sandbox did not answer")
        if reward is None
        else Outcome(
            parts={"correct": reward}, is_correct=reward > 0, format_ok=True, extracted=told[-1].split()[-1]
        )
    )
    rollout = Rollout(
        example=make_example("sums", {"number": number}, "12"),
        step=LAST - 1,
        sample_index=rng.randrange(8),
        turns=tuple(turns),
        outcome=outcome,
        sampling=Sampling(),
        seconds={"generate": 1.5, "verify": 0.01},
    )
    is_trained = status == "trained"
    return StoredRollout(
        rollout=rollout, advantages=tuple(advantages) if is_trained else (), status=status, staleness=1
    )


def _imitate(root: Path) -> RunDir:
    spec = (
        'name = "imitated"\n[model]\nuri = "tiny"\n[task]\nname = "sums"\n[train]\nterms = "sft"\nsteps = 3\n'
    )
    run = RunDir.create(root, "imitated", spec, "sft", {})
    with run:
        attempt = run.begin_attempt()
        for step in range(1, 4):
            told = {"loss": 2.0 / step, "num_demonstrations": 8.0, "grad_norm": 1.0, "seconds_step": 2.0}
            run.metrics.append(step, told)
        run.end_attempt(attempt, cause="finished", exit_code=0, step=3)
        run.mark_finished()
    return run


def _begin(root: Path) -> RunDir:
    run = RunDir.create(root, "begun", 'name = "begun"\n[train]\nsteps = 3\n', "begun", {})
    with run:
        run.begin_attempt()
    return run


def append_step(run: RunDir, step: int, **changed: float) -> None:
    """Write one more step's numbers, as a training process does."""
    log = MetricsLog(run.path / "metrics.jsonl")
    log.append(step, make_metrics(step, SIZE, random.Random(step)) | changed)
    log.close()


def cut_back(run: RunDir, step: int) -> None:
    """Cut the logs back, as a resume does."""
    MetricsLog(run.path / "metrics.jsonl").truncate_after(step)
