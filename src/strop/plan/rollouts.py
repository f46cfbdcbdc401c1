"""A run's work, and how long its rollouts take: generating replies, and judging them. No torch.

A decode step computes one token of every row, and reads weights and cache once: the longer of the two sets
its time, and every layer adds an overhead. Replies are judged by rules, which are quick and run beside the
loop; by programs in sandboxes, as many at once as the machine has cores; or by a model that is asked over
HTTP, so many times at once as the task says. Of a judge that the run starts itself the time follows from its
size, of a served one it is assumed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from strop.plan.roles import RoleCounts, count_rows
from strop.plan.speeds import Speeds
from strop.policy.footprint import COPY_BYTES, ModelSize, cache_bytes, decode_flop, prefill_flop
from strop.spec import RunSpec
from strop.spec.judge import MAX_ANSWER_TOKENS, ROLE, LlmJudgeSpec, is_this_machine, judge_sections
from strop.spec.parts import PartedSection
from strop.spec.task import TaskSection

REPLY_LIMIT_FRAC = 0.75
SIGNAL_FRAC = 0.5


@dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    """What the time of a run depends on."""

    spec: RunSpec
    size: ModelSize
    prompt_tokens_mean: float
    max_reply_tokens: int
    num_eval_examples: int
    num_evals: int
    given_tokens: float = 0.0
    """Tokens of the demonstrations or pairs of one step, prompts included."""
    given_scored: float = 0.0
    """Those of them that the loss counts."""
    reply_tokens_mean: float | None = None
    """None: assumed from the limit."""
    sampling_frac: float = 1.0
    """Share of the steps that sample; distillation shows demonstrations in the others."""
    signal_frac: float = SIGNAL_FRAC
    shared_frac: float = 0.0
    """Share of an attempt's tokens that `train.branches` rollouts have in common."""
    layout: RoleCounts | None = None
    """None: as the run file says."""
    num_cores: int = 2
    """Of the machine on which programs are judged."""
    frozen: Mapping[str, ModelSize] = field(default_factory=dict)
    """Sizes of the reference and the teacher by role; one that is not given counts like the policy."""

    @property
    def reply_tokens(self) -> float:
        """Mean tokens of a reply."""
        assumed = REPLY_LIMIT_FRAC * self.max_reply_tokens
        return assumed if self.reply_tokens_mean is None else self.reply_tokens_mean

    @property
    def new_frac(self) -> float:
        """Tokens that are sampled per token of the rollouts: what several share is sampled once."""
        return 1.0 - self.shared_frac * (1.0 - 1.0 / self.spec.train.branches)


@dataclass(frozen=True, kw_only=True, slots=True)
class DecodeSpeed:
    """How long one engine takes for what."""

    prefill_token_s: float
    token_s: float
    """Of arithmetic for one token of one reply."""
    read_s: float
    """Of reading the weights and the cache of all rows, in every decode step."""
    overhead_s: float
    """Of every decode step beside that."""
    rows: int
    """Replies decoded at once."""


def decode_speed(work: Work, speeds: Speeds, layout: RoleCounts) -> DecodeSpeed:
    """Return the speed of one engine among those of the layout. Those on one processor share it."""
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
    """Return seconds to generate replies, and whether arithmetic or memory sets them."""
    if not num_rollouts:
        return 0.0, "arithmetic"
    speed = decode_speed(work, speeds, layout)
    reply_tokens = num_rollouts * work.reply_tokens / layout.num_engines
    rows = min(-(-num_rollouts // layout.num_engines), speed.rows)
    # Some reply is as long as its limit, and all rows wait for it.
    num_steps = max(reply_tokens / rows, work.max_reply_tokens)
    compute_s, read_s = reply_tokens * speed.token_s, num_steps * speed.read_s
    limit = "arithmetic" if compute_s >= read_s else "memory bandwidth"
    prefill_s = prompt_tokens / layout.num_engines * speed.prefill_token_s
    return prefill_s + max(compute_s, read_s) + num_steps * speed.overhead_s, limit


def attention_flop(size: ModelSize, num_pairs: float) -> float:
    """FLOP of scores and weighted sums: 4 per layer, head value and (query, key) pair."""
    return 4.0 * size.num_layers * size.num_heads * size.head_width * num_pairs


VERIFY_S = 0.0001
"""Judging one reply by rules: 10,000 a second, a quarter of what benchmarks/results/verify-* measured."""
PROGRAM_S = 0.036
"""Of one program on one core, its sandbox included: 55 a second on two, benchmarks/results/code-judge-*."""
JUDGE_CALL_S = 5.0
"""Of one answer of a served judge; nobody measured the one that a run asks."""
JUDGE_ANSWER_TOKENS = 150
"""Of one answer, whose limit is `MAX_ANSWER_TOKENS`: a sentence or two, and the score."""
JUDGE_RUBRIC_TOKENS = 200
"""Around prompt and reply in a question: 690 characters with the longest of our own rubrics."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Assumption:
    """A number that was not measured for this run."""

    name: str
    value: float
    why: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Judging:
    """What the judging of a run costs beside its time."""

    programs_per_step: float
    programs_in_run: float
    """Evaluations included."""
    limit_step_s: float | None
    """Seconds of a step if every program ran into its limit; None where none is run."""
    calls_per_step: float
    """Questions to judges that are models. A reply that was judged before costs none, and counts here."""
    calls_in_run: float
    read_tokens_in_run: float
    """Tokens of the questions."""
    written_tokens_in_run: float
    served: tuple[str, ...]
    """Names of the judges that another machine serves, at a price that nobody says here."""
    exceeded: tuple[str, ...]
    """Sentences about judges that may not be asked as often."""


def list_shares(task: TaskSection) -> Iterator[tuple[TaskSection, float]]:
    """Yield every section that judges, and the share of all replies that it judges.

    The parts of a mixture judge their own replies, those of a blend every one.
    """
    if not isinstance(task, PartedSection):
        yield task, 1.0
        return
    parts = task.read_parts()
    is_shared = len(task.posed_parts()) == len(parts)
    # A mixture by the parts' sizes: only the data could tell them.
    weights = {label: float(getattr(part, "weight", 1.0)) for label, part in parts.items()}
    total = sum(weights.values())
    for label, part in parts.items():
        yield part.task, weights[label] / total if is_shared and total else 1.0


def judge_s(work: Work, speeds: Speeds, layout: RoleCounts, num_replies: float) -> float:
    """Return seconds to judge so many replies, with all that judges them at work."""
    return sum(
        _section_s(section, work, speeds, layout, share * num_replies)
        for section, share in list_shares(work.spec.task)
    )


def _section_s(
    section: TaskSection, work: Work, speeds: Speeds, layout: RoleCounts, num_replies: float
) -> float:
    if section.runs_programs:
        return num_replies * PROGRAM_S / max(work.num_cores, 1)
    if not isinstance(section, LlmJudgeSpec):
        return num_replies * VERIFY_S / max(layout.num_workers, 1)
    if section.judge_url == ROLE:
        engine = work.spec.engine.model_copy(update={"max_num_seqs": section.judge_concurrency})
        asked = replace(
            work,
            spec=work.spec.model_copy(update={"engine": engine}),
            size=work.frozen.get(section.judge_model, work.size),
            prompt_tokens_mean=_question_tokens(work),
            max_reply_tokens=JUDGE_ANSWER_TOKENS,
            reply_tokens_mean=JUDGE_ANSWER_TOKENS,
        )
        alone = replace(layout, num_engines=1)
        answered_s, _ = generate_s(asked, speeds, alone, num_replies, num_replies * _question_tokens(work))
    else:
        answered_s = num_replies * JUDGE_CALL_S / section.judge_concurrency
    return (
        max(answered_s, num_replies / section.judge_calls_per_s) if section.judge_calls_per_s else answered_s
    )


def _question_tokens(work: Work) -> float:
    return JUDGE_RUBRIC_TOKENS + work.prompt_tokens_mean + work.reply_tokens


def describe_judging(work: Work, limit_s: float | None) -> Judging | None:
    """Return what judging costs; None where rules judge alone. `limit_s`: of one reply, by its task."""
    spec, train = work.spec, work.spec.train
    per_step = work.sampling_frac * train.prompts_per_step * train.group_size if train.has_rl else 0.0
    in_run = train.steps * per_step
    in_run += work.num_evals * work.num_eval_examples * (1 + (spec.eval.num_samples or 0))
    shares = list(list_shares(spec.task))
    programs = sum(share for section, share in shares if section.runs_programs)
    judges = [(one, share) for one, share in shares if isinstance(one, LlmJudgeSpec)]
    calls = sum(share for _, share in judges)
    if not programs and not calls:
        return None
    longest_s = None
    if programs and limit_s is not None:
        # Here: what runs programs is not loaded for tasks without any.
        from strop.tasks.code.extraction import SPARE_VERIFY_S

        # Of the time that judging a reply may take, what its program may run.
        longest_s = limit_s - SPARE_VERIFY_S if limit_s > SPARE_VERIFY_S else limit_s
    return Judging(
        programs_per_step=programs * per_step,
        programs_in_run=programs * in_run,
        limit_step_s=None if longest_s is None else programs * per_step * longest_s / max(work.num_cores, 1),
        calls_per_step=calls * per_step,
        calls_in_run=calls * in_run,
        read_tokens_in_run=calls * in_run * _question_tokens(work),
        written_tokens_in_run=calls * in_run * JUDGE_ANSWER_TOKENS,
        served=tuple(
            one.judge_model
            for one, _ in judges
            if one.judge_url != ROLE and not is_this_machine(one.judge_url)
        ),
        exceeded=tuple(
            f"about {share * in_run:,.0f} replies of the run are judged by {one.judge_model}, and"
            f" task.max_judge_calls={one.max_judge_calls} ends its questions before; replies behind them have"
            " no score"
            for one, share in judges
            if share * in_run > one.max_judge_calls
        ),
    )


def typical_reply_s(task: TaskSection) -> float:
    """Return seconds until one reply to a task is judged, where nothing is in its way."""
    if judge_sections(task):
        return JUDGE_CALL_S
    is_program = any(section.runs_programs for section, _ in list_shares(task))
    return PROGRAM_S if is_program else VERIFY_S


def list_judge_assumptions(task: TaskSection) -> tuple[Assumption, ...]:
    """Return what is taken for granted of a task's judges."""
    sections = [section for section, _ in list_shares(task)]
    judges = judge_sections(task)
    found = []
    if any(section.runs_programs for section in sections):
        why = "seconds of one program on one core: 55 a second on two, with programs of MBPP's size"
        found.append(Assumption(name="program_s", value=PROGRAM_S, why=why))
    if any(judge.judge_url != ROLE for judge in judges):
        why = "seconds until a served judge answers; task.judge_concurrency questions are under way at once"
        found.append(Assumption(name="judge_call_s", value=JUDGE_CALL_S, why=why))
    if judges:
        why = f"tokens of a judge's answer, {MAX_ANSWER_TOKENS} at most"
        found.append(Assumption(name="judge_answer_tokens", value=JUDGE_ANSWER_TOKENS, why=why))
    plain = [one for one in sections if not one.runs_programs and not isinstance(one, LlmJudgeSpec)]
    if plain:
        why = "seconds to judge one reply by rules"
        if any(one.user_code for one in plain):
            why += "; of your own code nobody knows more"
        found.append(Assumption(name="verify_s", value=VERIFY_S, why=why))
    return tuple(found)
