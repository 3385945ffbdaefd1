"""A model whose matrices lie packed computes what the model of their values computes, however its family takes matrices apart."""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from harness.checkpoint_files import read_tensors, read_values, write_tensors, write_values
from harness.checkpoints import write_checkpoint
from harness.doctor_options import doctor_options
from harness.expert_checkpoints import CASES as EXPERTS
from harness.hybrid_checkpoints import CASES as HYBRIDS
from harness.packed_matrices import KINDS, write_packed
from harness.parity import BOUNDS, difference, open_backend, prompt_logits
from paceline import LLM, CapacityError, CheckpointError, SamplingParams
from paceline.models.checkpoint import open_weights, read_model_config
from paceline.models.weights import GroupedTensor, as_float32
from paceline.proof.doctor import diagnose
from paceline.runtimes.load import RuntimeOptions, load_network

pytest.importorskip("torch")
Pairs = Callable[[str, str], tuple[Path, Path]]
PROMPT = np.random.default_rng(0).integers(4, 97, 40).tolist()
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "phi3": ("phi3", {}),
    "glm4": ("glm4", {}),
    "mixtral": EXPERTS["mixtral"],
    "deepseek_v3": EXPERTS["deepseek_v3"],
    "qwen3_next": HYBRIDS["qwen3_next"],
    "granite": HYBRIDS["granite"],
}


def write_pair(folder: Path, family: str, kind: str) -> tuple[Path, Path]:
    """A checkpoint whose matrices, but embedding and vocabulary, are packed, and one of their values."""
    name, values = FAMILIES[family]
    plain = write_checkpoint(folder / "plain", name, **values)
    packed = folder / "packed"
    packed.mkdir()
    tensors, stored, settings = read_tensors(plain), {}, {}
    for tensor_name, array in tensors.items():
        is_left = "embed" in tensor_name or "lm_head" in tensor_name or tensor_name.endswith("gate.weight")
        if array.ndim != 2 or is_left or min(array.shape) < 8:  # no tool packs these
            stored[tensor_name] = ("F32", array)
            continue
        own = KINDS[kind](array.shape)
        scale = np.float16(2.0 ** np.round(np.log2(array.std() / own.values.std())))  # a power of two: what is exact stays so
        settings = own.settings
        module = tensor_name.removesuffix(".weight")
        for part, (type_name, content) in own.tensors.items():
            is_scale = part in ("scales", "biases", "weight_scale", "weight_scale_inv", "weight.absmax") and content.dtype != np.uint8
            stored[f"{module}.{part}"] = (type_name, (content * scale).astype(content.dtype) if is_scale else content)
        factor = 1.0 if kind == "nvfp4" else float(scale)  # whose scales are bytes
        tensors[tensor_name] = (own.values * factor).astype(np.float32)
    write_tensors(plain, tensors)
    write_packed(packed / "model.safetensors", stored)
    key = "quantization_config" if "quant_method" in settings else "quantization"
    write_values(packed, {**read_values(plain), key: settings})
    for file in ("tokenizer.json", "tokenizer_config.json"):
        (packed / file).write_bytes((plain / file).read_bytes())
    return plain, packed


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Pairs:
    @cache
    def pair(family: str, kind: str) -> tuple[Path, Path]:
        return write_pair(tmp_path_factory.mktemp(f"{family}-{kind}"), family, kind)

    return pair


@pytest.mark.spread(0.4)
@pytest.mark.parametrize(
    ("family", "kind", "backend"),
    [
        ("llama", "gptq", "torch"),
        *(("llama", kind, "native") for kind in KINDS),
        *((family, kind, "native") for family in list(FAMILIES)[1:] for kind in ("gptq", "fp8")),
    ],
)
def test_packed_checkpoint_has_the_logits_of_its_dequantised_values(pairs: Pairs, family: str, kind: str, backend: str) -> None:
    plain, packed = pairs(family, kind)
    weights, expected = (open_weights(one, read_model_config(one)) for one in (packed, plain))
    assert list(weights) == list(expected)
    for name in weights:
        assert np.array_equal(as_float32(weights[name]), as_float32(expected[name])), name
        assert weights.tensor_info(name).nbytes == weights[name].nbytes
    assert {name for name in weights.packed_matrices if isinstance(weights[name], GroupedTensor)} == set(
        weights.packed_matrices if kind not in ("fp8", "nf4") else ()
    )
    found, wanted = (prompt_logits(open_backend(one, backend), PROMPT) for one in (packed, plain))
    assert difference(found, wanted) <= BOUNDS[backend] * max(1.0, float(np.abs(wanted).max()) / 5)


@pytest.mark.parametrize("kind", ["gptq", "integers", "fp8"])
def test_drafts_change_no_token_of_a_packed_model(pairs: Pairs, kind: str) -> None:
    _, packed = pairs("llama", kind)
    texts = []
    for drafter in ("ngram", "none"):
        llm = LLM(str(packed), drafter=drafter, threads=1)
        for temperature in (0.0, 0.8):
            params = SamplingParams(temperature=temperature, seed=3, max_tokens=48, ignore_eos=True)
            texts.append(llm.generate(["the cat sat on the mat"], params)[0].token_ids)
    assert texts[:2] == texts[2:]


def test_dequantised_fp8_matrices_are_reported_and_counted_as_memory(pairs: Pairs) -> None:
    _, packed = pairs("llama", "fp8")
    notices = load_network(packed, RuntimeOptions(device="cpu", backend="torch")).notices
    assert any("activations are not rounded" in notice for notice in notices)
    assert any("matrices become f32" in notice for notice in notices)
    with pytest.raises(CapacityError, match=r"packed as FP8, blocks of 32 x 64 take .* GB as f32"):
        load_network(packed, RuntimeOptions(device="cpu", backend="torch", memory_bytes=1000))
    found = diagnose(doctor_options(model=str(packed), drafters=("none",)))
    assert found.works
    assert found.target is not None
    assert found.target.stored_as == "safetensors, FP8, blocks of 32 x 64"
    assert any("matrices become f32" in note for note in found.notes)


def test_packed_checkpoint_ignores_zero_biases_and_refuses_others(pairs: Pairs, tmp_path: Path) -> None:
    plain, _ = pairs("llama", "gptq")
    for value, message in ((0.0, None), (1e-3, "holds 1 tensor: model.layers.0.self_attn.q_proj.bias")):
        (tmp_path / "config.json").write_bytes((plain / "config.json").read_bytes())
        write_tensors(tmp_path, {**read_tensors(plain), "model.layers.0.self_attn.q_proj.bias": np.full(64, value, np.float32)})
        if message is None:
            assert not open_weights(tmp_path, read_model_config(tmp_path)).has_tensor("layers.0.q_proj.bias")
        else:
            with pytest.raises(CheckpointError, match=message):
                open_weights(tmp_path, read_model_config(tmp_path))


def test_packed_matrix_of_a_shape_unlike_the_config_is_refused(pairs: Pairs, tmp_path: Path) -> None:
    _, packed = pairs("llama", "gptq")
    write_values(tmp_path, {**read_values(packed), "intermediate_size": 128})
    (tmp_path / "model.safetensors").symlink_to(packed / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"holds a matrix of shape \[96, 64\], but config.json requires \[128, 64\]"):
        open_weights(tmp_path, read_model_config(tmp_path))
