"""Replies to the rows of `harness_rows`, right and wrong, in forms that models write and graders trip over.

`{}` in a form is the gold answer.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

Calls = Mapping[str, Mapping[str, Any]]
NUMBER_FORMS: Sequence[str] = (
    # What gsm8k_cot shows, and what comes near it.
    *(
        "The answer is {}.",
        "The answer is {}",
        "The answer is {}\n",
        "The answer is ${}.",
        "The answer is: {}.",
    ),
    *("the answer is {}.", "The answer is **{}**.", "The answer is {} dollars.", "The answer is {}%."),
    *(
        "The answer is {},",
        "The answer is -{}.",
        "The answer is +{}.",
        "The answer is {}.00.",
        "The answer is  {}.",
    ),
    *("The answer is\n{}.", "The answer is 3. The answer is {}.", "The answer is {}. The answer is 3."),
    *("The answer is {}; no, 4", "The answer is {}.\u2028And 5", "The answer is {}…", "Answer: {}"),
    "The answer is 3.\n\nQ: And now?\nA: The answer is {}.",
    "The answer is {}. Question: And 4? Answer: #### 4",
    # What gsm8k shows.
    *(
        "#### {}",
        "So it is so.\n#### {}",
        "####{}",
        "### {}",
        "#### ${}",
        "#### {}.00",
        "#### -{}",
        "#### {} km",
    ),
    *("#### {}\n#### 3", "#### 3\n#### {}", "#### {}.", "####  {}", "#### **{}**", "It is {}.\n####"),
    # Numbers in sentences, signs, units, separators.
    *(
        "It is ${} ... done",
        "It is 10-{}",
        "{} + 0 = {}",
        "2 * 3 = {}.",
        "{}",
        "${}",
        " {} ",
        "-{}",
        "- {}",
        "{}.",
    ),
    *(
        "{},",
        "({})",
        "{}, {}",
        "3, {}",
        "{} or 3",
        "{}e3",
        "0{}",
        "{}/1",
        "x={}",
        "{}kg",
        "1{}",
        "{}0",
        "{}-3",
    ),
    *(
        "€{}",
        "{}$",
        "USD{}",
        "about {}!",
        "1.\n2.\n{}",
        "{}:00",
        "\u2212{}",
        "\uff11\uff12 {}",
        "\u0663 {}",
        "²{}",
    ),
    # Boxes, thoughts, tags and nothing.
    *(r"\boxed{{{}}}", r"\boxed{{3}} or \boxed{{{}}}", r"\boxed{{{}}} or \boxed{{3}}", r"$\boxed{{{}}}$"),
    *("<think>The answer is 3.</think>The answer is {}.", "<think>The answer is {}.", "<answer>{}</answer>"),
    *("</s>{}", "{}</s>3", "{}<|im_end|>3", "", "\n\n", " ", "..", "$", ",", "-", "$.,", "no number at all"),
)
FORMULA_FORMS: Sequence[str] = (
    "Final Answer: The final answer is ${}$. I hope it is correct.",
    "Final Answer: The final answer is $7$. I hope it is correct.",
    "Final Answer: The final answer is {}. I hope it is correct.",
    "Final Answer: The final answer is ${}$",
    "final answer: the final answer is ${}$. I hope it is correct.",
    (
        "Final Answer: The final answer is $7$. No.\n"
        "Final Answer: The final answer is ${}$. I hope it is correct."
    ),
    "Final Answer: The final answer is $x = {}$. I hope it is correct.",
    "Final Answer: The final answer is ${}$ dollars. I hope it is correct.",
    r"So it is $\boxed{{{}}}$.",
    r"\boxed{{{}}}",
    r"\boxed{{ {} }}",
    r"$\boxed{{7}}$, no: $\boxed{{{}}}$.",
    r"$\boxed{{{}}}$, no: $\boxed{{7}}$.",
    r"\boxed{{\boxed{{{}}}}}",
    r"\fbox{{{}}}",
    r"\boxed{{{}",
    r"\boxed {}",
    r"\boxed{{}}",
    "I think that it is {}",
    "It is ${}$.",
    "It is $${}$$.",
    r"It is \({}\).",
    r"It is \[ {} \].",
    "With $x = 1$ and $y = 2$ it is ${}$.",
    "It is ${}$, or $7$.",
    "It is $7$, or ${}$.",
    "${}$",
    "{}",
    "-{}",
    "$-{}$",
    "${} \\text{{ cm}}$",
    "${}^\\circ$",
    "$ {} $",
    "**{}**",
    "The answer is {}.",
    "<think>It is $7$.</think>It is ${}$.",
    "<think>It is ${}$.",
    "```latex\n${}$\n```",
    "It costs \\$5, so ${}$.",
    "It costs $5, so {}.",
    "$",
    "$$",
    "",
    "I do not know.",
    "$7$",
    "It is ${}$.\n\nProblem:\nAnd $1 + 1$?\n\nSolution: $2$",
    "It is ${}$.\n\n\nAnd $1 + 1$ is $2$.",
)
MBPP_FORMS: Sequence[str] = (
    "{gold}",
    "{gold}\n[DONE]\nAnd more.",
    "[DONE]\n{gold}",
    "\n\n{gold}\n\n",
    "{gold}   \n  # the end",
    "{crlf}",
    "{tabs}",
    "def helper(x):\n    return x\n\n{gold}",
    "{gold}\n\ndef helper(x):\n    return x",
    "import math\nfrom typing import List\n{gold}",
    "{gold}\nprint({name}(1))",
    "{gold}\nassert {name}(0) == 0",
    "{gold}\nassert {name}(0) == 1",
    "{gold}\nif __name__ == '__main__':\n    raise ValueError",
    "{name} = lambda x: {factor} * x",
    "exec('def {name}(x): return {factor} * x')",
    "class Times:\n    def __call__(self, x):\n        return {factor} * x\n{name} = Times()",
    "{gold}  # é, 東京 and 🙂",
    "FACTOR = {factor}\ndef {name}(x):\n    global FACTOR\n    return FACTOR * x",
    "{gold}\nraise SystemExit",
    "import sys\nsys.exit(0)\n{gold}",
    "import os\nos._exit(0)\n{gold}",
    "input()\n{gold}",
    "{wrong}",
    "import time\ndef {name}(x):\n    while True: time.sleep(1)",
    "def {name}(x):\n    return {name}(x)",
    "def {name}(x):\n    return",
    "def {name}(x)\n    return {factor} * x",
    "    {gold}",
    "```python\n{gold}\n```",
    "```python\n{gold}",
    "{gold}\n```",
    "Here it is:\n{gold}",
    "<think>Easy.</think>\n{gold}",
    "I do not know.",
    "",
)
HUMANEVAL_FORMS: Sequence[str] = (
    "{gold}",
    "{gold}\n\n\n",
    "    y = x\n{gold}",
    "{crlf}",
    "    # é, 東京 and 🙂\n{gold}",
    "{gold}\n\ndef other():\n    return 1\n",
    "{gold}\n\nclass Other:\n    pass\n",
    "{gold}\n\nprint({name}(1))\n",
    "{gold}\n\nif __name__ == '__main__':\n    raise ValueError\n",
    "{gold}\n# done\nnot Python",
    "{gold}\n\nx = 1\n",
    "{gold}\n\nassert False\n",
    "{gold}\n[DONE]\nAnd more.",
    "def {name}(x: int) -> int:\n{gold}",
    "    def inner(y):\n        return y\n    return inner(x) + {summand}\n",
    "    global total\n    total = {summand}\n    return x + total\n",
    "{wrong}",
    "    import time\n    while True: time.sleep(1)\n",
    "    import sys; sys.exit(0)\n{gold}",
    "    raise KeyboardInterrupt\n",
    "    return\n",
    "    pass",
    "",
    "\n",
    "    return (x + {summand}",
    "return x + {summand}\n",
    "  return x + {summand}\n",
    "\treturn x + {summand}\n",
    "```python\n{gold}\n```",
    "```python\ndef {name}(x: int) -> int:\n{gold}```",
    "{gold}\n```\nThat is all.",
    "<think>Easy.</think>\n{gold}",
    "I do not know.",
)
_PAIRED: Sequence[Calls] = (
    {"startend:quotation": {}, "punctuation:no_comma": {}},
    {"change_case:english_lowercase": {}, "keywords:existence": {"keywords": ["salt", "tide"]}},
    {
        "detectable_format:title": {},
        "keywords:frequency": {"keyword": "sea", "frequency": 2, "relation": "at least"},
        "length_constraints:number_words": {"num_words": 5, "relation": "less than"},
    },
)
_PAIRED_REPLIES = (
    "The sea is wide.",
    "sea, salt, tide",
    '"the sea has salt and a tide and is a sea"',
    "* First line\n<<The sea>>\nlast, line",
    "salt tide sea sea",
    "<<sea>> sea",
    "<think>No, thanks.</think>salt tide",
    "<think>salt tide",
    "",
    " ",
)


def instruction_cases() -> list[tuple[Calls, str]]:
    """Return instructions with a reply to each: every instruction alone, and some together."""
    path = Path(__file__).parents[2] / "tasks" / "instructions" / "ifeval_parity.jsonl"
    records = map(json.loads, path.read_text(encoding="utf-8").split("\n")[:-1])
    alone = [({record["id"]: record["arguments"]}, record["text"]) for record in records]
    return alone + [(calls, reply) for calls in _PAIRED for reply in _PAIRED_REPLIES]


def code_reply(form: str, gold: str, name: str, number: int) -> str:
    """Return a form filled with a right program, or a right body; `number` is its factor or summand."""
    places = {
        "gold": gold,
        "wrong": gold.replace("return", "return 1 +"),
        "crlf": gold.replace("\n", "\r\n"),
        "tabs": gold.replace("    ", "\t"),
        "name": name,
        "factor": number,
        "summand": number,
    }
    return form.format(**places)
