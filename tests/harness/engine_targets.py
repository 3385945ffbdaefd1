"""Small engines to test with: opened by the number of cache blocks, fed request by request, checked to hold nothing at the end."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Unpack

import pytest

from paceline import LLM, SamplingParams
from paceline.engine.inputs import RequestOptions
from paceline.runtimes.base import ForwardOutput
from paceline.speculation.drafter import Drafter
from paceline.speculation.request import Request

BLOCK_BYTES = 16384  # of the tiny target: 2 layers, 2 kv heads, 16 wide, float32
Open = Callable[..., LLM]


def open_small(directory: Path, num_blocks: int, drafter: str | Sequence[str] | Drafter = "none", **options: object) -> LLM:
    """An LLM on the tiny target whose cache has `num_blocks` blocks of 32 rows."""
    options = {"threads": 2, "device": "cpu", "drafter": drafter, "kv_cache_gb": (num_blocks + 0.5) * BLOCK_BYTES / 1e9, **options}
    return LLM(str(directory), **options)  # type: ignore[arg-type]


def make(llm: LLM, prompt: list[int], params: SamplingParams, **options: Unpack[RequestOptions]) -> Request:
    """A request for `llm.engine`."""
    return llm._loaded.make_requests([prompt], params, options, is_streamed=False)[0]


def record_rows(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The rows of each pass of the target from now on."""
    rows: list[int] = []
    forward = llm.runtime.forward

    def recorded(*arguments: Any) -> ForwardOutput:
        rows.append(len(arguments[1].positions))
        return forward(*arguments)

    monkeypatch.setattr(llm.runtime, "forward", recorded)
    return rows


def run_to_end(llm: LLM) -> None:
    """Steps until the engine has nothing to do."""
    for _ in range(5_000):
        if not llm.engine.has_work:
            return
        llm.engine.step()
        llm.engine.cache.check_consistency()
    raise AssertionError("the engine does not come to an end")


def assert_clean(llm: LLM) -> None:
    """Check that no blocks are in use."""
    cache = llm.engine.cache
    cache.check_consistency()
    assert cache.pool.num_free == cache.pool.num_blocks
    assert llm.engine.is_idle
    stats = llm.stats()
    assert (
        stats.speculation.num_emitted_tokens
        == stats.speculation.num_accepted_tokens + stats.speculation.num_bonus_tokens
        == stats.completion_tokens
    )
    assert sum(stats.speculation.num_accepted_tokens_by_position) == stats.speculation.num_accepted_tokens
