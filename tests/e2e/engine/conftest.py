"""A tiny target and small caches of it."""

from functools import partial
from pathlib import Path

import pytest

from harness.checkpoints import write_checkpoint
from harness.engine_targets import Open, open_small


@pytest.fixture(scope="session")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("llama"), "llama", num_hidden_layers=2)


@pytest.fixture(scope="session")
def open_llm(directory: Path) -> Open:
    """`open_small` on the tiny target."""
    return partial(open_small, directory)
