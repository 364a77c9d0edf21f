"""The tiny checkpoint of the kit that a module of tests is about, its `KIT`."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(scope="module")
def folder(request: pytest.FixtureRequest, tiny_checkpoint: Callable[[str], Path]) -> Path:
    return tiny_checkpoint(request.module.KIT.model_type)


@pytest.fixture
def processor(request: pytest.FixtureRequest, folder: Path) -> Any:
    return request.module.KIT.load_processor(str(folder), trust_remote_code=False)
