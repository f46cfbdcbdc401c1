"""Two repeated matrix games against a partner with a short memory: `bos` and `ipd`.

A partner is a finite-state chain, so backward induction finds the best play against it. It moves in the
judge's process, with the judge's random draws.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from strop.environments.research.contract import (
    Instance,
    Marks,
    Phase,
    Play,
    as_index,
    cheating_sources,
    seed_stream,
)

_ARTEFACT = "player.py"
_NUM_GAMES = {Phase.DEV: 1000, Phase.SEALED: 4000}
_NUM_RECORDED = 400
NUM_STRATEGIES = 11
"""Strategies of the prisoner's partner, which draws one in each round."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Game:
    """A game against one partner. Moves are 0 and 1; shapes: S = states of the partner."""

    payoff: np.ndarray
    """(2, 2): the player's payoff by its move and the partner's."""
    prob_S: np.ndarray
    """Probability that the partner plays 1."""
    next_S: np.ndarray
    """(S, 2, 2): its next state, by the player's move and its own. It begins in state 0."""
    num_rounds: int

    def best(self) -> tuple[float, list[np.ndarray], float]:
        """Return the best play's value per round, its moves by round and state, its deviation per game."""
        value_S = square_S = np.zeros(len(self.prob_S))
        moves = []
        chances_S = np.stack([1 - self.prob_S, self.prob_S], axis=1)
        for _ in range(self.num_rounds):
            later = value_S[self.next_S]
            gains_S = (chances_S[:, None, :] * (self.payoff + later)).sum(axis=2)
            move_S = gains_S.argmax(axis=1)
            squares = self.payoff**2 + 2 * self.payoff * later + square_S[self.next_S]
            picked = np.arange(len(move_S)), move_S
            square_S = (chances_S[:, None, :] * squares).sum(axis=2)[picked]
            value_S = gains_S[picked]
            moves.append(move_S)
        variance = float(square_S[0] - value_S[0] ** 2)
        return float(value_S[0]) / self.num_rounds, moves[::-1], max(0.0, variance) ** 0.5 / self.num_rounds

    def value_of(self, act: Callable[[int, int, int], int]) -> float:
        """Return the value per round of a player that sees the round and both last moves (-1: none)."""
        reached = {(0, -1, -1): 1.0}
        total = 0.0
        for turn in range(self.num_rounds):
            following: dict[tuple[int, int, int], float] = {}
            for (state, mine, theirs), chance in reached.items():
                move = act(turn, mine, theirs)
                for reply, part in ((1, self.prob_S[state]), (0, 1 - self.prob_S[state])):
                    total += chance * part * self.payoff[move, reply]
                    key = (int(self.next_S[state, move, reply]), move, reply)
                    following[key] = following.get(key, 0.0) + chance * part
            reached = following
        return float(total) / self.num_rounds

    def play(self, rng: np.random.Generator, num_games: int) -> Play:
        """Play games in parallel; the score is the mean payoff per round. Raises: ArtefactRefused."""
        states = np.zeros(num_games, dtype=int)
        histories: list[list[list[int]]] = [[] for _ in range(num_games)]
        total = 0.0
        for _ in range(self.num_rounds):
            # The partner's draw comes first: the player cannot influence it.
            theirs = (rng.random(num_games) < self.prob_S[states]).astype(int)
            replies = yield [[history] for history in histories]
            mine = np.array([as_index(reply, 2) for reply in replies])
            total += float(self.payoff[mine, theirs].sum())
            states = self.next_S[states, mine, theirs]
            for history, pair in zip(
                histories, zip(mine.tolist(), theirs.tolist(), strict=True), strict=True
            ):
                history.append(list(pair))
        return total / (num_games * self.num_rounds)

    def record(self, rng: np.random.Generator, num_games: int) -> bytes:
        """Return games of a random player, one a line."""
        lines = []
        for _ in range(num_games):
            state, history = 0, []
            for _ in range(self.num_rounds):
                mine, theirs = int(rng.random() < 0.5), int(rng.random() < self.prob_S[state])
                history.append([mine, theirs])
                state = int(self.next_S[state, mine, theirs])
            lines.append(json.dumps(history))
        return ("\n".join(lines) + "\n").encode()


def sexes_game(
    *, high: float = 2.0, low: float = 1.0, loyalty: float = 0.8, key_round: int = 0, num_rounds: int = 10
) -> Game:
    """Return a battle of the sexes. The partner plays 1 up to `key_round`, counted from 0.

    In each later round it repeats the player's move of `key_round` with the probability `loyalty`.
    """
    num_openings = key_round + 1
    seen = (num_openings, num_openings + 1)
    prob_S = np.array([1.0] * num_openings + [1 - loyalty, loyalty])
    next_S = np.empty((num_openings + 2, 2, 2), dtype=int)
    for state in range(num_openings + 2):
        for move in (0, 1):
            is_key = state == key_round
            next_S[state, move] = seen[move] if is_key else state + 1 if state < key_round else state
    payoff = np.array([[high, 0.0], [0.0, low]])
    return Game(payoff=payoff, prob_S=prob_S, next_S=next_S, num_rounds=num_rounds)


def prisoners_game(
    *,
    weights: np.ndarray | None = None,
    temptation: float = 5.0,
    punishment: float = 1.0,
    num_rounds: int = 10,
) -> Game:
    """Return a prisoner's dilemma, 1 is to defect. The partner draws one of eleven strategies in each round.

    A state is (the player's last move, the partner's, whether the player ever defected, its move before).
    """
    chances = np.full(NUM_STRATEGIES, 1 / NUM_STRATEGIES) if weights is None else weights
    prob_S, next_S = np.zeros(17), np.zeros((17, 2, 2), dtype=int)
    for state in range(17):
        mine, theirs, has_defected, before = (
            ((state - 1) >> np.arange(3, -1, -1)) & 1 if state else (0, 0, 0, 0)
        )
        prob_S[state] = chances @ (_later(mine, theirs, has_defected, before) if state else _OPENING)
        for move in (0, 1):
            for reply in (0, 1):
                next_S[state, move, reply] = 1 + 8 * move + 4 * reply + 2 * (has_defected | move) + mine
    payoff = np.array([[3.0, 0.0], [temptation, punishment]])
    return Game(payoff=payoff, prob_S=prob_S, next_S=next_S, num_rounds=num_rounds)


_OPENING = np.array([0, 1, 1, 0.5, 0, 0, 0, 0, 0.5, 1, 0])
"""Probability that each strategy defects in the first round."""


def _later(mine: int, theirs: int, has_defected: int, before: int) -> np.ndarray:
    twice = mine & before
    return np.array(
        [
            1 / 6 + 0.4 * theirs,
            0.1 * (1 - mine) + mine,
            1,
            0.5,
            has_defected,
            mine != theirs,
            twice,
            mine,
            0.5,
            mine * (1 - twice),
            0,
        ]
    )


_BEST_PLAY = '''"""Plays what backward induction found."""
MOVES = {moves}
NEXT = {following}


def act(history):
    """Return the move for the partner's state."""
    state = 0
    for mine, theirs in history:
        state = NEXT[state][mine][theirs]
    return MOVES[len(history)][state]
'''


_COPYING = '''"""A player to improve."""


def act(history):
    """Return 0 or 1. `history` lists the rounds so far, each as [my move, the partner's move]."""
    return history[-1][1] if history else 1
'''
_DEFECTING = _COPYING.replace("history[-1][1] if history else 1", "1")


def make_sexes(seed: int) -> Instance:
    """Make an instance of `bos`."""
    rng = seed_stream("bos", seed, "parameters")
    while True:
        game = sexes_game(
            high=round(rng.uniform(1.6, 3.0), 1),
            loyalty=rng.uniform(0.7, 0.9),
            key_round=int(rng.integers(0, 3)),
            num_rounds=int(rng.integers(8, 17)),
        )
        copying = game.value_of(lambda turn, mine, theirs: 1 if turn == 0 else theirs)
        if game.best()[0] > copying + 0.1:
            break
    return _make(
        "bos",
        seed,
        game,
        starter=_COPYING,
        floor=0.0,
        baseline=copying,
        story="Two players meet at one of two places, 0 and 1; who comes alone earns nothing.",
    )


def make_prisoners(seed: int) -> Instance:
    """Make an instance of `ipd`."""
    rng = seed_stream("ipd", seed, "parameters")
    while True:
        game = prisoners_game(
            weights=rng.dirichlet(np.full(NUM_STRATEGIES, 2.0)),
            temptation=round(rng.uniform(4.0, 5.5), 1),
            punishment=round(rng.uniform(0.5, 1.2), 1),
            num_rounds=int(rng.integers(8, 17)),
        )
        cooperating, defecting = game.value_of(lambda *_: 0), game.value_of(lambda *_: 1)
        if defecting > cooperating + 0.05 and game.best()[0] > defecting + 0.15:
            break
    return _make(
        "ipd",
        seed,
        game,
        starter=_DEFECTING,
        floor=cooperating,
        baseline=defecting,
        story="A prisoner's dilemma: 0 is to cooperate, 1 to defect.",
    )


def _make(
    task: str, seed: int, game: Game, *, starter: str, floor: float, baseline: float, story: str
) -> Instance:
    best, moves, deviation = game.best()
    oracle = _BEST_PLAY.format(
        moves=[of_round.tolist() for of_round in moves], following=game.next_S.tolist()
    )
    payoffs = "; ".join(
        f"I play {mine}, the partner {theirs}: {game.payoff[mine, theirs]:g}"
        for mine in (0, 1)
        for theirs in (0, 1)
    )
    return Instance(
        task=task,
        statement=f"{story} I earn: {payoffs}. A game has {game.num_rounds} rounds, and the partner"
        f" remembers little of it. Improve act(history) in {_ARTEFACT}; it is called once for each round"
        f" of each of many games. games.jsonl holds {_NUM_RECORDED} games of a random player against the"
        " same partner. The score is the mean payoff per round.",
        files={
            _ARTEFACT: starter.encode(),
            "games.jsonl": game.record(seed_stream(task, seed, "record"), _NUM_RECORDED),
        },
        artefact=_ARTEFACT,
        marks=Marks(
            floor=floor,
            baseline=baseline,
            ceiling=best,
            ceiling_kind="exact",
            standard_error=deviation / _NUM_GAMES[Phase.SEALED] ** 0.5,
        ),
        oracle=oracle.encode(),
        cheats=cheating_sources("act", starter),
        function="act",
        play=lambda phase: game.play(seed_stream(task, seed, phase), _NUM_GAMES[phase]),
    )
