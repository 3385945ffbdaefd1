"""Two small models for servers of several: one tokenizer, different weights."""

import shutil
from pathlib import Path


def write_two_models(mini_dir: Path, folder: Path) -> list[str]:
    """Write the mini as "alpha" and its draft model as "beta"; return their paths."""
    for name, weights in {"alpha": mini_dir, "beta": mini_dir / "draft"}.items():
        shutil.copytree(weights, folder / name, ignore=shutil.ignore_patterns("draft"))
        for file in mini_dir.glob("tokenizer*"):
            shutil.copy(file, folder / name)
    return [str(folder / name) for name in ("alpha", "beta")]
