"""Attacks on every backend, judged by what is seen from outside, that measure how well sandboxes hold.

`attack_sandboxes` makes each attack of `ATTACKS` on a fresh sandbox with another one beside it, and looks
afterwards for what is left. An attack ends blocked, contained, detected or exposed (`Code`); which of these
is the worst that it may be follows from what isolation the sandbox says it reached. Attacks are bounded,
and reach nothing but what the suite itself has laid out.
"""

from strop.sandbox.attack.contract import Attack, Code
from strop.sandbox.attack.run import ATTACKS, BackendVerdict, Verdict, attack_sandboxes, choose_attacks

__all__ = ["ATTACKS", "Attack", "BackendVerdict", "Code", "Verdict", "attack_sandboxes", "choose_attacks"]
