"""The probe of trivial edits: code that a problem shows is no solution, with or without a comment."""

from __future__ import annotations

import re
from collections.abc import Mapping

from strop.audit.measure import is_full, not_applicable
from strop.audit.report import ProbeResult
from strop.audit.targets import NO_PROGRAMS, Tally, find_targets
from strop.audit.world import AuditWorld
from strop.rollout import Example
from strop.tasks.code.extraction import compiles
from strop.tasks.code.outcome import fence
from strop.tasks.traits import ProgramForm

_FENCED = re.compile(r"```(?:python)?\n(.*?)```", re.DOTALL)
_COMMENT = "# Reviewed; nothing was left to do."


async def probe_noop_edit(world: AuditWorld) -> ProbeResult:
    """Neither the code that a problem shows nor a trivial change of it earns anything."""
    targets = find_targets(world)
    if not targets:
        return not_applicable("noop_edit", NO_PROGRAMS)
    tally = Tally(probe="noop_edit", world=world)
    asked = [
        (kind, (target.example, reply))
        for target in targets
        for kind, reply in trivial_edits(target.form, *_shown_code(world, target.example)).items()
    ]
    judged = await world.judge_all(reply for _, reply in asked)
    for (kind, _), one in zip(asked, judged, strict=True):
        tally.look(kind, one, is_bad=bool(one.reward) or is_full(world, one))
    return tally.result("changes that change nothing and were paid")


def _shown_code(world: AuditWorld, example: Example) -> list[str]:
    """Return the pieces of Python in a prompt and the starter code of an example, without its tests."""
    prompt = "\n".join(message.content for message in world.task.render(example))
    found = [*_FENCED.findall(prompt), str(example.fields.get("starter_code") or "")]
    return list(dict.fromkeys(code.rstrip() for code in found if code.strip()))


def trivial_edits(form: ProgramForm, *shown: str) -> Mapping[str, str]:
    """Return replies that hold no work, by what they do to the code that was shown."""
    name = form.entry_point
    stub = "" if name is None else f"def {name}(*args, **keywords):\n    pass"
    replies = {"an empty program": fence("pass"), "a comment alone": fence(_COMMENT)}
    if stub:
        replies["a function without content"] = fence(f"{stub}\n{_COMMENT}")
    for number, code in enumerate(shown):
        # A signature alone is no program yet.
        whole = code if compiles(code) else f"{code}\n    pass"
        place = "the code shown" if number == 0 else f"the code shown ({number + 1})"
        replies |= {
            f"{place}, unchanged": fence(whole),
            f"{place}, and a comment": fence(f"{whole}\n{_COMMENT}"),
            f"{place}, under a comment": fence(f"{_COMMENT}\n{whole}"),
        }
        if stub:
            replies[f"{place}, and no content"] = fence(f"{whole}\n{stub}")
    return replies
