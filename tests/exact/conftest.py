"""Targets whose rows and tokens are compared bit by bit."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from harness.checkpoints import MUSE_GLIMMER, write_checkpoint
from harness.expert_checkpoints import CASES as EXPERTS
from harness.gemma3n_checkpoints import GEMMA3N
from harness.gemma4_checkpoints import GEMMA4
from harness.hybrid_checkpoints import CASES as HYBRIDS
from harness.quick_profiles import quick_profiles

WINDOW = 16
MADE_OF: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2": ("qwen2", {"tie_word_embeddings": True}),
    "sliding": (
        "gemma3_text",
        {
            "sliding_window": WINDOW,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "query_pre_attn_scalar": 16,
        },
    ),
    "gpt_oss": EXPERTS["gpt_oss"],
    "deepseek": EXPERTS["deepseek_v3"],
    "muse_glimmer": ("muse_glimmer_text", MUSE_GLIMMER),
    "qwen3_5": HYBRIDS["qwen3_5-moe"],
    "lfm3": HYBRIDS["lfm3"],
    "granite": HYBRIDS["granite"],
    "nemotron_h": HYBRIDS["nemotron_h"],
    "olmo_hybrid": HYBRIDS["olmo_hybrid"],
    "falcon_h1": HYBRIDS["falcon_h1"],
    "gemma3n": ("gemma3n_text", {**GEMMA3N, "final_logit_softcapping": 30.0}),  # four streams, of which a layer computes one
    "gemma4": ("gemma4_text", {**GEMMA4, "final_logit_softcapping": 30.0}),  # layers of two sizes, and some that share keys
}
"""Targets that are more than a family: its name, and values of the config. Windows of less than a block move within and across blocks."""


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
            family, values = MADE_OF.get(name, (name, {}))
            write_checkpoint(target, family, **{**values, "dtype": "bfloat16", "seed": sum(map(ord, name))})
        return target

    return directory


@pytest.fixture(scope="module", autouse=True)
def profiles_are_quick() -> Iterator[None]:
    """Tests of profiles themselves are tests/unit/runtimes/test_cost.py."""
    with quick_profiles():
        yield
