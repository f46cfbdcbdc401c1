from __future__ import annotations

from pathlib import Path

import pytest

from strop.store.contract import Objects
from strop.store.local_objects import LocalObjects
from tests.fixtures.object_store import make_objects
from tests.store.contract_suite import StoreContract


class TestDirectoryStore(StoreContract):
    @pytest.fixture
    def objects(self) -> Objects:
        return LocalObjects()

    @pytest.fixture
    def root(self, tmp_path: Path) -> str:
        return str(tmp_path / "place of mine")


class TestS3Store(StoreContract):
    @pytest.fixture
    def objects(self, s3_root: str) -> Objects:
        return make_objects()

    @pytest.fixture
    def root(self, s3_root: str) -> str:
        return s3_root
