"""Short prompts, several sequences and trees have the logits of transformers. Families are in test_families.py."""

from pathlib import Path

import numpy as np
import pytest

from harness.parity import BOUNDS, References, append, difference, open_backend, prompt_logits, transformers_output
from paceline.kv_cache.row_plan import path_to
from paceline.runtimes.base import assemble_pass
from paceline.tokenizer.tokenizer import Tokenizer

torch = pytest.importorskip("torch")
LLAMA3 = {"rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
CASES = {"qwen3": ("qwen3", {}), "llama": ("llama", {"rope_parameters": {**LLAMA3, "original_max_position_embeddings": 64}})}
BY_BACKEND = pytest.mark.parametrize("backend", list(BOUNDS))


@BY_BACKEND
@pytest.mark.parametrize("prompt_len", [1, 2, 31, 32, 33, 65])
def test_prompt_logits_equal_transformers_for_any_prompt_length(references: References, backend: str, prompt_len: int) -> None:
    reference = references("qwen3")
    found = prompt_logits(open_backend(reference.directory, backend), reference.token_ids[:prompt_len])
    assert difference(found, reference.logits[:prompt_len]) <= BOUNDS[backend]


@BY_BACKEND
def test_sequences_in_one_pass_have_independent_logits(references: References, backend: str) -> None:
    reference = references("qwen3")
    runtime = open_backend(reference.directory, backend)
    cache = runtime.new_cache(64)
    lengths = [50, 1, 33, 97]
    plans = [cache.reserve_rows(cache.new_sequence(), range(-1, length - 1)) for length in lengths]
    tokens = [reference.token_ids[:length] for length in lengths]
    output = runtime.forward(*assemble_pass(plans, tokens, [[length - 1] for length in lengths]))
    assert difference(output.logits, np.stack([reference.logits[length - 1] for length in lengths])) <= BOUNDS[backend]


@BY_BACKEND
@pytest.mark.parametrize("committed_len", [7, 31])
def test_tree_node_logits_equal_those_of_its_path_in_transformers(references: References, backend: str, committed_len: int) -> None:
    reference = references("llama")
    runtime = open_backend(reference.directory, backend)
    cache = runtime.new_cache(64)
    sequence, known = cache.new_sequence(), reference.token_ids[:committed_len]
    append(runtime, cache, sequence, known)
    parents, node_tokens = [-1, 0, 0, 1, 1, 2, 3], [5, 17, 23, 42, 8, 96, 61]
    plan = cache.reserve_rows(sequence, parents)
    output = runtime.forward(*assemble_pass([plan], [node_tokens], [list(range(len(parents)))]))
    for leaf in (4, 5, 6):
        path = path_to(parents, leaf)
        expected = transformers_output(reference.directory, known + [node_tokens[node] for node in path])[0][committed_len:]
        assert difference(output.logits[path], expected) <= BOUNDS[backend]
    cache.keep_path(sequence, 6)
    kept = append(runtime, cache, sequence, [3])
    text = known + [node_tokens[node] for node in (0, 1, 3, 6)] + [3]
    assert difference(kept, transformers_output(reference.directory, text)[0][-1:]) <= BOUNDS[backend]


@BY_BACKEND
def test_greedy_text_of_a_trained_model_equals_that_of_transformers(shared_dir: Path, backend: str) -> None:
    from transformers import AutoModelForCausalLM

    directory = shared_dir / "data" / "models" / "TinyStories-656K"
    if not directory.is_dir():
        pytest.skip("TinyStories-656K is not in ../shared")
    prompt = Tokenizer.open(directory).encode("Once upon a time, there was a little girl named Lily. She")
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None
    with torch.inference_mode():
        expected = model.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=60)[0].tolist()
    runtime = open_backend(directory, backend)
    cache = runtime.new_cache(64)
    sequence, token_ids, fresh = cache.new_sequence(), list(prompt), list(prompt)
    while len(token_ids) < len(expected):
        fresh = [int(append(runtime, cache, sequence, fresh)[-1].argmax())]
        token_ids += fresh
    assert token_ids == expected
