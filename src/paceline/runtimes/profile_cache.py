"""Facts measured on this machine, kept between runs in one small JSON file; losing it costs only the time to measure again."""

import hashlib
import json
import os
import tempfile
from pathlib import Path
from typing import Any

from paceline.machine import processor_name

FILE_NAME = "measured.json"


class ProfileCache:
    """A mapping from what was measured to the answer.

    Args:
        directory: where the file lies; None = keep nothing.
    """

    def __init__(self, directory: Path | None) -> None:
        self._path = None if directory is None else directory / FILE_NAME

    def get(self, key: str) -> Any:
        """The stored answer or None; an unreadable file holds none."""
        return self._read().get(key)

    def put(self, key: str, value: Any) -> None:
        """Store an answer. A file that cannot be written is no error; a killed writer leaves the old one."""
        if self._path is None:
            return
        facts = {**self._read(), key: value}
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            handle, name = tempfile.mkstemp(dir=self._path.parent, prefix=FILE_NAME)
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                json.dump(facts, file, indent=1)
            os.replace(name, self._path)
        except OSError:
            return

    def _read(self) -> dict[str, Any]:
        if self._path is None:
            return {}
        try:
            facts = json.loads(self._path.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError):
            return {}
        return facts if isinstance(facts, dict) else {}


def profile_key(kind: str, *parts: object) -> str:
    """A key that names what was measured and, by a digest, everything the answer depends on: `parts` and this processor."""
    digest = hashlib.sha256("\n".join(map(repr, (*parts, processor_name()))).encode()).hexdigest()[:24]
    return f"{kind}:{digest}"
