"""The GRPO half of strop's arm: the real training loop, halted between its steps.

As in TRL's arm, the loop runs by itself and a watcher stops it after every step until the harness
asks for the next, so a step is all that strop does for one: generation, verification, credit,
learning, publication, rollouts as Parquet and metrics. The gate has passed before the first step.

Before every step the start's weights are put back, outside the measured time; Adam's moments stay.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from benchmarks import cases
from benchmarks.arms.worker import Channel, Record, WorkerOrder, peak_bytes
from benchmarks.cases import Case
from benchmarks.prompts import Prompt, read_prompts, step_prompts
from benchmarks.verifier import forced_rewards, last_number_reward
from strop.cluster.contract import Roles
from strop.cluster.local import InlinePlacement, LocalLearner
from strop.hardware.number_format import AUTO
from strop.policy.learner import Learner
from strop.record import RunDir
from strop.rollout import Example, Message, Outcome, Split, make_example
from strop.spec.run import RunSpec
from strop.store import ModelHandle
from strop.tasks import Task, TaskLimits
from strop.train.loop import TrainInput, TrainLoop

NEVER = 10**6
"""More steps than any benchmark takes."""
STAGES = {"generate": "t_gen", "verify": "t_verify", "learn": "t_learn", "sync": "t_sync", "other": "t_other"}
METRICS = {
    "num_scored_tokens": "scored_tok",
    "num_signal_tokens": "nonzero_tok",
    "num_positions": "positions_forwarded",
    "zero_variance_frac": "z",
    "reward_mean": "reward_mean",
    "reply_tokens_mean": "Lc_mean",
    "drift_mean_nats": "mismatch_mean",
    "drift_p99_nats": "mismatch_p99",
    "grad_norm": "grad_norm",
}


class BenchmarkTask(Task):
    """The benchmark's prompts as a task; its rewards can be forced to differ in every group."""

    name = "arithmetic"
    version = "benchmark"

    def __init__(self, case: Case, prompts: Sequence[Prompt]) -> None:
        self._case = case
        self._prompts = {self._example(prompt).example_id: prompt for prompt in prompts}
        self._forced: dict[str, list[float]] = {}
        self.limits = TaskLimits(max_reply_tokens=case.max_new_tokens)

    def _example(self, prompt: Prompt) -> Example:
        return make_example(self.name, {"messages": prompt.messages}, prompt.answer)

    def examples(self, split: Split) -> Sequence[Example]:
        """Return all prompts for training; nothing is held out, and nothing is evaluated."""
        is_training = split is Split.TRAIN
        return [self._example(prompt) for prompt in self._prompts.values()] if is_training else []

    def step_examples(self, prompts: Sequence[Prompt]) -> list[Example]:
        """Return the examples of given prompts."""
        return [self._example(prompt) for prompt in prompts]

    def render(self, example: Example) -> tuple[Message, ...]:
        """Return the prompt's messages as they stand."""
        return tuple(Message.from_json(message) for message in self._prompts[example.example_id].messages)

    def force_rewards(self, prompts: Sequence[Prompt], seed: int) -> None:
        """Fix the rewards of the next step's replies: half 1, half 0 in each group."""
        size = self._case.group_size
        rewards = forced_rewards(len(prompts), size, seed)
        for index, example in enumerate(self.step_examples(prompts)):
            self._forced[example.example_id] = rewards[index * size : (index + 1) * size]

    async def verify(self, example: Example, text: str) -> Outcome:
        """Judge by the last number, or hand out the next forced reward of the example's group."""
        reward = last_number_reward(text, example.answer or "")
        if forced := self._forced.get(example.example_id):
            reward = forced.pop()
        return Outcome(parts={"correct": reward}, is_correct=reward == 1.0)

    def gold_replies(self, example: Example) -> tuple[str, ...]:
        """Return the answer itself."""
        return (example.answer or "",)


class BenchmarkSchedule:
    """Serves each step the prompts that every arm gets in it."""

    def __init__(self, case: Case, task: BenchmarkTask, prompts: Sequence[Prompt]) -> None:
        self._case, self._task, self._prompts = case, task, list(prompts)
        self._steps: dict[int, list[Example]] = {}

    def numbered(self, number: int) -> Example:
        """Return the example of a group."""
        step, place = divmod(number, self._case.num_prompts)
        return self.examples(step)[place]

    def examples(self, step: int) -> list[Example]:
        """Return a step's examples, and fix their rewards, once, where the case forces them."""
        if step not in self._steps:
            self._steps[step] = self._make_step(step)
        return self._steps[step]

    def _make_step(self, step: int) -> list[Example]:
        prompts = step_prompts(self._prompts, self._case, step)
        if self._case.rewards == "forced":
            self._task.force_rewards(prompts, self._case.seed + step)
        return self._task.step_examples(prompts)


class StartWeights:
    """A copy of the weights that a learner started with."""

    def __init__(self, learner: Learner) -> None:
        self._learner = learner
        # The learner's own tensors: no public way leads to the masters alone, and none should.
        self._masters = learner._masters
        self._start = {name: master.detach().clone() for name, master in self._masters.items()}

    @torch.no_grad()
    def restore(self) -> None:
        """Put them back into masters and compute copies. Adam's moments stay."""
        for name, parameter in self._learner.model.named_parameters():
            self._masters[name].copy_(self._start[name])
            parameter.copy_(self._start[name])

    @torch.no_grad()
    def distance(self) -> float:
        """Return the L2 distance of the masters from them."""
        norms = [(self._masters[name] - start).norm() for name, start in self._start.items()]
        return float(torch.stack(norms).norm())


class StepGate:
    """Halts the loop between its steps and reports each."""

    def __init__(self, channel: Channel, learner: Learner, settings: Mapping[str, object]) -> None:
        self._channel = channel
        self._settings = dict(settings)
        self._weights = StartWeights(learner)
        self._begun_at = self._cpu_begun_s = 0.0

    def _wait(self) -> None:
        # Blocks the event loop on purpose: between steps nothing of strop may run.
        self._channel.wait_for_step()
        self._weights.restore()
        self._cpu_begun_s, self._begun_at = time.process_time(), time.perf_counter()

    def on_start(self, *, run: str, first_step: int, num_steps: int) -> None:
        """Tell that the first step could begin, and wait for the harness."""
        self._channel.ready(settings=self._settings)
        self._wait()

    def on_step(self, metrics: Mapping[str, float]) -> None:
        """Report the step, and wait for the harness."""
        record: Record = {
            "step_s": time.perf_counter() - self._begun_at,
            "cpu_s": time.process_time() - self._cpu_begun_s,
            **{name: metrics.get(f"seconds_{stage}") for stage, name in STAGES.items()},
            **{name: metrics.get(metric) for metric, name in METRICS.items()},
            "positions_real": metrics.get("num_positions"),
            "peak_bytes": peak_bytes(),
            "update_norm": self._weights.distance(),
        }
        self._channel.reply(record)
        self._wait()

    def _ignore(self, *_: object, **__: object) -> None: ...

    on_event = on_eval = on_end = _ignore


def build_spec(case: Case, dtype: str = AUTO) -> RunSpec:
    """Return the run that a case asks for: same loss, clip and learning rate as TRL's arm."""
    return RunSpec.model_validate(
        {
            "name": "benchmark",
            "seed": case.seed,
            "model": {"dtype": dtype},
            "task": {"name": "arithmetic", "max_reply_tokens": case.max_new_tokens},
            "algorithm": {
                "name": "dapo",
                "clip_low": cases.CLIP_LOW,
                "clip_high": cases.CLIP_HIGH,
                # What the other arms do not do either.
                "zero_variance": "skip",
                "overlong": "keep",
            },
            "optimizer": {"lr": cases.LEARNING_RATE, "max_grad_norm": cases.MAX_GRAD_NORM},
            "train": {
                "steps": NEVER,
                "checkpoint_every": NEVER,
                "prompts_per_step": case.num_prompts,
                "group_size": case.group_size,
                # What is measured is time; the rewards are those of the rivals' arms.
                "accept": "audit.failure_paths@benchmark: the last number, right or wrong, is the reward",
            },
            "eval": {"every": None},
            # Waiting for the harness is no stall.
            "tripwires": {"max_stall_s": None},
        }
    )


def build_loop(channel: Channel, order: WorkerOrder, roles: Roles, run_dir: RunDir) -> TrainLoop:
    """Return a training loop that waits for the harness before each step."""
    prompts = read_prompts(order.prompts_path)
    task = BenchmarkTask(order.case, prompts)
    assert isinstance(roles.learner, LocalLearner)
    loop = TrainLoop(
        TrainInput(
            spec=build_spec(order.case, order.settings["dtype"]),
            task=task,
            roles=roles,
            run_dir=run_dir,
            model_dir=Path(order.model_dir),
            observer=StepGate(channel, roles.learner.local, order.settings),
            evaluate=None,
        )
    )
    # strop shuffles its examples by seed; here every arm must get the same ones in the same step.
    loop._schedule = BenchmarkSchedule(order.case, task, prompts)  # type: ignore[assignment]
    return loop


async def serve_grpo(channel: Channel, order: WorkerOrder, root: Path) -> None:
    """Train step by step, as the harness asks, with a run directory below `root`."""
    spec = build_spec(order.case, order.settings["dtype"])
    placement = InlinePlacement(spec, ModelHandle(path=Path(order.model_dir), digest=""))
    roles = await placement.start()
    try:
        with RunDir.create(root, spec.name, "", "", {}) as run_dir:
            await build_loop(channel, order, roles, run_dir).run()
    finally:
        await placement.stop()
