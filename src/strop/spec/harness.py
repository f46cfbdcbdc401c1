"""How lm-eval is run: its tasks, its engine and further arguments."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, field_validator

from strop.spec.base import Section, SpecConflict, expert

GIVEN_BY_STROP = frozenset(
    {
        *("--model", "--model_args", "--tasks", "--num_fewshot", "--seed", "--gen_kwargs", "--output_path"),
        *("--log_samples", "--batch_size", "--confirm_run_unsafe_code", "--include_path", "--limit"),
        *(
            "--use_cache",
            "--apply_chat_template",
            "--system_instruction",
            "--config",
            "--samples",
            "--device",
        ),
        *("-m", "-M", "-a", "-t", "-f", "-b", "-L", "-o", "-s", "-c", "-C", "-E"),
        *("--predict_only", "-x", "--help", "-h"),
    }
)
"""Words of `lm_eval run` that settings stand for, or after which there is no score."""


class HarnessSpec(Section):
    """Settings of lm-eval and its engine; not used in training."""

    tasks: tuple[str, ...] = Field(
        default=(),
        strict=False,
        description="lm-eval's tasks, groups or tags; a file that lists some is evaluated by lm-eval. The"
        " tasks in the table of docs/evaluation.md use strop's own examples, others lm-eval's.",
    )
    engine: Literal["auto", "vllm", "hf"] = Field(
        default="auto",
        description="Engine of lm-eval. 'auto' = 'vllm' if it is installed, else 'hf', which is transformers."
        " A running server is given as the model: http://host:port/v1#NAME.",
        json_schema_extra=expert("transformers computes what vLLM only approximates"),
    )
    num_few_shot: int | None = Field(
        default=None,
        ge=0,
        description="Solved examples shown before each question. none = as for published scores, or as"
        " lm-eval's task says.",
    )
    batch_size: str | None = Field(
        default=None,
        pattern=r"^(auto(:[1-9]\d*)?|[1-9]\d*)$",
        description="Requests that lm-eval submits at once: a number, 'auto' or 'auto:N'. none = 'auto' for"
        " vLLM, which batches by itself, '8' for 'hf', '1' for a server.",
        json_schema_extra=expert("engines run out of memory at different sizes"),
    )
    max_model_tokens: int | None = Field(
        default=None,
        ge=2,
        description="Most tokens of prompt and reply together. none = the model's context.",
        json_schema_extra=expert("long contexts take memory that short tasks do not need"),
    )
    max_reply_tokens: int | None = Field(
        default=None,
        ge=1,
        description="Most tokens of a reply. none = the protocol's, or as lm-eval's task says.",
        json_schema_extra=expert("long thoughts need more room than published scores gave"),
    )
    gpu_memory_frac: float | None = Field(
        default=None,
        gt=0.0,
        le=1.0,
        description="Share of a GPU's memory that vLLM uses in total. none = vLLM's own default.",
        json_schema_extra=expert("other programs may share the GPU"),
    )
    tensor_parallel: int = Field(
        default=1,
        ge=1,
        description="GPUs that share one copy of the model; the other GPUs hold further copies.",
        json_schema_extra=expert("a large model does not fit one GPU"),
    )
    chat_template: bool = Field(
        default=False,
        description="Whether prompts use the model's chat template.",
        json_schema_extra=expert("published scores of base models have none"),
    )
    system_prompt: str | None = Field(
        default=None,
        min_length=1,
        description="System prompt. none = no system prompt.",
        json_schema_extra=expert("some models are evaluated with one"),
    )
    include: str | None = Field(
        default=None,
        min_length=1,
        description="Folder of your own task files for lm-eval (YAML). none = lm-eval's tasks only.",
        json_schema_extra=expert("lm-eval supports custom task files"),
    )
    gen_kwargs: str | None = Field(
        default=None,
        pattern=r"^\w+=",
        description="Further generation settings in lm-eval's form: 'temperature=0.6,do_sample=true'. none ="
        " as the task says.",
        json_schema_extra=expert("engines accept different settings, which lm-eval passes through"),
    )
    model_args: str | None = Field(
        default=None,
        pattern=r"^\w+=",
        description="Further arguments of lm-eval's engine: 'max_num_seqs=64,swap_space=4'. none = none.",
        json_schema_extra=expert("each engine of lm-eval has arguments of its own"),
    )
    arguments: tuple[str, ...] = Field(
        default=(),
        strict=False,
        description="Further arguments for `lm_eval run`, such as ['--fewshot_as_multiturn', 'true'].",
        json_schema_extra=expert("lm-eval has options without a setting here"),
    )
    seed: int = Field(
        default=42,
        ge=0,
        description="Seed of all of lm-eval's random choices, few-shot examples included.",
        json_schema_extra=expert("published scores differ in the examples that were shown"),
    )

    @field_validator("batch_size", mode="before")
    @classmethod
    def _take_number(cls, value: object) -> object:
        return str(value) if isinstance(value, int) and not isinstance(value, bool) else value

    @field_validator("arguments")
    @classmethod
    def _check_arguments(cls, words: tuple[str, ...]) -> tuple[str, ...]:
        taken = [word for word in words if word.partition("=")[0] in GIVEN_BY_STROP]
        if taken:
            raise SpecConflict(
                {"harness.arguments": taken[0]},
                "strop gives it itself, and the later of two would win without a word",
                allowed="words that no setting of harness stands for",
                next_step="set it in the section harness, or by eval.num_examples, model.dtype and --out",
            )
        return words
