"""The work of a run, and the time of its rollouts: generating replies and judging them. No torch.

A decode step computes one token of every row, and reads weights and cache once; the longer of the two is its
time, and every layer adds an overhead. Replies are judged by rules, which are quick and run beside the loop;
by programs in sandboxes, one per core of the machine; or by a model over HTTP, with as many concurrent
requests as the task allows. The time of a judge that the run starts follows from its size; that of a judge on
another server is assumed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from strop.plan.roles import RoleCounts, count_rows
from strop.plan.speeds import Speeds
from strop.policy.footprint import COPY_BYTES, ModelSize, cache_bytes, decode_flop, prefill_flop
from strop.spec import RunSpec
from strop.spec.judge import MAX_ANSWER_TOKENS, ROLE, JudgeSettings, is_this_machine, judge_sections
from strop.spec.parts import MixtureSpec
from strop.spec.task import TaskSection

REPLY_LIMIT_FRAC = 0.75
SIGNAL_FRAC = 0.5


@dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    """The quantities that the time of a run depends on."""

    spec: RunSpec
    size: ModelSize
    prompt_tokens_mean: float
    max_reply_tokens: int
    num_eval_examples: int
    num_evals: int
    offline_tokens: float = 0.0
    """Tokens of the demonstrations or pairs of one step, prompts included."""
    offline_scored: float = 0.0
    """Those of them in the loss."""
    reply_tokens_mean: float | None = None
    """None: assumed from the limit."""
    sampling_frac: float = 1.0
    """Share of the steps with rollouts; the other steps of distillation use demonstrations."""
    signal_frac: float = SIGNAL_FRAC
    layout: RoleCounts | None = None
    """None: that of the run file."""
    num_cores: int = 2
    """Of the machine that runs programs to judge them."""
    frozen: Mapping[str, ModelSize] = field(default_factory=dict)
    """Sizes of reference and teacher by role; a missing one counts like the policy."""

    @property
    def reply_tokens(self) -> float:
        """Mean tokens of a reply."""
        assumed = REPLY_LIMIT_FRAC * self.max_reply_tokens
        return assumed if self.reply_tokens_mean is None else self.reply_tokens_mean


@dataclass(frozen=True, kw_only=True, slots=True)
class DecodeSpeed:
    """The times of one engine in seconds."""

    prefill_token_s: float
    token_s: float
    """Arithmetic for one token of one reply."""
    read_s: float
    """Reading the weights and the cache of all rows, per decode step."""
    overhead_s: float
    """Further time per decode step."""
    rows: int
    """Replies decoded at once."""


def decode_speed(work: Work, speeds: Speeds, layout: RoleCounts) -> DecodeSpeed:
    """Return the speed of one engine of the layout. Engines on a processor share it."""
    size, dtype, known = work.size, work.spec.model.dtype, speeds.efficiency
    num_sharing = layout.num_engines if speeds.is_processor else 1
    rows = count_rows(work.spec, layout.num_engines, is_gpu=not speeds.is_processor)
    rate = speeds.gflops * 1e9 * known.decode_frac / num_sharing
    context = work.prompt_tokens_mean + work.reply_tokens / 2
    read = size.num_params * COPY_BYTES[dtype] + cache_bytes(size, dtype, rows, int(context))
    return DecodeSpeed(
        prefill_token_s=prefill_flop(size, 1.0) / rate,
        token_s=(decode_flop(size, 1.0) + attention_flop(size, context)) / rate,
        read_s=num_sharing * read / (speeds.copy_gb_per_s * 1e9),
        overhead_s=size.num_layers * known.decode_layer_s,
        rows=rows,
    )


def generate_s(
    work: Work, speeds: Speeds, layout: RoleCounts, num_rollouts: float, prompt_tokens: float
) -> tuple[float, str]:
    """Return seconds to generate replies, and the bound: arithmetic or memory bandwidth."""
    if not num_rollouts:
        return 0.0, "arithmetic"
    speed = decode_speed(work, speeds, layout)
    reply_tokens = num_rollouts * work.reply_tokens / layout.num_engines
    rows = min(-(-num_rollouts // layout.num_engines), speed.rows)
    # Assume that some reply reaches the limit, and all rows wait for it.
    num_steps = max(reply_tokens / rows, work.max_reply_tokens)
    compute_s, read_s = reply_tokens * speed.token_s, num_steps * speed.read_s
    limit = "arithmetic" if compute_s >= read_s else "memory bandwidth"
    prefill_s = prompt_tokens / layout.num_engines * speed.prefill_token_s
    return prefill_s + max(compute_s, read_s) + num_steps * speed.overhead_s, limit


def attention_flop(size: ModelSize, num_pairs: float) -> float:
    """FLOP of scores and weighted sums: 4 per layer, head value and (query, key) pair."""
    return 4.0 * size.num_layers * size.num_heads * size.head_width * num_pairs


VERIFY_S = 0.0001
"""Judging one reply by rules; numbers take a quarter of it on one AMD core."""
PROGRAM_S = 0.036
"""One program of MBPP's size on one core, with its sandbox: 55 a second on two cores of an AMD EPYC."""
JUDGE_CALL_S = 5.0
"""One answer of a judge on another server; an assumption, not a measurement."""
JUDGE_ANSWER_TOKENS = 150
"""One answer of a judge, a sentence or two and the score; its limit is `MAX_ANSWER_TOKENS`."""
JUDGE_RUBRIC_TOKENS = 200
"""A request to a judge without prompt and reply: 690 characters with the longest built-in rubric."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Assumption:
    """A number in a plan that was not measured for this run."""

    name: str
    value: float
    why: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Judging:
    """The cost of judging in a run, beside its time."""

    programs_per_step: float
    programs_in_run: float
    """Evaluations included."""
    limit_step_s: float | None
    """Seconds of a step if every program ran to its limit; None without programs."""
    calls_per_step: float
    """Requests to judge models. Replies that were judged before are counted, although they need none."""
    calls_in_run: float
    read_tokens_in_run: float
    """Tokens of the requests."""
    written_tokens_in_run: float
    served: tuple[str, ...]
    """Names of the judges on other machines, whose price is unknown."""


def list_shares(task: TaskSection) -> Iterator[tuple[TaskSection, float]]:
    """Yield every section with a judge, and the share of all replies that it judges.

    A part of a mixture judges its own replies.
    """
    if not isinstance(task, MixtureSpec):
        yield task, 1.0
        return
    parts = task.read_parts().values()
    total = sum(part.weight for part in parts)
    for part in parts:
        # Another mode samples by the sizes of the parts, which only the data would tell.
        yield part.task, part.weight / total


def judge_s(work: Work, speeds: Speeds, layout: RoleCounts, num_replies: float) -> float:
    """Return seconds to judge replies, the judges of all sections one after another."""
    return sum(
        _section_s(section, work, speeds, layout, share * num_replies)
        for section, share in list_shares(work.spec.task)
    )


def _section_s(
    section: TaskSection, work: Work, speeds: Speeds, layout: RoleCounts, num_replies: float
) -> float:
    seconds = sum(_judge_s(judge, work, speeds, layout, num_replies) for judge in judge_sections(section))
    if section.runs_programs:
        return seconds + num_replies * PROGRAM_S / max(work.num_cores, 1)
    return seconds or num_replies * VERIFY_S / max(layout.num_workers, 1)


def _judge_s(
    judge: JudgeSettings, work: Work, speeds: Speeds, layout: RoleCounts, num_replies: float
) -> float:
    if judge.judge_url == ROLE:
        engine = work.spec.engine.model_copy(update={"max_num_seqs": judge.judge_concurrency})
        judge_work = replace(
            work,
            spec=work.spec.model_copy(update={"engine": engine}),
            size=work.frozen.get(judge.judge_model, work.size),
            prompt_tokens_mean=_question_tokens(work),
            max_reply_tokens=JUDGE_ANSWER_TOKENS,
            reply_tokens_mean=JUDGE_ANSWER_TOKENS,
        )
        alone = replace(layout, num_engines=1)
        answered_s, _ = generate_s(
            judge_work, speeds, alone, num_replies, num_replies * _question_tokens(work)
        )
    else:
        answered_s = num_replies * JUDGE_CALL_S / judge.judge_concurrency
    return answered_s


def _question_tokens(work: Work) -> float:
    return JUDGE_RUBRIC_TOKENS + work.prompt_tokens_mean + work.reply_tokens


def describe_judging(work: Work) -> Judging | None:
    """Return the cost of judging; None if only rules judge."""
    spec, train = work.spec, work.spec.train
    per_step = work.sampling_frac * train.prompts_per_step * train.group_size if train.has_rl else 0.0
    in_run = train.steps * per_step
    in_run += work.num_evals * work.num_eval_examples * (1 + (spec.eval.num_samples or 0))
    shares = list(list_shares(spec.task))
    programs = sum(share for section, share in shares if section.runs_programs)
    judges = [(judge, share) for section, share in shares for judge in judge_sections(section)]
    calls = sum(share for _, share in judges)
    if not programs and not calls:
        return None
    limit_step_s = None
    if programs:
        # Here: only tasks with programs need this module.
        from strop.tasks.code.extraction import WALL_S

        limit_step_s = programs * per_step * WALL_S / max(work.num_cores, 1)
    return Judging(
        programs_per_step=programs * per_step,
        programs_in_run=programs * in_run,
        limit_step_s=limit_step_s,
        calls_per_step=calls * per_step,
        calls_in_run=calls * in_run,
        read_tokens_in_run=calls * in_run * _question_tokens(work),
        written_tokens_in_run=calls * in_run * JUDGE_ANSWER_TOKENS,
        served=tuple(
            judge.judge_model
            for judge, _ in judges
            if judge.judge_url != ROLE and not is_this_machine(judge.judge_url)
        ),
    )


def list_judge_assumptions(task: TaskSection) -> tuple[Assumption, ...]:
    """Return the assumptions about a task's judges."""
    sections = [section for section, _ in list_shares(task)]
    judges = judge_sections(task)
    assumptions = []
    if any(section.runs_programs for section in sections):
        why = "seconds of one program on one core: 55 a second on two, with programs of MBPP's size"
        assumptions.append(Assumption(name="program_s", value=PROGRAM_S, why=why))
    if any(judge.judge_url != ROLE for judge in judges):
        why = "seconds until a served judge answers; task.judge_concurrency questions are under way at once"
        assumptions.append(Assumption(name="judge_call_s", value=JUDGE_CALL_S, why=why))
    if judges:
        why = f"tokens of a judge's answer, {MAX_ANSWER_TOKENS} at most"
        assumptions.append(Assumption(name="judge_answer_tokens", value=JUDGE_ANSWER_TOKENS, why=why))
    rules = [one for one in sections if not one.runs_programs and not judge_sections(one)]
    if rules:
        why = "seconds to judge one reply by rules"
        if any(section.user_code for section in rules):
            why += "; of your own code nobody knows more"
        assumptions.append(Assumption(name="verify_s", value=VERIFY_S, why=why))
    return tuple(assumptions)
