"""Tests of replies that are chosen by their likelihood instead of written."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer as FastTokenizer
from tokenizers import decoders, models

from strop.engine.native import NativeEngine
from strop.environments import SingleTurn, run_rollout
from strop.environments.choices import choose, encode_choices
from strop.errors import DataError
from strop.policy.language_model import DTYPES, LanguageModel
from strop.policy.scoring import score_reply
from strop.rollout import PROMPT_TOO_LONG, FinishReason, Rollout, Sampling, Split
from strop.tasks import PromptFormat, Task, build_task
from strop.tasks.mmlu import MmluChoiceSpec
from strop.tokenizer import Tokenizer
from tests.fixtures.builders import plan_for
from tests.fixtures.dummy_engine import DummyEngine
from tests.fixtures.tiny_tokenizer import tiny_tokenizer

ROW = {"question": "Which is odd?", "subject": "law", "choices": ["2", "4", "5", "6"], "answer": 2}
Likelihood = Callable[[str, str], float]


@pytest.fixture
def task(tmp_path: Path) -> Task:
    (tmp_path / "test.jsonl").write_text(json.dumps(ROW) + "\n")
    return build_task(MmluChoiceSpec(name="mmlu-choice", source=str(tmp_path)))


@pytest.fixture
def tokenizer(tmp_path: Path) -> Tokenizer:
    return Tokenizer.load(tiny_tokenizer(tmp_path / "tokenizer"))


def attempt(
    task: Task,
    tokenizer: Tokenizer,
    likelihood: Likelihood,
    *,
    prompt_format: PromptFormat = PromptFormat.BASE,
    max_positions: int | None = None,
) -> Rollout:
    plan = plan_for(
        task.examples(Split.HELD_OUT)[0],
        max_reply_tokens=task.limits.max_reply_tokens,
        step=3,
        run_seed=9,
        sampling=Sampling(temperature=0.7),
        max_positions=max_positions,
        prompt_format=prompt_format,
    )
    engine = DummyEngine(tokenizer, [], likelihood=likelihood)
    engine.policy_version = 11
    return asyncio.run(run_rollout(SingleTurn(task), engine, tokenizer, plan))


def prefer(letter: str) -> Likelihood:
    return lambda prompt, reply: -1.0 if letter in reply else -2.0


@pytest.mark.parametrize(("letter", "reward"), [("A", 0.0), ("C", 1.0)])
def test_the_likeliest_choice_is_the_reply(
    task: Task, tokenizer: Tokenizer, letter: str, reward: float
) -> None:
    rollout = attempt(task, tokenizer, prefer(letter))
    prompt, reply = rollout.turns
    assert prompt.text.endswith("D. 6\nAnswer:")
    assert (reply.text, reply.finish_reason, reply.policy_version) == (letter, FinishReason.CHOSEN, 11)
    # In plain text a space stands before the choice; the tiny tokenizer has one token for each of both.
    assert tokenizer.decode(reply.token_ids) == f" {letter}"
    assert reply.logprobs is not None
    assert reply.logprobs.tolist() == [-1.0, -1.0]
    assert (rollout.outcome.reward, rollout.outcome.truncated) == (reward, False)
    # Nothing was drawn, whatever the plan says of drawing.
    assert rollout.sampling == Sampling(temperature=0.0)
    # Two tokens at -1 for the chosen letter, two at -2 for each other one.
    assert rollout.outcome.metrics == {
        f"choice_{index}_nats": -2.0 if name == letter else -4.0 for index, name in enumerate("ABCD")
    }


def test_in_a_chat_the_choice_stands_at_the_beginning_of_the_reply(task: Task, tokenizer: Tokenizer) -> None:
    rollout = attempt(task, tokenizer, prefer("B"), prompt_format=PromptFormat.CHAT)
    prompt, reply = rollout.turns
    assert prompt.text.endswith("<|start|>assistant\n")
    assert tokenizer.decode(reply.token_ids) == reply.text == "B"


def test_of_equal_choices_the_first_is_taken(task: Task, tokenizer: Tokenizer) -> None:
    assert attempt(task, tokenizer, lambda prompt, reply: -1.0).turns[-1].text == "A"


def test_a_likelihood_that_is_no_number_has_no_score(task: Task, tokenizer: Tokenizer) -> None:
    outcome = attempt(task, tokenizer, lambda prompt, reply: math.nan).outcome
    assert outcome.reward is None
    assert outcome.failure is not None
    assert outcome.failure.owner == "engine"


def test_room_is_needed_for_the_choice_alone(task: Task, tokenizer: Tokenizer) -> None:
    (prompt, reply) = attempt(task, tokenizer, prefer("C")).turns
    needed = len(prompt.token_ids) + len(reply.token_ids)
    assert attempt(task, tokenizer, prefer("C"), max_positions=needed).outcome.reward == 1.0
    lost = attempt(task, tokenizer, prefer("C"), max_positions=needed - 1).outcome
    assert lost.failure is not None
    assert lost.failure.kind == PROMPT_TOO_LONG
    assert f"a reply of 2 exceed the model's {needed - 1} positions" in lost.failure.detail


@pytest.mark.parametrize("choices", [("A",), ("A", ""), ("A", "AB"), ("A", "A")])
def test_choices_that_cannot_be_compared_are_refused(tokenizer: Tokenizer, choices: tuple[str, ...]) -> None:
    with pytest.raises(
        DataError, match=r"^the choices \['A'.* Allowed: two choices or more .* Next: correct"
    ):
        encode_choices(tokenizer, "Q:", choices, PromptFormat.BASE)


def merging_tokenizer(folder: Path) -> Tokenizer:
    """Return a tokenizer that writes ': ' and a letter as one token."""
    tiny_tokenizer(folder)
    settings = json.loads((folder / "tokenizer.json").read_text())
    vocab = {"Q": 0, ":": 1, " ": 2, "A": 3, "B": 4, " B": 5, ": B": 6}
    fast = FastTokenizer(models.BPE(vocab=vocab, merges=[(" ", "B"), (":", " B")]))
    fast.decoder = decoders.Fuse()
    made = json.loads(fast.to_str())
    made["added_tokens"] = settings["added_tokens"]
    (folder / "tokenizer.json").write_text(json.dumps(made))
    return Tokenizer.load(folder)


def test_a_token_of_the_prompt_that_a_choice_would_join_goes_to_every_choice(tmp_path: Path) -> None:
    tokenizer = merging_tokenizer(tmp_path)
    assert tokenizer.encode("Q: A").tolist() == [0, 1, 2, 3]
    assert tokenizer.encode("Q: B").tolist() == [0, 6]
    encoded = encode_choices(tokenizer, "Q:", ("A", "B"), PromptFormat.BASE)
    # Behind 'Q', not behind 'Q:': what is compared is what each whole text is written with.
    assert encoded.context_ids.tolist() == [0]
    assert [reply.tolist() for reply in encoded.replies] == [[1, 2, 3], [6]]


def test_a_space_at_the_end_of_the_prompt_stays_there(tokenizer: Tokenizer) -> None:
    encoded = encode_choices(tokenizer, "Q: ", ("A", "B"), PromptFormat.CHAT)
    assert tokenizer.decode(encoded.context_ids) == "Q: "
    assert [tokenizer.decode(reply) for reply in encoded.replies] == ["A", "B"]


def test_a_model_scores_all_choices_in_one_forward_as_one_by_one(
    tiny_model_dir: Path, tokenizer: Tokenizer
) -> None:
    model = LanguageModel.load(tiny_model_dir, dtype=DTYPES["float32"])
    encoded = encode_choices(tokenizer, "Which is it? Answer:", ("A", "no", "B or C"), PromptFormat.BASE)
    num_fed: list[int] = []
    feed = model.trunk

    def count(token_ids: object, *rest: object) -> object:
        num_fed.append(len(token_ids))  # type: ignore[arg-type]
        return feed(token_ids, *rest)  # type: ignore[arg-type]

    model.trunk = count  # type: ignore[method-assign, assignment]
    completion, nats = asyncio.run(choose(NativeEngine(model, tokenizer), encoded))
    # The prompt once, and each choice without its last token, which predicts nothing.
    assert num_fed == [len(encoded.context_ids) + sum(len(reply) - 1 for reply in encoded.replies)]
    alone = [score_reply(model, encoded.context_ids, reply, 1.0) for reply in encoded.replies]
    assert nats == pytest.approx([float(scores.sum()) for scores in alone], abs=1e-4)
    best = int(np.argmax(nats))
    assert completion.text == encoded.texts[best]
    assert completion.token_ids.tolist() == encoded.replies[best].tolist()
