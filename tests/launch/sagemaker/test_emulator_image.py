"""The emulator with the project's own image, built offline from this machine's environment."""

from __future__ import annotations

import pytest

from strop.launch.container.engine import Engine
from strop.launch.container.image import BuiltImage, Variant, image_python, plan_image
from tests.launch.sagemaker.rehearsal import ENDLESS, Rehearsal, expected_metrics, step_of
from tests.launch.sagemaker.test_emulator import end_of, wait_for_state

pytestmark = pytest.mark.slow
HOST = "algo-1"


def test_a_job_in_the_image_is_stopped_and_goes_on(
    rehearsal: Rehearsal, engine: Engine, agent_image: BuiltImage
) -> None:
    python = image_python(plan_image(Variant.AGENT))
    request = rehearsal.submit(trainee={"STEP_S": 0.4})
    settings = {"engine": engine, "image": agent_image.name, "python": python}
    first = rehearsal.start(request, num_steps=ENDLESS, **settings)
    wait_for_state(rehearsal, request, 2)
    assert first.stop() == 75, first.log_of(HOST)
    assert first.check_end() == []
    assert first.failure().startswith("requeue: exit code 75")
    saved = step_of(rehearsal.states(request)[-1])
    second = rehearsal.start(request, num_steps=saved + 3, **settings)
    assert end_of(second) == 0, second.log_of(HOST)
    assert f"begin at step {saved}\n" in second.log_of(HOST)
    assert rehearsal.metrics(request, HOST) == expected_metrics(saved + 3)


def test_the_image_starts_with_the_word_of_the_platform_too(
    rehearsal: Rehearsal, engine: Engine, agent_image: BuiltImage
) -> None:
    """Without an entrypoint the platform starts an image with the one word `train`."""
    request = rehearsal.submit(trainee={"STEPS": 1})
    request["AlgorithmSpecification"]["ContainerEntrypoint"] += ["train"]
    python = image_python(plan_image(Variant.AGENT))
    emulator = rehearsal.start(request, engine=engine, image=agent_image.name, python=python)
    assert end_of(emulator) == 0, emulator.log_of(HOST)
