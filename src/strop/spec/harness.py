"""How lm-eval is run: its tasks, its engine and further arguments."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, field_validator

from strop.spec.base import Section, SpecConflict, expert

GIVEN_BY_STROP = frozenset(
    {
        *("--model", "--model_args", "--tasks", "--num_fewshot", "--seed", "--output_path", "--log_samples"),
        *("--confirm_run_unsafe_code", "--include_path", "--limit", "--use_cache", "--config", "--samples"),
        *("-m", "-M", "-a", "-t", "-f", "-L", "-o", "-s", "-c", "-C", "-E"),
        *("--predict_only", "-x", "--help", "-h"),
    }
)
"""Words of `lm_eval run` that settings stand for, or after which there is no score."""


class HarnessSpec(Section):
    """Settings of lm-eval and its engine; not used in training."""

    tasks: tuple[str, ...] = Field(
        default=(),
        strict=False,
        description="lm-eval's tasks, groups or tags; a file that lists some is evaluated by lm-eval.",
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
        description="Solved examples shown before each question. none = as in the table of"
        " docs/evaluation.md, or as lm-eval's task says.",
    )
    max_reply_tokens: int | None = Field(
        default=None,
        ge=1,
        description="Most tokens of a reply. none = as in the table of docs/evaluation.md, or as lm-eval's"
        " task says.",
        json_schema_extra=expert("long thoughts need more room than published scores gave"),
    )
    max_model_tokens: int | None = Field(
        default=None,
        ge=2,
        description="Most tokens of prompt and reply together. none = the model's context.",
        json_schema_extra=expert("long contexts take memory that short tasks do not need"),
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
        description="GPUs that share one copy of the model. With vLLM the other GPUs hold further copies.",
        json_schema_extra=expert("a large model does not fit one GPU"),
    )
    include: str | None = Field(
        default=None,
        min_length=1,
        description="Folder, or s3:// prefix, of your own task files for lm-eval (YAML), and of data sets in"
        " folders with their names on the hub, such as openai/gsm8k, which go before the hub's. none = the"
        " hub's only.",
        json_schema_extra=expert("lm-eval supports custom task files, and jobs without network need data"),
    )
    model_args: str | None = Field(
        default=None,
        pattern=r"^\w+=",
        description="Further arguments of the engine: of vLLM's server ('max_num_seqs=64'), else of lm-eval's"
        " class for it. none = none.",
        json_schema_extra=expert("each engine has arguments of its own"),
    )
    arguments: tuple[str, ...] = Field(
        default=(),
        strict=False,
        description="Further arguments of `lm_eval run`, such as ['--apply_chat_template', '--gen_kwargs',"
        " 'temperature=0.6,do_sample=true', '--batch_size', '16'].",
        json_schema_extra=expert("lm-eval has options without a setting here"),
    )
    seed: int = Field(
        default=42,
        ge=0,
        description="Seed of all of lm-eval's random choices, few-shot examples included.",
        json_schema_extra=expert("published scores differ in the examples that were shown"),
    )

    @field_validator("arguments")
    @classmethod
    def _check_arguments(cls, words: tuple[str, ...]) -> tuple[str, ...]:
        # lm-eval completes abbreviations.
        taken = [
            word
            for word in words
            if word.startswith("-")
            and any(
                given == (name := word.partition("=")[0]) or (name[2:] and given.startswith(name))
                for given in GIVEN_BY_STROP
            )
        ]
        if taken:
            raise SpecConflict(
                {"harness.arguments": taken[0]},
                "strop gives it itself, and the later of two would win without a word",
                allowed="words that no setting of harness stands for",
                next_step="set it in the section harness, or by eval.num_examples, model.dtype and --out",
            )
        return words
