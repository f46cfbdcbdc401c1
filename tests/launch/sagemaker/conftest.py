"""The site and the rehearsal that tests of SageMaker share."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.launch.sagemaker.aws import site
from tests.launch.sagemaker.rehearsal import Rehearsal

__all__ = ["site"]


@pytest.fixture
def rehearsal(tmp_path: Path) -> Iterator[Rehearsal]:
    found = Rehearsal(tmp_path)
    yield found
    found.close()
