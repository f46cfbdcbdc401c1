"""The reward of the benchmark's arithmetic task, for arms that do not have strop's task.

Standard library only: rivals' interpreters import it.
"""

from __future__ import annotations

import random
import re

NUMBER = re.compile(r"-?\d+")


def last_number_reward(text: str, answer: str) -> float:
    """Return 1 if the last integer of the text is the answer, else 0. No integer scores 0."""
    numbers = NUMBER.findall(text)
    return float(bool(numbers) and int(numbers[-1]) == int(answer))


def forced_rewards(num_groups: int, group_size: int, seed: int) -> list[float]:
    """Return rewards that give every group variance: half of each group 1, half 0, shuffled.

    Shapes: flat, groups one after the other.
    """
    generator = random.Random(seed)
    rewards: list[float] = []
    for _ in range(num_groups):
        group = [float(index < group_size // 2) for index in range(group_size)]
        generator.shuffle(group)
        rewards += group
    return rewards


def zero_variance_frac(rewards_PG: list[float], group_size: int) -> float:
    """Return the fraction of groups whose rewards are all equal (z)."""
    groups = [rewards_PG[start : start + group_size] for start in range(0, len(rewards_PG), group_size)]
    return sum(max(group) == min(group) for group in groups) / len(groups)


def signal_tokens(rewards_PG: list[float], lengths_PG: list[int], group_size: int) -> int:
    """Count completion tokens whose advantage is not zero, from the rewards of their group."""
    total = 0
    for start in range(0, len(rewards_PG), group_size):
        rewards_G = rewards_PG[start : start + group_size]
        mean = sum(rewards_G) / len(rewards_G)
        if max(rewards_G) == min(rewards_G):
            continue
        lengths_G = lengths_PG[start : start + group_size]
        total += sum(n for n, reward in zip(lengths_G, rewards_G, strict=True) if reward != mean)
    return total
