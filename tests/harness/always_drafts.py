"""Engines that draft the same in every step, whether or not it pays: a tiny target is too fast for drafting to pay."""

from typing import Any

import pytest

from paceline import LLM
from paceline.config import SpeculationConfig
from paceline.engine import loader as loader_module
from paceline.speculation.draft_length.policy import FixedDraftLength
from paceline.speculation.drafter import Drafter
from paceline.speculation.speculator import Speculator

NUM_DRAFT_TOKENS = 4  # unless given


def draft_always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines that are opened from now on do."""

    def policy(speculation: SpeculationConfig, *_: Any) -> FixedDraftLength:
        wanted = speculation.num_speculative_tokens
        count = wanted if isinstance(wanted, int) else NUM_DRAFT_TOKENS
        return FixedDraftLength(count, max_rows=1 + count * speculation.tree_width)

    monkeypatch.setattr(loader_module, "_make_policy", policy)


def set_drafters(llm: LLM, *drafters: Drafter) -> None:
    """Replace the drafters of an engine; none for plain decoding."""
    old = llm.engine.speculator
    llm.engine.speculator = Speculator(drafters, old.policy, vocab_size=old.vocab_size, acceptance=old.acceptance)
