"""Memory of opening a model, peak and afterwards, equals doctor's estimate: weights, keys and values, a pass, and the drafter.

In a process of its own each, above what one has that has run the mini. Small counts: the forms that are laid out anew.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from harness.checkpoints import write_byte_level_tokenizer, write_checkpoint
from harness.exact_targets import skip_without_kernels
from harness.gguf_checkpoints import byte_level_vocabulary, with_random_blocks, write_gguf
from paceline import LLM, SamplingParams

LAYERS, CONTEXT = 8, 256
TOLERANCE = 0.05
FILE_LAYERS = {"Q3_K": 16, "Q4_0": 12, "Q4_K_M": 12}  # as many bytes as the others: 5 % of less is what a process differs from itself
FLOATS = {"f32": "float32", "bf16": "bfloat16"}
SMALL_COUNTS = ("int8", "Q4_K_M")
FORMS = ("f32", "bf16", "int8", "int4", "Q8_0", "Q4_0", "Q4_K_M", "Q6_K", "Q3_K")

needs_linux = pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="the system does not tell a process's peak")


def write_directory(directory: Path, dtype: str, layers: int = LAYERS) -> Path:
    """A random Llama whose values are all small."""
    sizes = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": layers, "num_attention_heads": 16, "head_dim": 64}
    write_checkpoint(directory, "llama", dtype=dtype, num_key_value_heads=4, vocab_size=263, initializer_range=0.01, **sizes)
    return write_byte_level_tokenizer(directory)


def write_file(folder: Path, form: str) -> Path:
    """The same shapes as a GGUF file of random blocks."""
    pytest.importorskip("gguf")
    directory = write_directory(folder / "directory", "bfloat16", FILE_LAYERS.get(form, LAYERS))
    plain = write_gguf(directory, folder / "plain.gguf", "F16", metadata=byte_level_vocabulary(directory))

    def type_of(name: str) -> str:
        if form != "Q4_K_M":
            return form
        is_fine = name == "output.weight" or (name.endswith(("attn_v.weight", "ffn_down.weight")) and int(name.split(".")[1]) % 2 == 0)
        return "Q6_K" if is_fine else "Q4_K"

    with_random_blocks(plain, folder / "model.gguf", type_of, np.random.default_rng(0), scale=1e-4)
    return folder / "model.gguf"


def measure(model: Path, quantization: str, cache: Path, *drafts: Path) -> dict[str, int]:
    command = [sys.executable, "-m", "harness.load_memory", str(model), quantization, str(CONTEXT), *map(str, drafts)]
    environment = {**os.environ, "PACELINE_CACHE": str(cache), "PYTHONPATH": str(Path(__file__).parents[1])}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    found: dict[str, int] = json.loads(done.stdout.splitlines()[-1])
    return found


@needs_linux
@pytest.mark.spread(0.5)
@pytest.mark.parametrize("form", FORMS)
def test_load_takes_the_memory_that_doctor_predicts(form: str, tmp_path: Path, large_counts: bool) -> None:
    if form not in SMALL_COUNTS and not large_counts:
        pytest.skip("small counts")
    if form in FLOATS or form in ("int8", "int4"):
        model, quantization = write_directory(tmp_path, FLOATS.get(form, "bfloat16")), "none" if form in FLOATS else form
    else:
        model, quantization = write_file(tmp_path, form), "none"
    if quantization != "none":
        measure(model, quantization, tmp_path / "cache")  # quantised once, then read from the cache
    found = measure(model, quantization, tmp_path / "cache")
    for name in ("peak", "filled"):
        assert abs(found[name] - found["told"]) <= TOLERANCE * found["told"], (form, name, found)
    assert found["opened_peak"] <= 1.1 * found["told"]


@needs_linux
def test_doctor_predicts_the_memory_of_a_draft_model(tmp_path: Path, large_counts: bool) -> None:
    if not large_counts:
        pytest.skip("small counts")
    target, draft = (write_directory(tmp_path / name, "bfloat16", layers) for name, layers in (("target", LAYERS), ("draft", 4)))
    found = measure(target, "none", tmp_path / "cache", draft)
    for name in ("peak", "filled"):
        assert abs(found[name] - found["told"]) <= TOLERANCE * found["told"], (name, found)


@needs_linux
def test_resident_memory_of_the_kv_cache_grows_with_its_use(mini_dir: Path) -> None:
    def resident() -> int:
        return 4096 * int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[1])

    skip_without_kernels()
    before = resident()
    llm = LLM(str(mini_dir), drafter="none", backend="native", kv_cache_gb=1.5, max_model_len=512, max_num_seqs=512, threads=1)
    num_bytes = llm.engine.cache.num_bytes
    opened = resident() - before
    row_bytes = llm.engine.cache.bytes_per_token
    llm.generate([[index, *range(400)] for index in range(8)], SamplingParams(max_tokens=1))
    used = resident() - before
    assert num_bytes > 2.5e8 > 10 * 8 * 400 * row_bytes
    assert opened < 0.3 * num_bytes
    assert used - opened < 8 * 512 * row_bytes + 5e7
