"""A model with experts as it is used: what it keeps in memory."""

import re
from pathlib import Path

import pytest

from harness.checkpoints import write_checkpoint
from paceline.runtimes.base import Numerics, assemble_pass
from paceline.runtimes.load import RuntimeOptions, load_network
from paceline.runtimes.native.library import kernels_path

pytest.importorskip("torch")
SMAPS = Path("/proc/self/smaps")


def resident_bytes(path: Path) -> int:
    """Of a mapped file, what this process has read of it."""
    found, is_own = 0, False
    for line in SMAPS.read_text(encoding="utf-8").splitlines():
        if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
            is_own = line.endswith(str(path))
        elif is_own and line.startswith("Rss:"):
            found += 1024 * int(line.split()[1])
    return found


@pytest.mark.skipif(kernels_path() is None, reason="no native kernels for this machine")
@pytest.mark.skipif(not SMAPS.is_file(), reason="needs Linux's /proc")
def test_unselected_experts_are_not_read_into_memory(tmp_path: Path) -> None:
    """One row reads 2 of 64 experts in each of two layers; all others stay on the disk."""
    sizes = {"hidden_size": 256, "moe_intermediate_size": 256, "num_experts": 64, "num_experts_per_tok": 2, "num_hidden_layers": 2}
    directory = write_checkpoint(tmp_path / "model", "qwen3_moe", dtype="bfloat16", **sizes)
    path = directory / "model.safetensors"
    one_expert = 3 * 256 * 256 * 2
    others = path.stat().st_size - 2 * 64 * one_expert
    runtime = load_network(directory, RuntimeOptions(numerics=Numerics.FAST, device="cpu", backend="native", num_threads=1)).network
    before = resident_bytes(path)
    cache = runtime.new_cache(8)
    sequence = cache.new_sequence()
    for step in range(3):
        plan = cache.reserve_rows(sequence, [-1])
        runtime.forward(*assemble_pass([plan], [[5]], [[0]]))
        cache.keep_path(sequence, 0)
        read = resident_bytes(path) - others
        assert read < 2 * 6 * one_expert * 1.5, step
    assert before <= path.stat().st_size / 2
