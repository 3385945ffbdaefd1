"""Names of the targets, compute types and CPU runtimes that tests/exact runs over, and which of them a normal run takes."""

import pytest

from paceline.runtimes.native.library import kernels_path

TARGETS = ["llama", "qwen2", "qwen3", "mini"]
DTYPES = ["f32", "bf16"]
BACKENDS = ["native", "openvino"]
EVERYTHING = [(name, dtype, backend) for name in TARGETS for dtype in DTYPES for backend in BACKENDS]


def is_in_a_normal_run(name: str, dtype: str, backend: str) -> bool:
    """Every target in every type on one of the runtimes, and on each of them half of all and every target."""
    return (TARGETS.index(name) + DTYPES.index(dtype) + BACKENDS.index(backend)) % 2 == 0


def skip_without(backend: str) -> None:
    """Skip the test where this machine lacks what the runtime needs."""
    if backend == "openvino":
        pytest.importorskip("openvino")
    if backend == "native" and kernels_path() is None:
        pytest.skip("no native kernels for this machine")
