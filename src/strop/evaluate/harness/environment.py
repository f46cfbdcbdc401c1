"""What lm-eval needs installed, in an environment of its own."""

from __future__ import annotations

from strop.store.python_environment import PythonEnvironment

# torch first and alone: this exact pin is offered as a CPU build where one is kept. math-verify, its parser's
# runtime and langdetect decide verdicts. Tried together with Python 3.11 on 2026-11-21.
LM_EVAL = PythonEnvironment(
    name="lm-eval-0.4.13",
    folder="harness",
    pip_steps=(
        ("torch==2.13.0",),
        (
            *("lm_eval[hf,math,ifeval]==0.4.13", "transformers==5.23.0", "accelerate==1.15.0"),
            *("datasets==5.2.0", "evaluate==0.4.6", "math-verify==0.9.0", "sympy==1.14.0"),
            *("antlr4-python3-runtime==4.11.0", "langdetect==1.0.9", "nltk==3.10.4"),
        ),
        # For punkt_tab alone, which ifeval judges sentences with and no package of nltk's own has.
        ("--no-deps", "llama-index-core==0.14.25"),
    ),
    nltk_data="llama_index/core/_static/nltk_cache",
)
