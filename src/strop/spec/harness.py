"""How lm-eval is asked: its tasks, its engine, what it is given beside them."""

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
    """What lm-eval is asked, and by which engine; no part of training."""

    tasks: tuple[str, ...] = Field(
        default=(),
        strict=False,
        description="Tasks, groups or tags of lm-eval by its names: lm-eval evaluates a file that has some."
        " Those of the table in docs/evaluation.md are asked on strop's own examples, others on lm-eval's.",
    )
    engine: Literal["auto", "vllm", "hf"] = Field(
        default="auto",
        description="Who generates. 'auto' = 'vllm' where it is installed, else 'hf', which is transformers."
        " A running server is named by the model: http://host:port/v1#NAME.",
        json_schema_extra=expert("transformers computes what vLLM only approximates"),
    )
    num_few_shot: int | None = Field(
        default=None,
        ge=0,
        description="Solved examples shown before each question. none = as many as published scores have, or"
        " as lm-eval's task says.",
    )
    batch_size: str | None = Field(
        default=None,
        pattern=r"^(auto(:[1-9]\d*)?|[1-9]\d*)$",
        description="Requests that lm-eval hands over at once: a number, 'auto' or 'auto:N'. none ="
        " 'auto' for vLLM, which batches by itself, '8' for 'hf', '1' for a server.",
        json_schema_extra=expert("engines run out of memory at different sizes"),
    )
    max_model_tokens: int | None = Field(
        default=None,
        ge=2,
        description="Prompt and reply of one request together. none = all positions of the model.",
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
        description="Share of a GPU's memory that vLLM takes for everything. none = vLLM's own default.",
        json_schema_extra=expert("other programs may share the GPU"),
    )
    tensor_parallel: int = Field(
        default=1,
        ge=1,
        description="GPUs that share one copy of the model; the others hold further copies.",
        json_schema_extra=expert("a large model does not fit one GPU"),
    )
    chat_template: bool = Field(
        default=False,
        description="Whether prompts are written by the model's chat template.",
        json_schema_extra=expert("published scores of base models have none"),
    )
    system_prompt: str | None = Field(
        default=None,
        min_length=1,
        description="Text before everything else. none = no such text.",
        json_schema_extra=expert("some models are asked with one"),
    )
    include: str | None = Field(
        default=None,
        min_length=1,
        description="Folder of the user's own task files for lm-eval (YAML). none = lm-eval's tasks alone.",
        json_schema_extra=expert("lm-eval takes task files of the user's own"),
    )
    gen_kwargs: str | None = Field(
        default=None,
        pattern=r"^\w+=",
        description="Further settings of generation as lm-eval takes them: 'temperature=0.6,do_sample=true'."
        " none = as the task says.",
        json_schema_extra=expert("engines differ in what they take, and lm-eval hands it through"),
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
        description="Further words for `lm_eval run`, such as ['--fewshot_as_multiturn', 'true'].",
        json_schema_extra=expert("lm-eval has options that no setting here stands for"),
    )
    seed: int = Field(
        default=42,
        ge=0,
        description="Seed of everything that lm-eval draws, shown examples among it.",
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
