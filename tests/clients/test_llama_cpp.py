"""Greedy texts of GGUF files are those of llama.cpp, which is in an environment of its own (make test-clients).

Neither side rounds activations: ours computes in float32, llama.cpp multiplies with a BLAS. What then differs is how the file was read.
"""

import json
from collections import Counter
from pathlib import Path

import pytest

from clients.run_foreign import run_foreign
from harness.gguf_checkpoints import byte_level_vocabulary, write_gguf
from harness.parity import count_equal_texts
from paceline import LLM

NUM_PROMPTS, NUM_TOKENS, PROMPT_TOKENS = 50, 64, 200
MIN_EQUAL = 0.95
NEAR_TIE = 0.1  # of a logit: what another order of a sum can turn around


@pytest.mark.parametrize("block_type", ["BF16", "Q8_0", "Q4_0"])
def test_greedy_texts_equal_those_of_llama_cpp_in_float32(
    block_type: str, clients: Path, shared_dir: Path, mini_dir: Path, tmp_path: Path, tally: "Counter[str]"
) -> None:
    texts = shared_dir / "models" / "mini-target" / "heldout.jsonl"
    if not texts.is_file():
        pytest.skip("no held-out prompts beside this checkout")
    file = write_gguf(mini_dir, tmp_path / "mini.gguf", block_type, metadata=byte_level_vocabulary(mini_dir))
    with LLM(str(file), dtype="f32", max_model_len=1024, threads=2) as llm:
        lines = texts.read_text(encoding="utf-8").splitlines()[:NUM_PROMPTS]
        prompts = [llm.tokenizer.encode(json.loads(line)["text"])[:PROMPT_TOKENS] for line in lines]
        order = json.dumps({"file": str(file), "prompts": prompts, "max_tokens": NUM_TOKENS, "threads": 2})
        others = json.loads(run_foreign(clients / "llama-cpp", "llama_greedy.py", given=order).splitlines()[-1])
        num_equal = count_equal_texts(llm, prompts, others, NUM_TOKENS, NEAR_TIE)
    assert num_equal >= MIN_EQUAL * NUM_PROMPTS
    tally[f"texts of a {block_type} file that are llama.cpp's, of {NUM_PROMPTS}"] += num_equal
