"""Runs scripts of this folder in the environments of foreign programs."""

import subprocess
from pathlib import Path

HERE = Path(__file__).parent


def run_foreign(environment: Path, script: str, *arguments: object, given: str | None = None) -> str:
    """Return what a script prints; `given` is its input."""
    command = [environment / "bin" / "python", HERE / script, *arguments]
    done = subprocess.run([str(part) for part in command], input=given, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout
