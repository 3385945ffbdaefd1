"""Names of the targets and compute types that tests/exact runs over, and which of them a normal run takes."""

import pytest

from paceline.runtimes.native.library import kernels_path

HYBRIDS = ["qwen3_5", "lfm3", "granite", "falcon_h1"]
"""Those with recurrent layers."""
RECURRENT = [*HYBRIDS, "olmo_hybrid"]
TARGETS = ["llama", "qwen2", "qwen3", "mini", "sliding", "gpt_oss", "gemma4", *RECURRENT, "phi", "deepseek", "muse_glimmer", "gemma3n"]
DTYPES = ["f32", "bf16"]
EVERYTHING = [(name, dtype) for name in TARGETS for dtype in DTYPES]


def is_in_a_normal_run(name: str, dtype: str) -> bool:
    """Every target once."""
    return dtype == DTYPES[TARGETS.index(name) % 2]


def skip_without_kernels(backend: str = "native") -> None:
    """Skip a test of native kernels where this machine has none."""
    if backend == "native" and kernels_path() is None:
        pytest.skip("no native kernels for this machine")
