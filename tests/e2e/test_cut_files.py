"""A model's file that is cut short while the model is loaded fails the next call; the process goes on."""

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from checkpoints import write_byte_level_tokenizer, write_checkpoint
from eagle_checkpoints import EAGLE3, eagle3_tensors, write_head
from gguf_checkpoints import byte_level_vocabulary, write_gguf
from native_network import BUILT

PROGRAM = """
    import os, sys
    from paceline import LLM, SamplingParams
    from paceline.errors import CheckpointError
    model, cut, backend, drafter = sys.argv[1:]
    params = SamplingParams(max_tokens=4, ignore_eos=True)
    llm = LLM(model, backend=backend, threads=1, cache_gb=0.02, device="cpu", drafter=drafter, offline=True)
    expected = llm.generate([5, 6, 7], params)[0].token_ids
    os.truncate(cut, 4096)
    for _ in range(2):
        try:
            found = llm.generate([5, 6, 7, *range(10, 40)], params)[0].token_ids
            print("TOKENS", len(found))
        except CheckpointError as error:
            print("ERROR", error)
"""


def run(model: Path, cut: Path, *, backend: str = "native", drafter: str | Path = "none") -> "subprocess.CompletedProcess[str]":
    arguments = [sys.executable, "-c", textwrap.dedent(PROGRAM), str(model), str(cut), backend, str(drafter)]
    return subprocess.run(arguments, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("kind", ["float32", "bfloat16", "gguf", "openvino"])
def test_a_file_cut_short_under_a_loaded_model_is_an_error_of_the_call(kind: str, tmp_path: Path) -> None:
    backend = "openvino" if kind == "openvino" else "native"
    if backend == "native" and not BUILT:
        pytest.skip("no native kernels for this machine")
    pytest.importorskip(backend.replace("native", "numpy"))
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "vocab_size": 500}
    if kind == "gguf":
        pytest.importorskip("gguf")
        directory = write_byte_level_tokenizer(write_checkpoint(tmp_path / "model", "llama", **sizes))
        model = cut = write_gguf(directory, tmp_path / "model.gguf", "F16", metadata=byte_level_vocabulary(directory))
    else:
        model = write_checkpoint(tmp_path / "model", "llama", dtype="bfloat16" if kind == "bfloat16" else "float32", **sizes)
        cut = model / "model.safetensors"
    done = run(model, cut, backend=backend)
    assert done.returncode == 0, f"{done.returncode} {done.stderr[-2000:]}"
    lines = done.stdout.splitlines()
    assert len(lines) == 2
    for line in lines:
        assert line.startswith(f"ERROR {cut} has 4096 bytes and had ")
        assert "put the whole file back and load the model again" in line


@pytest.mark.skipif(not BUILT, reason="no native kernels for this machine")
def test_a_heads_file_cut_short_costs_its_guesses_alone(tmp_path: Path) -> None:
    target = write_checkpoint(tmp_path / "target", "llama", hidden_size=32, head_dim=8, num_hidden_layers=8)
    head = write_head(tmp_path / "head", EAGLE3, eagle3_tensors())
    done = run(target, head / "model.safetensors", drafter=head)
    assert done.returncode == 0, f"{done.returncode} {done.stderr[-2000:]}"
    assert done.stdout.splitlines() == ["TOKENS 4", "TOKENS 4"]
