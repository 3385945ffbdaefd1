"""Names of the targets, compute types and forms of our kernels that tests/exact runs over, and which of them a normal run takes."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest

from paceline.kv_cache.row_plan import TreeLayout
from paceline.runtimes.native.library import kernels_path
from paceline.runtimes.native.network import NativeNetwork

HYBRIDS = ["qwen3_5", "lfm3", "granite", "falcon_h1"]
"""Those with recurrent layers, which take no trees as paths."""
RECURRENT = [*HYBRIDS, "olmo_hybrid"]
TARGETS = ["llama", "qwen2", "qwen3", "mini", "sliding", "gpt_oss", "gemma4", *RECURRENT, "phi", "deepseek", "muse_glimmer", "gemma3n"]
DTYPES = ["f32", "bf16"]
BACKENDS = ["native", "paths"]
"""Our kernels as they run, with masked trees, and with trees as paths over shared blocks (`opened_as`)."""
EVERYTHING = [
    (name, dtype, backend) for name in TARGETS for dtype in DTYPES for backend in BACKENDS if name not in RECURRENT or backend == "native"
]


def is_in_a_normal_run(name: str, dtype: str, backend: str) -> bool:
    """Every target once, and every type in each of the forms; latent attention with masks, which it scores by code of its own."""
    number = TARGETS.index(name)
    return dtype == DTYPES[number % 2] and backend == ("native" if name in (*RECURRENT, "deepseek") else BACKENDS[number // 2 % 2])


def skip_without_kernels() -> None:
    """Skip the test where this machine has no kernels."""
    if kernels_path() is None:
        pytest.skip("no native kernels for this machine")


@contextmanager
def opened_as(backend: str) -> Iterator[None]:
    """Native runtimes made within have this form."""
    real = NativeNetwork.__init__

    def on_paths(runtime: NativeNetwork, *args: Any, **options: Any) -> None:
        real(runtime, *args, **options)
        runtime.capabilities = replace(runtime.capabilities, tree_layout=TreeLayout.PATHS)

    with pytest.MonkeyPatch.context() as patch:
        if backend == "paths":
            patch.setattr(NativeNetwork, "__init__", on_paths)
        yield
