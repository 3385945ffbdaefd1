"""A directory written as GGUF is the same model with the same tokenizer."""

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from harness.checkpoints import write_checkpoint
from harness.parity import open_backend, prompt_logits
from paceline import LLM, SamplingParams
from paceline.benchmarking.peers.export_gguf import export_gguf, rope_factors
from paceline.tokenizer.tokenizer import Tokenizer

TEXT = "<|im_start|>user\nCan you add 12 and 345, don't you?<|im_end|>\n"


@pytest.mark.parametrize("kind", ["BF16", "F32"])
def test_gguf_export_of_mini_gives_the_same_greedy_text(kind: str, mini_dir: Path, tmp_path: Path) -> None:
    file = tmp_path / "mini.gguf"
    export_gguf(mini_dir, file, kind)
    ids = Tokenizer.open(mini_dir).encode(TEXT)
    assert Tokenizer.open(file).encode(TEXT) == ids
    params = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)
    said = []
    for path in (mini_dir, file):
        with LLM(str(path), threads=1, max_model_len=128, dtype="f32", drafter="none") as llm:
            said.append(list(llm.generate([ids], params)[0].token_ids))
    assert said[0] == said[1]


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_gguf_export_with_biases_and_head_norms_gives_the_same_logits(family: str, tmp_path: Path) -> None:
    directory = write_checkpoint(tmp_path / "model", family)
    (directory / "tokenizer.json").unlink()  # of words, which has no GGUF form
    file = tmp_path / "model.gguf"
    export_gguf(directory, file, "F32")
    logits = [prompt_logits(open_backend(path, "native", max_model_len=64), [3, 1, 4, 1, 5, 9, 2, 6] * 4) for path in (directory, file)]
    np.testing.assert_allclose(*logits, rtol=0, atol=1e-5)


def test_exported_llama3_rope_factors_equal_those_of_transformers() -> None:
    rope = {
        "rope_type": "llama3", "rope_theta": 5e5, "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }  # fmt: skip
    config = LlamaConfig(hidden_size=256, num_attention_heads=4, head_dim=64, rope_parameters=rope, max_position_embeddings=131072)
    frequencies, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    plain = 1 / 5e5 ** (np.arange(0, 64, 2) / 64)
    factors = rope_factors({"rope_parameters": rope, "hidden_size": 256, "num_attention_heads": 4, "head_dim": 64})
    np.testing.assert_allclose(plain / np.array(factors), frequencies.numpy(), rtol=1e-5)


def test_gguf_export_of_an_unsupported_model_is_refused(tmp_path: Path) -> None:
    directory = write_checkpoint(tmp_path / "model", "gemma2")
    with pytest.raises(ValueError, match=r"gemma2; written as GGUF are llama.*: name a GGUF file instead"):
        export_gguf(directory, tmp_path / "model.gguf", "F32")
