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
from safetensors.numpy import save_file

from harness.checkpoints import write_byte_level_tokenizer
from harness.exact_targets import skip_without_kernels
from harness.gguf_checkpoints import byte_level_vocabulary, random_blocks
from paceline import LLM, SamplingParams

HIDDEN, INNER, LAYERS, VOCAB, CONTEXT = 1024, 4096, 8, 263, 256
TOLERANCE = 0.05
FILE_LAYERS = {"Q3_K": 16, "Q4_0": 12, "Q4_K_M": 12}  # as many bytes as the others: 5 % of less is what a process differs from itself
FLOATS = {"f32": "<f4", "bf16": "<u2"}
SMALL_COUNTS = ("int8", "Q4_K_M")
FORMS = ("f32", "bf16", "int8", "int4", "Q8_0", "Q4_0", "Q4_K_M", "Q6_K", "Q3_K")

needs_linux = pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="the system does not tell a process's peak")


def shapes(layers: int) -> dict[str, tuple[int, ...]]:
    found: dict[str, tuple[int, ...]] = {"token_embd": (VOCAB, HIDDEN), "output_norm": (HIDDEN,), "output": (VOCAB, HIDDEN)}
    for layer in range(layers):
        parts = {"attn_q": HIDDEN, "attn_k": HIDDEN // 4, "attn_v": HIDDEN // 4, "attn_output": HIDDEN, "ffn_gate": INNER, "ffn_up": INNER}
        found |= {f"blk.{layer}.{part}": (rows, HIDDEN) for part, rows in parts.items()} | {f"blk.{layer}.ffn_down": (HIDDEN, INNER)}
        found |= {f"blk.{layer}.{norm}": (HIDDEN,) for norm in ("attn_norm", "ffn_norm")}
    return found


NAMES = {
    "token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head", "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj", "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj", "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm",
}  # fmt: skip


def write_directory(directory: Path, dtype: str, layers: int = LAYERS) -> Path:
    """A random Llama whose values are all small."""
    directory.mkdir()
    write_byte_level_tokenizer(directory)
    sizes = {"hidden_size": HIDDEN, "intermediate_size": INNER, "num_hidden_layers": layers, "num_attention_heads": 16, "head_dim": 64}
    others = {"num_key_value_heads": 4, "vocab_size": VOCAB, "max_position_embeddings": 512, "rms_norm_eps": 1e-5, "rope_theta": 1e4}
    names = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "tie_word_embeddings": False, "hidden_act": "silu"}
    config = {**sizes, **others, **names, "dtype": {"f32": "float32", "bf16": "bfloat16"}[dtype], "bos_token_id": 0, "eos_token_id": 0}
    (directory / "config.json").write_text(json.dumps(config), encoding="utf-8")
    random, tensors = np.random.default_rng(0), {}
    for name, shape in shapes(layers).items():
        *layer, part = name.replace("blk.", "model.layers.").rsplit(".", 1)
        values = random.uniform(-0.02, 0.02, shape).astype(np.float32) if len(shape) > 1 else np.ones(shape, np.float32)
        array = (values.view(np.uint32) >> np.uint32(16)).astype(np.uint16) if dtype == "bf16" else values
        tensors[".".join([*layer, NAMES[part], "weight"])] = array
    save_file(tensors, directory / "model.safetensors")
    if dtype == "bf16":
        _call_bf16(directory / "model.safetensors")
    return directory


def _call_bf16(path: Path) -> None:
    """Numpy has no such type: what was written as uint16 is called BF16. Data begin at a multiple of 64, to be read where they lie."""
    content = path.read_bytes()
    size = int.from_bytes(content[:8], "little")
    header = content[8 : 8 + size].replace(b'"U16"', b'"BF16"')
    header += b" " * (-(len(header) + 8) % 64)
    path.write_bytes(len(header).to_bytes(8, "little") + header + content[8 + size :])


def write_file(path: Path, form: str, directory: Path) -> Path:
    """The same shapes as a GGUF file of random blocks."""
    gguf = pytest.importorskip("gguf")
    write_byte_level_tokenizer(directory)
    writer, random, layers = gguf.GGUFWriter(path, "llama"), np.random.default_rng(0), FILE_LAYERS.get(form, LAYERS)
    numbers = {"embedding_length": HIDDEN, "feed_forward_length": INNER, "block_count": layers, "context_length": 512, "vocab_size": VOCAB}
    numbers |= {"attention.head_count": 16, "attention.head_count_kv": 4, "rope.dimension_count": 64}
    for name, number in numbers.items():
        writer.add_uint32(f"llama.{name}", number)
    writer.add_float32("llama.attention.layer_norm_rms_epsilon", 1e-5)
    for name, value in byte_level_vocabulary(directory).items():
        if isinstance(value, list):
            writer.add_array(name, value)
        else:
            (writer.add_string if isinstance(value, str) else writer.add_uint32)(name, value)
    for name, shape in shapes(layers).items():
        if len(shape) == 1:
            writer.add_tensor(f"{name}.weight", np.ones(shape, np.float32))
            continue
        fine = name == "output" or (name.endswith(("attn_v", "ffn_down")) and int(name.split(".")[1]) % 2 == 0)
        kind = {True: "Q6_K", False: "Q4_K"}[fine] if form == "Q4_K_M" else form
        writer.add_tensor(f"{name}.weight", random_blocks(random, kind, *shape, scale=1e-4), raw_dtype=gguf.GGMLQuantizationType[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


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
        model, quantization = write_directory(tmp_path / "model", "f32" if form == "f32" else "bf16"), "none" if form in FLOATS else form
    else:
        (tmp_path / "tokenizer").mkdir()
        model, quantization = write_file(tmp_path / "model.gguf", form, tmp_path / "tokenizer"), "none"
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
    target, draft = (write_directory(tmp_path / name, "bf16", layers) for name, layers in (("target", LAYERS), ("draft", 4)))
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
