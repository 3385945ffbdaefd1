"""Whatever a file says about itself: it opens, or it is a CheckpointError; soon, and without allocating what it claims."""

import json
import struct
import time
import tracemalloc
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from paceline.errors import CheckpointError
from paceline.models.checkpoint import open_weights, read_model_config
from paceline.models.gguf_file import open_gguf

gguf = pytest.importorskip("gguf")

HIDDEN, INNER, VOCAB, LAYERS = 64, 96, 500, 2
NUMBERS = (0, 1, 2, 3, 5, 31, 32, 33, 64, 255, 2**16, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**40, 2**62, 2**63 - 1, 2**63, 2**64 - 1)
MAX_SECONDS = 5.0
NUM_BATCHES = 10
SAMPLE = 25  # every so many files, what is allocated is measured

Mutate = Callable[[bytearray, np.random.Generator], bytes]


@dataclass(frozen=True)
class Format:
    """A file, how it is opened, and ways to damage it."""

    path: Path
    valid: bytes
    open: Callable[[], None]
    mutations: tuple[Mutate, ...]
    header_bytes: int


def flip(data: bytearray, rng: np.random.Generator, header_bytes: int) -> bytes:
    for position in rng.integers(0, header_bytes, rng.integers(1, 9)):
        data[position] ^= 1 << int(rng.integers(8))
    return bytes(data)


def truncate(data: bytearray, rng: np.random.Generator, header_bytes: int) -> bytes:
    end = int(rng.integers(0, header_bytes if rng.integers(2) else len(data)))
    return bytes(data[:end])


def write_length(data: bytearray, rng: np.random.Generator, header_bytes: int) -> bytes:
    """Some length, count or offset becomes another number."""
    layout = "<Q" if rng.integers(2) else "<I"
    number = int(rng.choice(np.array([*NUMBERS, len(data), header_bytes], np.uint64)))
    struct.pack_into(layout, data, int(rng.integers(0, header_bytes - 8)), number & (2**64 - 1 if layout == "<Q" else 2**32 - 1))
    return bytes(data)


def cut_out(data: bytearray, rng: np.random.Generator, header_bytes: int) -> bytes:
    begin = int(rng.integers(0, header_bytes))
    return bytes(data[:begin] + data[begin + int(rng.integers(1, 40)) :])


def damage_tensor_entry(data: bytearray, rng: np.random.Generator, header_bytes: int) -> bytes:
    """A dimension, the type or the offset of a tensor becomes absurd or another tensor's."""
    names = [name.encode() for name in TENSORS]
    name = names[int(rng.integers(len(names)))]
    at = data.index(struct.pack("<Q", len(name)) + name) + 8 + len(name)
    (num_dimensions,) = struct.unpack_from("<I", data, at)
    fields = [(at, "<I"), *((at + 4 + 8 * index, "<Q") for index in range(num_dimensions))]
    fields += [(at + 4 + 8 * num_dimensions, "<I"), (at + 8 + 8 * num_dimensions, "<Q")]
    for index in rng.integers(0, len(fields), rng.integers(1, 3)):
        start, layout = fields[int(index)]
        offsets = [32 * int(rng.integers(0, len(data) // 32)), *NUMBERS]
        number = offsets[int(rng.integers(len(offsets)))]
        struct.pack_into(layout, data, start, number & (2**64 - 1 if layout == "<Q" else 2**32 - 1))
    return bytes(data)


def damage_json_entry(data: bytearray, rng: np.random.Generator, header_bytes: int) -> bytes:
    """The same for a safetensors header, whose own length then fits."""
    (length,) = struct.unpack_from("<Q", data)
    header = json.loads(data[8 : 8 + length])
    name = list(header)[int(rng.integers(len(header)))]
    values = [*NUMBERS, -1, 1.5, None, "x", [], [2**64, 2**64], [[0]], True]
    value = values[int(rng.integers(len(values)))]
    key = ("dtype", "shape", "data_offsets")[int(rng.integers(3))]
    entry = header[name]
    if rng.integers(2) and isinstance(entry.get(key), list) and entry[key]:
        entry[key][int(rng.integers(len(entry[key])))] = value
    elif rng.integers(4):
        entry[key] = value
    else:
        header[name] = value
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + bytes(data[8 + length :])


def _tensors() -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {"token_embd.weight": (VOCAB, HIDDEN), "output_norm.weight": (HIDDEN,)}
    for layer in range(LAYERS):
        sizes = {"attn_q": (HIDDEN, HIDDEN), "attn_k": (32, HIDDEN), "attn_v": (32, HIDDEN), "attn_output": (HIDDEN, HIDDEN)}
        sizes |= {"ffn_gate": (INNER, HIDDEN), "ffn_up": (INNER, HIDDEN), "ffn_down": (HIDDEN, INNER)}
        norms = {"attn_norm": (HIDDEN,), "ffn_norm": (HIDDEN,)}
        shapes |= {f"blk.{layer}.{name}.weight": shape for name, shape in (sizes | norms).items()}
    return shapes


TENSORS = _tensors()


def write_small_gguf(path: Path) -> Path:
    """A llama of two layers in Q8_0, with a vocabulary and every type of metadata value."""
    rng = np.random.default_rng(0)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_token_list([f"token {index}" for index in range(VOCAB)])
    writer.add_token_scores([0.5] * VOCAB)
    writer.add_token_types([1] * VOCAB)
    writer.add_eos_token_id(2)
    for key, value, kind in (("i8", -1, "int8"), ("u16", 7, "uint16"), ("i64", -(2**40), "int64"), ("f64", 0.1, "float64")):
        getattr(writer, f"add_{kind}")(f"test.{key}", value)
    writer.add_bool("test.bool", True)
    writer.add_array("test.bools", [True, False])
    for name, shape in TENSORS.items():
        kind = gguf.GGMLQuantizationType.F32 if len(shape) == 1 else gguf.GGMLQuantizationType.Q8_0
        array = rng.normal(size=shape).astype(np.float32)
        writer.add_tensor(name, gguf.quants.quantize(array, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def small_gguf(directory: Path) -> Format:
    path = write_small_gguf(directory / "model.gguf")
    valid = path.read_bytes()
    header_bytes = valid.index(b"blk.1.ffn_norm.weight") + 60
    return Format(path, valid, lambda: use_gguf(path), _with_header(header_bytes, damage_tensor_entry), header_bytes)


def use_gguf(path: Path) -> None:
    file = open_gguf(path)
    assert all(value is not None for value in file.metadata.values())
    weights = open_weights(path, read_model_config(path))
    assert weights.nbytes > 0


def small_safetensors(directory: Path) -> Format:
    from safetensors.numpy import save_file

    from paceline.models.families import checkpoint_name, tensor_shapes

    values = {"model_type": "llama", "vocab_size": VOCAB, "hidden_size": HIDDEN, "intermediate_size": INNER, "num_hidden_layers": LAYERS}
    values |= {"num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": True, "dtype": "float16"}
    (directory / "config.json").write_text(json.dumps(values))
    config = read_model_config(directory)
    path = directory / "model.safetensors"
    save_file({checkpoint_name(name): np.zeros(shape, np.float16) for name, shape in tensor_shapes(config).items()}, path)
    valid = path.read_bytes()
    header_bytes = 8 + struct.unpack_from("<Q", valid)[0]

    def use() -> None:
        assert len(open_weights(directory, config)) == len(tensor_shapes(config))

    return Format(path, valid, use, _with_header(header_bytes, damage_json_entry), header_bytes)


def _with_header(header_bytes: int, damage_entry: Callable[[bytearray, np.random.Generator, int], bytes]) -> tuple[Mutate, ...]:
    def bound(mutate: Callable[[bytearray, np.random.Generator, int], bytes]) -> Mutate:
        return lambda data, rng: mutate(data, rng, header_bytes)

    return tuple(bound(mutate) for mutate in (flip, truncate, write_length, cut_out, damage_entry, damage_entry))


@pytest.fixture(params=[small_gguf, small_safetensors], ids=["gguf", "safetensors"])
def subject(request: pytest.FixtureRequest, tmp_path: Path) -> Format:
    made: Format = request.param(tmp_path)
    return made


def test_a_valid_file_opens_and_allocates_less_than_its_size(subject: Format) -> None:
    subject.open()
    tracemalloc.start()
    try:
        subject.open()
        assert tracemalloc.get_traced_memory()[1] < len(subject.valid)
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("batch", range(NUM_BATCHES))
def test_a_damaged_header_opens_or_is_a_checkpoint_error(
    subject: Format, batch: int, seed: int, large_counts: bool, tally: "Counter[str]"
) -> None:
    rng = np.random.default_rng([seed, batch])
    num_files = 5_000 if large_counts else 100
    name = subject.path.suffix[1:]
    subject.open()  # what is imported and cached at first use is no file's doing
    for index in range(num_files):
        data = subject.mutations[index % len(subject.mutations)](bytearray(subject.valid), rng)
        subject.path.write_bytes(data)
        is_measured = index % SAMPLE == 0
        if is_measured:
            tracemalloc.start()
        begin = time.perf_counter()
        error = refusal(subject.open)
        peak = tracemalloc.get_traced_memory()[1] if is_measured else 0
        tracemalloc.stop()
        assert error is None or (str(subject.path.parent) in error and len(error) < 4000), (
            f"file {index} of batch {batch} with seed {seed}: {error}"
        )
        tally[f"damaged {name} headers {'that open' if error is None else 'refused'}"] += 1
        assert time.perf_counter() - begin < MAX_SECONDS, f"file {index} of batch {batch} with seed {seed}"
        assert peak <= 2 * len(subject.valid), f"file {index} of batch {batch} with seed {seed} made {peak} bytes be allocated"


def test_damaged_blocks_become_values_or_a_checkpoint_error(tmp_path: Path, seed: int, large_counts: bool) -> None:
    """Beyond the header: every tensor is read as well."""
    subject = small_gguf(tmp_path)
    rng = np.random.default_rng(seed)
    num_refused = 0
    for _ in range(2_000 if large_counts else 40):
        data = bytearray(subject.valid)
        for position in rng.integers(subject.header_bytes, len(data), 40):
            data[position] = int(rng.integers(256))
        subject.path.write_bytes(bytes(data))
        weights = open_weights(subject.path, read_model_config(subject.path))
        error = refusal(lambda weights=weights: list(weights.values()))
        assert error is None or "no finite number" in error
        num_refused += error is not None
    assert num_refused > 0


def refusal(action: Callable[[], object]) -> str | None:
    """The text of the CheckpointError it raises, if it does; any other exception is a failure."""
    try:
        action()
    except CheckpointError as error:
        return str(error)
    return None
