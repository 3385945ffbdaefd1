"""A model's file that is cut short while the model is loaded fails the next call; the process goes on."""

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from harness.checkpoints import write_checkpoint
from harness.medusa_checkpoints import random_heads, write_heads
from harness.native_network import BUILT

PROGRAM = """
    import os, sys
    from paceline import LLM, SamplingParams
    from paceline.errors import CheckpointError
    model, cut, drafter = sys.argv[1:]
    params = SamplingParams(max_tokens=4, ignore_eos=True)
    llm = LLM(model, backend="native", threads=1, kv_cache_gb=0.02, device="cpu", drafter=drafter, offline=True)
    expected = llm.generate([5, 6, 7], params)[0].token_ids
    os.truncate(cut, 4096)
    for _ in range(2):
        try:
            found = llm.generate([5, 6, 7, *range(10, 40)], params)[0].token_ids
            print("TOKENS", len(found))
        except CheckpointError as error:
            print("ERROR", error)
"""


def run(model: Path, cut: Path, *, drafter: str | Path = "none") -> "subprocess.CompletedProcess[str]":
    arguments = [sys.executable, "-c", textwrap.dedent(PROGRAM), str(model), str(cut), str(drafter)]
    return subprocess.run(arguments, capture_output=True, text=True, check=False)


@pytest.mark.skipif(not BUILT, reason="no native kernels for this machine")
def test_truncated_file_of_a_loaded_model_fails_the_request(tmp_path: Path) -> None:
    model = write_checkpoint(tmp_path / "model", "llama", hidden_size=128, num_hidden_layers=2, vocab_size=500)
    cut = model / "model.safetensors"
    done = run(model, cut)
    assert done.returncode == 0, f"{done.returncode} {done.stderr[-2000:]}"
    lines = done.stdout.splitlines()
    assert len(lines) == 2
    for line in lines:
        assert line.startswith(f"ERROR {cut} has 4096 bytes and had ")
        assert "restore the file and load the model again" in line


@pytest.mark.skipif(not BUILT, reason="no native kernels for this machine")
def test_truncated_file_of_a_loaded_head_makes_steps_plain(tmp_path: Path) -> None:
    target = write_checkpoint(tmp_path / "target", "llama", num_hidden_layers=1)
    head = write_heads(tmp_path / "head", "rows", random_heads())
    done = run(target, head / "medusa_lm_head.safetensors", drafter=head)
    assert done.returncode == 0, f"{done.returncode} {done.stderr[-2000:]}"
    assert done.stdout.splitlines() == ["TOKENS 4", "TOKENS 4"]
