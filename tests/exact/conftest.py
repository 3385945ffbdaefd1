"""Targets whose rows and tokens are compared bit by bit."""

from collections.abc import Callable
from pathlib import Path

import pytest

from harness.checkpoints import write_checkpoint


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The directory of a target by name; tiny random ones are written once a session. Compute type is chosen when it is opened."""
    root = tmp_path_factory.mktemp("targets")
    mini = Path(__file__).resolve().parents[2] / "src" / "paceline" / "assets" / "mini" / "target"

    def directory(name: str) -> Path:
        if name == "mini":
            return mini
        target = root / name
        if not target.is_dir():
            write_checkpoint(target, name, dtype="bfloat16", seed=sum(map(ord, name)), tie_word_embeddings=name == "qwen2")
        return target

    return directory
