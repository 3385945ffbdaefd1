"""Measurements of speed for tests that load many models: forward profiles once a run, and all in as few rounds as possible."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from paceline.proof import measured_speedup
from paceline.runtimes import cost


@contextmanager
def quick_profiles() -> Iterator[None]:
    """Within, a stored profile is used whatever a pass takes now. A tenth of the time of tests on tiny models went into profiles."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cost, "MAX_PROFILE_DEVIATION", float("inf"))
        patch.setattr(cost, "MAX_PROFILING_ROUNDS", 1)
        patch.setattr(measured_speedup, "_PROSE_OPENINGS", measured_speedup._PROSE_OPENINGS[:2])
        yield
