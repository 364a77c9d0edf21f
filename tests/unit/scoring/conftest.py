import gc
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def _no_process_of_a_function_is_left() -> Iterator[None]:
    """The traceback of an error holds its scorer, and with it the process."""
    yield
    gc.collect()
