"""Attacks on every backend, judged by observations from outside, that test the isolation of sandboxes.

`attack_sandboxes` runs each attack of `ATTACKS` in a fresh sandbox with a control sandbox beside it, and then
looks for leftovers. An attack ends blocked, contained, detected or exposed (`Code`); the worst acceptable
code follows from the isolation that the sandbox reports. Attacks are bounded, and target only the suite's own
bait.
"""

from strop.sandbox.attack.contract import Attack, Code
from strop.sandbox.attack.run import ATTACKS, BackendVerdict, Verdict, attack_sandboxes, choose_attacks

__all__ = ["ATTACKS", "Attack", "BackendVerdict", "Code", "Verdict", "attack_sandboxes", "choose_attacks"]
