"""Greedy texts of GGUF files beside llama.cpp's, which lives in an environment of its own (make test-clients)."""

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from compare_llama_cpp import KINDS

REPOSITORY = Path(__file__).resolve().parents[2]
NUM_PROMPTS = 50
SAME = 0.95
NEAR_TIE = 0.1  # of a logit: what another order of a sum can turn around


def test_texts_are_llama_cpps_where_nobody_rounds(
    clients: Path, shared_dir: Path, mini_dir: Path, tmp_path: Path, tally: "Counter[str]"
) -> None:
    """The same file on both sides, 64 tokens each; whatever differs is printed with both margins."""
    prompts = shared_dir / "models" / "mini-target" / "heldout.jsonl"
    if not prompts.is_file():
        pytest.skip("no held-out prompts beside this checkout")
    tool, python = REPOSITORY / "tools" / "compare_llama_cpp.py", clients / "llama-cpp" / "bin" / "python"
    command = [tool, mini_dir, "--work", tmp_path, "--llama-python", python, "--prompts", prompts, "--float32"]
    command += ["--count", NUM_PROMPTS, "--out", tmp_path / "found.json"]
    done = subprocess.run([sys.executable, *map(str, command)], stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "found.json").read_text(encoding="utf-8"))
    assert len(found) == len(KINDS)
    for kind, result in zip(KINDS, found, strict=True):
        assert result["prompts"] == NUM_PROMPTS
        assert len(result["differences"]) == NUM_PROMPTS - result["same"]
        assert result["same"] >= SAME * NUM_PROMPTS, result
        assert all(max(item["our_margin"], item["their_margin"]) < NEAR_TIE for item in result["differences"]), result
        tally[f"texts of a {kind} file that are llama.cpp's, of {NUM_PROMPTS}"] += result["same"]
