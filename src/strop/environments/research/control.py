"""Two control tasks: a car too weak for its hill (`mcar`), and a pole on a cart (`cpole`).

The workspace has a simulator of the machine for practice; the judged machine runs in the judge's process.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from strop.environments.research.contract import (
    Instance,
    Marks,
    Phase,
    Play,
    as_index,
    as_number,
    cheating_sources,
    load_function,
    play_with,
    seed_stream,
)

_ARTEFACT = "controller.py"
_NUM_CARS = {Phase.DEV: 16, Phase.SEALED: 64}
_NUM_POLES = {Phase.DEV: 25, Phase.SEALED: 100}
CAR_STEPS, POLE_STEPS = 999, 500


@dataclass(frozen=True, kw_only=True, slots=True)
class Car:
    """The hill; the defaults are the reference instance's."""

    power: float = 0.0015
    slope: float = 0.0025

    def start(self, rng: np.random.Generator, num: int) -> np.ndarray:
        """Return cars in the valley, (N, 2): place and speed."""
        return np.column_stack([rng.uniform(-0.6, -0.4, num), np.zeros(num)])

    def move(self, cars: np.ndarray, action_N: np.ndarray) -> np.ndarray:
        """Return the cars a step later."""
        place, speed = cars.T
        speed = np.clip(speed + self.power * action_N - self.slope * np.cos(3 * place), -0.07, 0.07)
        place = np.clip(place + speed, -1.2, 0.6)
        return np.column_stack([place, np.where((place <= -1.2) & (speed < 0), 0.0, speed)])

    def _push(self, cars: np.ndarray, action_N: np.ndarray) -> tuple[np.ndarray, float]:
        """Move the cars a step; return those that are not yet at the top, and the step's reward."""
        cars = self.move(cars, action_N)
        is_there = cars[:, 0] >= 0.45
        return cars[~is_there], 100.0 * is_there.sum() - 0.1 * (action_N**2).sum()

    def drive(self, cars: np.ndarray) -> Play:
        """Drive cars in parallel; the score is the mean of 100 at the top less a tenth of each push squared.

        Raises: ArtefactRefused.
        """
        total, num = 0.0, len(cars)
        for _ in range(CAR_STEPS):
            replies = yield [[car] for car in cars.round(6).tolist()]
            # Clipped before its cost is counted: no action costs more than the strongest.
            action_N = np.clip(list(map(as_number, replies)), -1.0, 1.0)
            cars, earned = self._push(cars, action_N)
            total += earned
            if not len(cars):
                break
        return float(total) / num

    def value_of(self, strength: float, cars: np.ndarray) -> float:
        """Return the mean return of pushing with a fixed strength in the direction of motion."""
        total, num = 0.0, len(cars)
        for _ in range(CAR_STEPS):
            action_N = np.where(cars[:, 1] >= 0, strength, -strength)
            cars, earned = self._push(cars, action_N)
            total += earned
            if not len(cars):
                break
        return float(total) / num


_PUMPING = '''"""A driver to improve."""


def act(state):
    """Return the push, -1 to 1. `state` is [place, speed]."""
    return {strength} if state[1] >= 0 else -{strength}
'''
_CAR_SIMULATOR = '''"""The car, to practise with: episode(act) returns what one drive earns."""
import math
import random


def episode(act, rng=random):
    place, speed, total = rng.uniform(-0.6, -0.4), 0.0, 0.0
    for _ in range({steps}):
        push = min(1.0, max(-1.0, act([place, speed])))
        total -= 0.1 * push * push
        speed = min(0.07, max(-0.07, speed + {power} * push - {slope} * math.cos(3 * place)))
        place = min(0.6, max(-1.2, place + speed))
        if place <= -1.2 and speed < 0:
            speed = 0.0
        if place >= 0.45:
            return total + 100.0
    return total


if __name__ == "__main__":
    from controller import act

    print(sum(episode(act) for _ in range(20)) / 20)
'''


def make_car(seed: int) -> Instance:
    """Make an instance of `mcar`."""
    rng = seed_stream("mcar", seed, "parameters")
    car = Car(power=round(rng.uniform(0.0011, 0.0016), 5), slope=round(rng.uniform(0.0022, 0.0027), 5))
    sealed = car.start(seed_stream("mcar", seed, Phase.SEALED), _NUM_CARS[Phase.SEALED])
    strengths = (0.1, 0.14, 0.17, 0.2, 0.24, 0.28, 0.33, 0.4, 0.5)
    strength = max(strengths, key=lambda strength: car.value_of(strength, sealed))

    starter = _PUMPING.format(strength=1.0)
    return Instance(
        task="mcar",
        statement="A car in a valley is too weak to drive straight up the hill on its right. Improve"
        f" act(state) in {_ARTEFACT}, which returns the push of a step. A drive earns 100 on the top, less"
        f" 0.1 times the square of each push, and ends after {CAR_STEPS} steps; simulator.py is the same"
        " car. The score is the mean over many drives.",
        files={
            _ARTEFACT: starter.encode(),
            "simulator.py": _CAR_SIMULATOR.format(steps=CAR_STEPS, power=car.power, slope=car.slope).encode(),
        },
        artefact=_ARTEFACT,
        marks=Marks(
            floor=0.0,
            baseline=car.value_of(1.0, sealed),
            ceiling=100.0,
            ceiling_kind="bound",
            limit=100.0,
        ),
        oracle=_PUMPING.format(strength=strength).encode(),
        cheats={
            **cheating_sources("act", starter),
            "does nothing": b"def act(state):\n    return 0\n",
        },
        function="act",
        play=lambda phase: car.drive(car.start(seed_stream("mcar", seed, phase), _NUM_CARS[phase])),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Pole:
    """The cart; the defaults are the reference instance's."""

    force: float = 10.0
    half_length: float = 0.5
    delay: int = 0
    """Steps until a push takes effect; before the first, the cart is pushed left and right in turn."""

    def start(self, rng: np.random.Generator, num: int) -> np.ndarray:
        """Return carts, (N, 4): place, speed, angle and angular speed."""
        return rng.uniform(-0.05, 0.05, (num, 4))

    def move(self, carts: np.ndarray, push_N: np.ndarray) -> np.ndarray:
        """Return the carts a step later; a push is 0, to the left, or 1."""
        place, speed, angle, turning = carts.T
        force = np.where(push_N == 1, self.force, -self.force)
        sine, cosine = np.sin(angle), np.cos(angle)
        pushed = (force + 0.1 * self.half_length * turning**2 * sine) / 1.1
        turn = (9.8 * sine - cosine * pushed) / (self.half_length * (4 / 3 - 0.1 * cosine**2 / 1.1))
        gain = pushed - 0.1 * self.half_length * turn * cosine / 1.1
        return np.column_stack(
            [place + 0.02 * speed, speed + 0.02 * gain, angle + 0.02 * turning, turning + 0.02 * turn]
        )

    def balance(self, carts: np.ndarray) -> Play:
        """Balance poles in parallel; the score is the mean number of steps that they stand.

        Raises: ArtefactRefused.
        """
        total, num = 0, len(carts)
        felt = [np.full(num, step % 2) for step in range(self.delay)]
        for _ in range(POLE_STEPS):
            replies = yield [[cart] for cart in carts.round(6).tolist()]
            felt.append(np.array([as_index(reply, 2) for reply in replies]))
            carts = self.move(carts, felt[0])
            total += len(carts)
            stands = (np.abs(carts[:, 0]) <= 2.4) & (np.abs(carts[:, 2]) <= np.radians(12))
            carts, felt = carts[stands], [pushes[stands] for pushes in felt[1:]]
            if not len(carts):
                break
        return total / num


_LEANING = '''"""A controller to improve."""


def act(state):
    """Return 0 to push to the left, 1 to the right. `state` is [place, speed, angle, its speed]."""
    return 1 if state[2] > 0 else 0
'''
_BALANCING = """def act(state):
    return 1 if sum(gain * one for gain, one in zip({gains}, state)) > 0 else 0
"""
_GAINS = ((0.1, 0.5, 8.0, 1.5), (0.1, 0.3, 8.0, 2.5), (0.05, 0.2, 8.0, 3.5), (0.02, 0.1, 6.0, 3.0))
_POLE_SIMULATOR = '''"""The pole, to practise with: episode(act) returns for how many steps it stands."""
import math
import random


def episode(act, rng=random):
    state = [rng.uniform(-0.05, 0.05) for _ in range(4)]
    felt = [step % 2 for step in range({delay})]
    for step in range({steps}):
        felt.append(act(list(state)))
        place, speed, angle, turning = state
        force = {force} if felt.pop(0) == 1 else -{force}
        sine, cosine = math.sin(angle), math.cos(angle)
        pushed = (force + 0.1 * {half_length} * turning**2 * sine) / 1.1
        turn = (9.8 * sine - cosine * pushed) / ({half_length} * (4 / 3 - 0.1 * cosine**2 / 1.1))
        gain = pushed - 0.1 * {half_length} * turn * cosine / 1.1
        state = [place + 0.02 * speed, speed + 0.02 * gain, angle + 0.02 * turning, turning + 0.02 * turn]
        if abs(state[0]) > 2.4 or abs(state[2]) > math.radians(12):
            return step + 1
    return {steps}


if __name__ == "__main__":
    from controller import act

    print(sum(episode(act) for _ in range(20)) / 20)
'''


def make_pole(seed: int) -> Instance:
    """Make an instance of `cpole`."""
    rng = seed_stream("cpole", seed, "parameters")
    pole = Pole(
        force=round(rng.uniform(8.0, 12.0), 1),
        half_length=round(rng.uniform(0.4, 0.8), 2),
        delay=int(rng.integers(0, 3)),
    )

    def play(phase: Phase) -> Play:
        return pole.balance(pole.start(seed_stream("cpole", seed, phase), _NUM_POLES[phase]))

    def value_of(source: str) -> float:
        return play_with(play(Phase.SEALED), load_function(source.encode(), "act"))

    candidates = (_BALANCING.format(gains=gains) for gains in _GAINS)
    oracle = next(
        (source for source in candidates if value_of(source) >= POLE_STEPS),
        _BALANCING.format(gains=_GAINS[0]),
    )
    return Instance(
        task="cpole",
        statement="A pole stands on a cart that is pushed to the left or to the right in each step."
        f" Improve act(state) in {_ARTEFACT}, which returns 0 or 1. A push is felt {pole.delay} steps"
        " after act was asked. An episode ends when the pole leans by 12 degrees, the cart is 2.4 from"
        f" the middle, or after {POLE_STEPS} steps; simulator.py is the same machine. The score is the"
        " mean number of steps over many episodes.",
        files={
            _ARTEFACT: _LEANING.encode(),
            "simulator.py": _POLE_SIMULATOR.format(
                delay=pole.delay, steps=POLE_STEPS, force=pole.force, half_length=pole.half_length
            ).encode(),
        },
        artefact=_ARTEFACT,
        marks=Marks(
            floor=value_of("def act(state):\n    return 1\n"),
            baseline=value_of(_LEANING),
            ceiling=float(POLE_STEPS),
            ceiling_kind="exact",
            limit=float(POLE_STEPS),
        ),
        oracle=oracle.encode(),
        cheats={
            **cheating_sources("act", _LEANING),
            "always right": b"def act(state):\n    return 1\n",
            "stands up its copy": b"def act(state):\n    state[:] = [0.0] * 4\n    return 1\n",
        },
        function="act",
        play=play,
    )
