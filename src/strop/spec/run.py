"""The whole run: its sections, and the constraints between them."""

from __future__ import annotations

from typing import Any

from pydantic import Field, field_validator, model_validator

from strop.spec.algorithm import AlgorithmSpec
from strop.spec.base import Section, SpecConflict, to_name
from strop.spec.engine import EngineSpec, PlacementSpec, RaySpec, SamplingSpec
from strop.spec.harness import HarnessSpec
from strop.spec.job import JobSpec
from strop.spec.judge import judge_sections
from strop.spec.layout import Layout, lay_out
from strop.spec.model import LoraSpec, ModelSpec, ReferenceSpec, TeacherSpec
from strop.spec.objectives import (
    Mode,
    choose_mode,
    require_acting_settings,
    require_exact_skipping,
    require_pairs,
    require_read_settings,
    require_short_sequences,
    require_teacher,
)
from strop.spec.offline import DpoSpec, SftSpec
from strop.spec.output import OutputSpec, StoreSpec, TrackersSpec
from strop.spec.parts import needs_ray
from strop.spec.sandboxing import RuntimeSpec
from strop.spec.task import TaskSpec
from strop.spec.train import EvalSpec, OptimizerSpec, TrainSpec, TripwireSpec
from strop.user_code import CodeRef, is_code


class RunSpec(Section):
    """The complete settings of a run."""

    name: str = Field(
        pattern=r"^[a-z0-9][a-z0-9-]{0,39}$",
        description="The run's name, used for folders and jobs: lowercase letters, digits and hyphens, 40 at"
        " most, not starting with a hyphen. Capitals become lowercase, other characters a hyphen.",
    )
    seed: int = Field(
        default=0,
        ge=0,
        lt=2**63,
        description="Seed of every random choice in the run.",
    )
    model: ModelSpec = Field(default=ModelSpec(), description="Which model is trained.")
    task: TaskSpec = Field(description="What the model practises.")
    sampling: SamplingSpec = Field(default=SamplingSpec(), description="How rollouts are drawn.")
    algorithm: AlgorithmSpec = Field(default=AlgorithmSpec(), description="What counts as better.")
    lora: LoraSpec = Field(default=LoraSpec(), description="Whether adapters are trained, and which.")
    reference: ReferenceSpec = Field(
        default=ReferenceSpec(), description="Which model the policy is held close to."
    )
    optimizer: OptimizerSpec = Field(default=OptimizerSpec(), description="How gradients move the weights.")
    train: TrainSpec = Field(default=TrainSpec(), description="How long and how wide the run is.")
    sft: SftSpec = Field(default=SftSpec(), description="What is imitated, alone or beside the rollouts.")
    dpo: DpoSpec = Field(default=DpoSpec(), description="Which pairs are preferred, and how.")
    teacher: TeacherSpec = Field(default=TeacherSpec(), description="Who teaches, and how.")
    eval: EvalSpec = Field(default=EvalSpec(), description="How the held-out examples are looked at.")
    harness: HarnessSpec = Field(
        default=HarnessSpec(), description="How lm-eval is asked, in the file of an evaluation."
    )
    engine: EngineSpec = Field(default=EngineSpec(), description="How rollouts are generated.")
    placement: PlacementSpec = Field(default=PlacementSpec(), description="Where the roles live.")
    ray: RaySpec = Field(default=RaySpec(), description="How Ray is started, for placement.kind = 'ray'.")
    runtime: RuntimeSpec = Field(default=RuntimeSpec(), description="Who serves sandboxes to the run.")
    tripwires: TripwireSpec = Field(default=TripwireSpec(), description="Which trouble is watched for.")
    output: OutputSpec = Field(default=OutputSpec(), description="Where the run is written.")
    store: StoreSpec = Field(default=StoreSpec(), description="Where models and data are kept.")
    trackers: TrackersSpec = Field(
        default=TrackersSpec(), description="Which programs of others show the run, and what they are sent."
    )
    job: JobSpec = Field(default=JobSpec(), description="What a job of this run asks for.")

    @property
    def has_demonstrations(self) -> bool:
        """Whether demonstrations are read, for imitation or for distillation."""
        is_taught = self.train.terms == "distill" and self.sft.source is not None
        return self.train.has_sft or is_taught

    @property
    def scores_start(self) -> bool:
        """Whether every batch is scored once more, by the weights at which its ratios start.

        An algorithm of the user's is taken to start where the catalog's do.
        """
        # A penalty in the reward is that of the policy that the batch began with.
        is_penalized = self.algorithm.whitened == "rpp" and self.reference.kl_beta > 0.0
        own: Mode = "bypass" if self.algorithm.name in ("dppo", "ipo_mask") else "single"
        is_apart = choose_mode(self.algorithm.mode or own, self.train) == "decoupled"
        return self.train.terms in ("rl", "rl+sft") and (is_apart or is_penalized)

    @property
    def needs_reference(self) -> bool:
        """Whether a reference model is used during the run."""
        return self.train.terms in ("rl", "rl+sft") and self.reference.kl_beta > 0.0

    @property
    def frozen_models(self) -> dict[str, str | None]:
        """The frozen models by role; None stands for the model that the run starts from.

        Pairs without a reference of their own are scored by the policy, before its first step.
        """
        has_own = self.train.terms == "dpo" and self.reference.model is not None
        found = {"reference": self.reference.model} if self.needs_reference or has_own else {}
        if self.has_teacher and self.teacher.source != "current":
            found["teacher"] = self.teacher.model
        return found

    @property
    def has_teacher(self) -> bool:
        """Whether there is a teacher."""
        return self.train.has_rl and self.teacher.source != "none"

    @field_validator("name", mode="before")
    @classmethod
    def _to_name(cls, name: Any) -> Any:
        return to_name(name) if isinstance(name, str) else name

    @model_validator(mode="after")
    def _check_group_size(self) -> RunSpec:
        is_compared = self.train.terms in ("rl", "rl+sft") and not self.algorithm.takes_single_rollouts
        if is_compared and self.train.group_size < 2:
            raise SpecConflict(
                {
                    "train.group_size": self.train.group_size,
                    "algorithm.name": self.algorithm.name,
                },
                "every advantage would be zero, because a rollout is compared with the others of its prompt",
                allowed="2 rollouts per prompt or more, or algorithm.advantage = 'rpp'",
                next_step="set train.group_size to 8",
            )
        return self

    @model_validator(mode="after")
    def _check_single_rollouts(self) -> RunSpec:
        wanted = self.algorithm.zero_variance
        is_alone = self.train.has_rl and self.train.group_size < 2
        if is_alone and self.algorithm.takes_single_rollouts and wanted in ("drop", "resample"):
            raise SpecConflict(
                {
                    "algorithm.zero_variance": wanted,
                    "train.group_size": self.train.group_size,
                },
                "every group would be left out, because a single rollout differs from no other",
                allowed="algorithm.zero_variance = 'keep' where prompts have one rollout each",
                next_step="remove algorithm.zero_variance",
            )
        return self

    @model_validator(mode="after")
    def _check_engine(self) -> RunSpec:
        if self.engine.kind == "vllm" and self.placement.kind == "inline":
            raise SpecConflict(
                {"engine.kind": self.engine.kind, "placement.kind": self.placement.kind},
                "vLLM runs in a process of its own",
                allowed="engine.kind = 'vllm' with another placement than 'inline'",
                next_step="leave placement.kind out",
            )
        return self

    @model_validator(mode="after")
    def _check_cpu_nodes(self) -> RunSpec:
        has_command = self.job.cpu_command is not None or self.runtime.serve == "cpu-nodes"
        is_used = has_command or needs_ray(self.task) or bool(self.placement.rollout_workers)
        if not has_command <= bool(self.job.cpu_nodes) <= is_used:
            raise SpecConflict(
                {
                    "job.cpu_nodes": self.job.cpu_nodes,
                    "job.cpu_command": self.job.cpu_command,
                    "runtime.serve": self.runtime.serve,
                },
                "nodes and what runs on them belong together",
                allowed="CPU nodes with a command, runtime.serve = 'cpu-nodes', or work for the run's Ray",
                next_step="set the other one too",
            )
        return self

    @model_validator(mode="after")
    def _check_layout(self) -> RunSpec:
        lay_out(self)
        return self

    @property
    def layout(self) -> Layout:
        """The placement of every role on the nodes of the job."""
        return lay_out(self)

    @model_validator(mode="after")
    def _check_terms(self) -> RunSpec:
        terms, source = self.train.terms, self.sft.source
        if self.train.has_sft and source is None:
            raise SpecConflict(
                {"train.terms": terms, "sft.source": source},
                "there is nothing to imitate",
                allowed="a data file or the folder of a run in sft.source, or train.terms = 'rl'",
                next_step="set sft.source",
            )
        if source is not None and not self.has_demonstrations:
            raise SpecConflict(
                {"train.terms": terms, "sft.source": source},
                "the demonstrations would not be trained on",
                allowed="train.terms = 'sft', 'rl+sft' or 'distill' with demonstrations",
                next_step="set train.terms, or set sft.source to none",
            )
        if self.sft.weight != 1.0 and not self.train.has_rl:
            raise SpecConflict(
                {"train.terms": terms, "sft.weight": self.sft.weight},
                "there is no other term that it could be weighed against",
                allowed="sft.weight = 1.0 where demonstrations are the only term",
                next_step="change optimizer.lr, or set train.terms to 'rl+sft'",
            )
        return self

    @model_validator(mode="after")
    def _check_objectives(self) -> RunSpec:
        require_acting_settings(self)
        require_exact_skipping(self)
        require_short_sequences(self)
        require_teacher(self)
        require_read_settings(self)
        require_pairs(self)
        return self

    @model_validator(mode="after")
    def _check_demonstrations(self) -> RunSpec:
        sft, default = self.sft, SftSpec()
        names = ("min_reward", "max_per_example") if sft.is_from_file else ("train_on",)
        given = {f"sft.{name}": getattr(sft, name) for name in names}
        changed = {key: value for key, value in given.items() if value != getattr(default, key[4:])}
        if sft.source is not None and changed:
            kind = "rollouts of a run" if sft.is_from_file else "rows of a data file"
            raise SpecConflict(
                {"sft.source": sft.source, **changed},
                f"the setting chooses among {kind}, and the source has none",
                allowed="min_reward and max_per_example for a run, train_on for a data file",
                next_step=f"remove {', '.join(changed)}, or name another source",
            )
        return self

    @model_validator(mode="after")
    def _check_staleness(self) -> RunSpec:
        is_turns = self.placement.kind == "inline"
        if self.train.max_staleness and (is_turns or not self.train.has_rl):
            raise SpecConflict(
                {
                    "train.max_staleness": self.train.max_staleness,
                    "placement.kind": self.placement.kind,
                    "train.terms": self.train.terms,
                },
                "nothing is sampled while the learner works: engine and learner are one process, or there are"
                " no rollouts",
                allowed="max_staleness = 0, or rollouts from an engine in a process of its own",
                next_step="leave placement.kind out, or set train.max_staleness to 0",
            )
        return self

    @model_validator(mode="after")
    def _check_judges(self) -> RunSpec:
        for judge in judge_sections(self.task):
            if not judge.can_judge_itself and last_name(judge.judge_model) == last_name(self.model.uri):
                raise SpecConflict(
                    {"task.judge_model": judge.judge_model, "model.uri": self.model.uri},
                    "the model would be judged by itself",
                    allowed="a judge that is another model, or task.can_judge_itself = true",
                    next_step="name another judge",
                )
        return self

    @model_validator(mode="after")
    def _check_sandboxes(self) -> RunSpec:
        if self.placement.kind == "inline" and needs_ray(self.task):
            raise SpecConflict(
                {"task.sandbox": "ray", "placement.kind": "inline"},
                "a run in one process has no Ray that could place its sandboxes",
                allowed="task.sandbox = 'ray' with placement.kind = 'ray'",
                next_step="leave placement.kind out, or remove task.sandbox",
            )
        return self

    @model_validator(mode="after")
    def _check_sampling(self) -> RunSpec:
        sampling = self.sampling
        if sampling.temperature == 0.0:
            raise SpecConflict(
                {"sampling.temperature": sampling.temperature},
                "all rollouts of a prompt would be equal",
                allowed="a temperature above 0 for training; greedy decoding is for evaluation",
                next_step="set sampling.temperature to 1.0",
            )
        given: dict[str, float] = {}
        if sampling.top_p < 1.0:
            given["sampling.top_p"] = sampling.top_p
        if sampling.top_k is not None:
            given["sampling.top_k"] = sampling.top_k
        if given:
            raise SpecConflict(
                given,
                "tokens are drawn from a part of the vocabulary that the trainer does not know",
                allowed="the whole vocabulary for training: sampling.top_p = 1.0, sampling.top_k = none",
                next_step="remove the setting; evaluation and sampling from the command line may cut",
            )
        return self

    @model_validator(mode="after")
    def _check_sizes(self) -> RunSpec:
        num_train = self.task.num_train
        if self.train.has_rl and num_train is not None and num_train < self.train.prompts_per_step:
            raise SpecConflict(
                {"train.prompts_per_step": self.train.prompts_per_step},
                f"task {self.task.name} has {num_train} examples to train on, fewer than one step asks for",
                allowed=f"1 to {num_train}",
                next_step=f"set train.prompts_per_step to {num_train} or make the task larger",
            )
        num_held_out, wanted = self.task.num_held_out, self.eval.num_examples
        if num_held_out is not None and wanted is not None and wanted > num_held_out:
            raise SpecConflict(
                {"eval.num_examples": wanted, "task.num_held_out": num_held_out},
                "fewer examples are held out than asked for",
                allowed=f"1 to {num_held_out}, or none for all",
                next_step="remove eval.num_examples or raise task.num_held_out",
            )
        return self

    @model_validator(mode="after")
    def _check_schedule(self) -> RunSpec:
        num_steps = self.train.num_optimizer_steps
        if self.optimizer.warmup_steps >= num_steps:
            raise SpecConflict(
                {"optimizer.warmup_steps": self.optimizer.warmup_steps, "train.steps": self.train.steps},
                f"the run would end before the learning rate is reached, after {num_steps} optimizer steps",
                allowed=f"0 to {num_steps - 1} warm-up steps",
                next_step="lower optimizer.warmup_steps or raise train.steps",
            )
        limit, reply = self.train.micro_batch_tokens, self.task.max_reply_tokens
        if limit is not None and reply is not None and limit <= reply:
            raise SpecConflict(
                {"train.micro_batch_tokens": limit, "task.max_reply_tokens": reply},
                "a prompt and one full reply would not fit",
                allowed=f"more than {reply} tokens, or none to derive it",
                next_step="remove train.micro_batch_tokens",
            )
        return self


def last_name(model: str) -> str:
    """Return the last part of a model's id or address."""
    return model.rstrip("/").rpartition("/")[2].rpartition(":")[2].partition("==")[0].lower()


def code_of(spec: RunSpec) -> list[CodeRef]:
    """Return the user's code that a run needs: the task's and the algorithm's."""
    own = [CodeRef.parse(spec.algorithm.name)] if is_code(spec.algorithm.name) else []
    return own + spec.task.user_code
