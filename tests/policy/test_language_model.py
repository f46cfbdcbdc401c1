"""A model directory is loaded whole and computed as its authors meant, or refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from strop.errors import ConfigError
from strop.policy.language_model import LanguageModel
from strop.policy.learner import Learner
from strop.policy.scoring import score_replies
from strop.spec.train import OptimizerSpec
from tests.policy.worlds import World, load_model, make_model, reinforce


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"model_type": "no-such-model"}, "no-such-model"),
        # Without a row: torch asserts it, where other wrong values of a config are ValueErrors.
        ({"pad_token_id": 262}, "[Pp]adding_idx"),
        (None, "cannot be loaded as a causal language model"),
    ],
)
def test_what_is_no_model_is_refused(tmp_path: Path, change: dict[str, object] | None, named: str) -> None:
    path = make_model(tmp_path) / "config.json"
    if change is None:
        path.unlink()
    else:
        path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(ConfigError, match=named):
        load_model(tmp_path)


def test_a_reply_is_scored_token_by_token(tmp_path: Path) -> None:
    model = load_model(make_model(tmp_path))
    plain_ids = np.array([3, 260, 0, 7], dtype=np.int32)
    prompt_ids = np.array([100, 50], dtype=np.int32)
    actual = score_replies(model, prompt_ids, [plain_ids], 0.7)[0]
    model.module.set_attn_implementation("eager")
    token_ids = torch.tensor([*prompt_ids.tolist(), *plain_ids.tolist()])
    with torch.no_grad():
        logits = model.module(input_ids=token_ids[None], use_cache=False).logits[0] / 0.7
    expected = torch.log_softmax(logits, dim=-1)[torch.arange(1, 5), token_ids[2:]]
    assert actual.tolist() == pytest.approx(expected.tolist(), abs=1e-5)


@pytest.mark.parametrize("may_fuse", [False, True])
def test_a_terminator_that_is_read_moves_its_embedding_although_it_is_also_the_pad_id(
    tmp_path: Path, may_fuse: bool
) -> None:
    # Chat prompts are full of terminators; transformers gives the embedding of the pad id no gradient.
    path = make_model(tmp_path, tie_word_embeddings=False)
    config = json.loads((path / "config.json").read_text())
    assert config["pad_token_id"] == config["eos_token_id"] == 260
    model = LanguageModel.load(path, dtype=torch.float32, may_fuse=may_fuse)
    table = model.module.get_input_embeddings().weight
    with torch.no_grad():
        table[260] = table[9]  # It was made as zeros, where the norm bends sharply.
    group = replace(World().packed(3, [2]), prompt_ids=np.array([5, 260, 7], dtype=np.int32))
    learner = Learner(model, OptimizerSpec())
    gradients = learner.gradients([group], temperature=1.0, token_terms=reinforce)
    gradient = gradients["model.embed_tokens.weight"][260]
    # A step back and one ahead along the gradient: the loss, 0.1 per nat, changes by the norm per unit.
    losses = []
    for step in (-0.003, 0.006):
        with torch.no_grad():
            table[260] += step * gradient / gradient.norm()
        losses.append(
            -0.1 * float(score_replies(model, group.prompt_ids, [group.replies[0].token_ids], 1.0)[0].sum())
        )
    assert (losses[1] - losses[0]) / 0.006 == pytest.approx(float(gradient.norm()), rel=0.02)


def test_greedy_replies_are_scored_at_temperature_one(tmp_path: Path) -> None:
    model = load_model(make_model(tmp_path))
    ids = np.array([3, 4], dtype=np.int32)
    at_0, at_1 = (score_replies(model, ids, [ids], temperature)[0] for temperature in (0.0, 1.0))
    assert at_0.tolist() == at_1.tolist()
