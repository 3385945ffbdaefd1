"""Engines that draft the same in every step, whether or not it pays: a tiny target is too fast for drafting to pay."""

from typing import Any

import pytest

from paceline.config import SpeculationConfig
from paceline.engine import open as open_module
from paceline.speculation.draft_length import DraftLengthPolicy

NUM_DRAFT_TOKENS = 4  # where nothing else is asked for


def draft_always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines that are opened from now on do."""

    def policy(speculation: SpeculationConfig, *_: Any) -> DraftLengthPolicy:
        wanted = speculation.num_draft_tokens
        count = wanted if isinstance(wanted, int) else NUM_DRAFT_TOKENS
        return DraftLengthPolicy(count, row_budget=1 + count * speculation.tree_width)

    monkeypatch.setattr(open_module, "_policy", policy)
