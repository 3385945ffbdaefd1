"""Networks with recurrent layers compute the logits transformers computes."""

import shutil
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from harness.checkpoint_files import read_tensors, read_values, write_tensors, write_values
from harness.checkpoints import VOCAB_SIZE, write_checkpoint
from harness.hybrid_checkpoints import CASES, row_by_row
from harness.model_changes import Change, change_layers, change_mixers, change_model, change_rope, change_routing, change_window, map_mlps
from harness.parity import (
    Reference,
    References,
    append,
    check_a_prompt,
    check_change_matters,
    difference,
    make_reference,
    open_backend,
    prompt_logits,
)
from paceline.config import QuantOptions
from paceline.errors import CheckpointError
from paceline.kv_cache.cache import CachedSequence, KVCache
from paceline.models.checkpoint import open_weights, read_model_config
from paceline.models.config import WeightType, read_config
from paceline.models.layers import (
    AttentionGate,
    GatedDeltaConfig,
    GatedNorm,
    Mamba2Config,
    NormOrder,
    QKNorm,
    RouterScoring,
)
from paceline.models.quantize import quantization_schemes
from paceline.models.weights import as_float32
from paceline.runtimes.base import FloatArray, Network, Numerics, assemble_pass
from paceline.runtimes.decoder import decoder
from paceline.runtimes.load import RuntimeOptions, load_network

torch = pytest.importorskip("torch")
TorchNetwork = pytest.importorskip("paceline.runtimes.torch.network").TorchNetwork
AutoModelForCausalLM = pytest.importorskip("transformers").AutoModelForCausalLM

BOUND = 1e-4
BY_BACKEND = pytest.mark.parametrize("backend", ["torch", "native"])


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory) -> References:
    @cache
    def reference(name: str) -> Reference:
        family, values = CASES[name]
        with row_by_row():
            return make_reference(write_checkpoint(tmp_path_factory.mktemp(name), family, **values))

    return reference


@pytest.mark.spread(0.25)
@pytest.mark.parametrize(
    ("case", "backend"),
    [(case, backend) for backend in ("torch", "native") for case in CASES],
)
def test_hybrid_prompt_logits_equal_transformers_whole_and_in_chunks(references: References, case: str, backend: str) -> None:
    reference = references(case)
    check_a_prompt(reference, backend, bound=BOUND)


@pytest.mark.parametrize("case", ["qwen3_5", "qwen3_next", "granite"])
def test_hybrid_chunked_logits_equal_the_chunkwise_transformers_algorithm(references: References, case: str) -> None:
    reference = references(case)
    found = prompt_logits(open_backend(reference.directory, "torch"), reference.token_ids)
    assert difference(found, make_reference(reference.directory).logits) <= 1e-3


def known_rows(runtime: Network, cache: KVCache, sequence: CachedSequence, token_ids: Sequence[int]) -> FloatArray:
    """The logits of a pass over rows that are kept together."""
    plan = cache.reserve_rows(sequence, range(-1, len(token_ids) - 1), len(token_ids))
    logits = runtime.forward(*assemble_pass([plan], [list(token_ids)], [list(range(len(token_ids)))])).logits.copy()
    cache.keep_path(sequence, len(token_ids) - 1)
    return logits


@pytest.mark.spread(0.3)
@pytest.mark.parametrize("case", ["qwen3_5", "lfm2", "granite"])
@pytest.mark.parametrize("chunk_lens", [[63, 1, 64, 65], [64, 64, 1, 128], [65, 63, 127], [127, 2, 128], [129, 15, 16, 17]])
@BY_BACKEND
def test_hybrid_prompt_in_chunks_of_any_length_has_equal_logits(
    references: References, case: str, chunk_lens: list[int], backend: str
) -> None:
    reference, begin = references(case), 0
    runtime = open_backend(reference.directory, backend)
    cache = runtime.new_cache(64)
    sequence = cache.new_sequence()
    for chunk_len in chunk_lens:
        logits = known_rows(runtime, cache, sequence, reference.token_ids[begin : begin + chunk_len])
        assert difference(logits, reference.logits[begin : begin + chunk_len]) <= BOUND, begin
        begin += chunk_len
    for token_id in reference.token_ids[begin : begin + 3]:
        logits = append(runtime, cache, sequence, [token_id])
        assert difference(logits, reference.logits[begin : begin + 1]) <= BOUND, begin
        begin += 1


@pytest.mark.parametrize("case", ["qwen3_next", "lfm2-biased", "granite-moe"])
@BY_BACKEND
def test_hybrid_tree_rows_continue_from_the_state_of_their_parent(references: References, case: str, backend: str) -> None:
    reference, random = references(case), np.random.default_rng(1)
    runtime = open_backend(reference.directory, backend)
    cache = runtime.new_cache(64)
    sequence, other = cache.new_sequence(), cache.new_sequence()
    tokens = reference.token_ids
    known_rows(runtime, cache, sequence, tokens[:40])
    known_rows(runtime, cache, other, tokens[100:120])
    length = 40
    for _ in range(6):
        parents = [-1, 0, 0, 1, 1, 2, 3, 5]
        kept = [[0], [0, 1, 3, 6], [0, 2, 5]][int(random.integers(3))]
        ids = random.integers(0, VOCAB_SIZE, len(parents)).tolist()
        for depth, node in enumerate(kept):
            ids[node] = tokens[length + depth]
        plans = [cache.reserve_rows(sequence, parents), cache.reserve_rows(other, [-1, 0, 0])]
        output = runtime.forward(*assemble_pass(plans, [ids, [3, 4, 5]], [kept, []]))
        assert difference(output.logits, reference.logits[length : length + len(kept)]) <= BOUND
        cache.keep_path(sequence, kept[-1])
        cache.drop_reserved_rows(other)
        length += len(kept)


CHANGES: list[tuple[str, Change]] = [
    ("qwen3_5", change_mixers(gate=AttentionGate.NONE)),
    ("qwen3_5", change_mixers(qk_norm=QKNorm.NONE)),
    ("qwen3_5", change_rope(rotated_fraction=1.0)),
    ("qwen3_next", change_routing(has_normalized_weights=True)),
    ("qwen3_5-moe", change_routing(has_normalized_weights=False)),
    ("qwen3_5-moe", map_mlps(lambda _: {"has_shared_expert_gate": False})),
    ("lfm2", change_mixers(qk_norm=QKNorm.NONE)),
    ("lfm3", change_mixers(gate=AttentionGate.NONE)),
    ("lfm3", change_rope(rotated_fraction=1.0)),
    ("lfm3", change_window(15)),
    ("lfm3", change_layers(norm_order=NormOrder.PRE)),
    ("lfm2-moe", change_routing(scoring=RouterScoring.SOFTMAX)),
    ("lfm2-moe", change_routing(has_correction_bias=False)),
    ("lfm2-moe", change_routing(routed_scaling_factor=1.0)),
    ("granite", change_model(embedding_scale=1.0)),
    ("granite", change_model(logit_scale=1.0)),
    ("granite", change_layers(residual_scale=1.0)),
    ("granite", change_mixers(scale=1.0)),
    ("granite", change_mixers(has_rope_embedding=True)),
    ("granite", change_mixers(Mamba2Config, norm_groups=1)),
    ("granite-rope", change_mixers(has_rope_embedding=False)),
    ("nemotron_h", change_mixers(has_rope_embedding=True)),
    ("nemotron_h", change_mixers(Mamba2Config, dt_limits=(0.1, 1e9))),
    ("nemotron_h", change_mixers(Mamba2Config, norm_groups=1)),
    ("nemotron_h-moe", change_routing(routed_scaling_factor=1.0)),
    ("nemotron_h-moe", change_routing(has_correction_bias=False)),
    ("granite-rope", change_mixers(Mamba2Config, dt_limits=(0.0, 1e9))),
    ("olmo_hybrid", change_mixers(GatedDeltaConfig, beta_scale=1.0)),
    ("olmo_hybrid", change_mixers(GatedDeltaConfig, norm_eps=None)),
    ("olmo_hybrid", change_mixers(has_rope_embedding=True)),
    ("olmo_hybrid", change_mixers(qk_norm=QKNorm.NONE)),
    ("olmo_hybrid-rope", change_mixers(has_rope_embedding=False)),
    ("olmo_hybrid-rope", change_mixers(GatedDeltaConfig, beta_scale=2.0)),
    ("falcon_h1", change_model(embedding_scale=1.0)),
    ("falcon_h1", change_model(logit_scale=1.0)),
    ("falcon_h1", change_mixers(scale=0.25)),
    ("falcon_h1", change_mixers(value_scale=1.0)),
    ("falcon_h1", change_mixers(Mamba2Config, gate_scale=1.0)),
    ("falcon_h1", change_mixers(Mamba2Config, dt_scale=1.0)),
    ("falcon_h1", change_mixers(Mamba2Config, output_scale=1.0)),
    ("falcon_h1", map_mlps(lambda _: {"gate_scale": 1.0})),
    ("falcon_h1", map_mlps(lambda _: {"output_scale": 1.0})),
    ("falcon_h1-normed", change_mixers(Mamba2Config, norm=GatedNorm.AFTER_GATE)),
    ("falcon_h1-normed-last", change_mixers(Mamba2Config, norm=GatedNorm.BEFORE_GATE)),
]


@pytest.mark.parametrize(("case", "change"), CHANGES, ids=[f"{number}-{case}" for number, (case, _) in enumerate(CHANGES)])
def test_hybrid_logits_change_if_a_part_is_computed_differently(references: References, case: str, change: Change) -> None:
    check_change_matters(references(case), change)


def test_logits_change_if_convolution_weights_are_not_scaled(references: References) -> None:
    reference = references("falcon_h1")
    config = read_config(reference.directory)
    unscaled = change_mixers(Mamba2Config, xbc_conv_scales=(1.0, 1.0, 1.0))(config)
    network = TorchNetwork(decoder(config), config, open_weights(reference.directory, unscaled))
    assert difference(prompt_logits(network, reference.token_ids), reference.logits) > 0.1


@pytest.mark.parametrize("case", ["qwen3_5-moe", "qwen3_next", "lfm2-moe", "granite-moe", "nemotron_h-moe"])
def test_hybrid_experts_saved_by_transformers_5_are_the_same_model(references: References, tmp_path: Path, case: str) -> None:
    reference = references(case)
    model = AutoModelForCausalLM.from_pretrained(reference.directory, dtype=torch.float32)
    model.save_pretrained(tmp_path, save_original_format=False)
    assert read_tensors(tmp_path).keys() != read_tensors(reference.directory).keys()
    found, expected = (prompt_logits(open_backend(one, "torch"), reference.token_ids) for one in (tmp_path, reference.directory))
    assert np.array_equal(found, expected)


@pytest.mark.parametrize("case", ["qwen3_5", "qwen3_5-moe"])
@BY_BACKEND
def test_hybrid_text_model_stored_with_encoder_and_mtp_has_equal_logits(
    references: References, tmp_path: Path, case: str, backend: str
) -> None:
    plain, kind = references(case), case.replace("-", "_")
    tensors = {name.replace("model.", "model.language_model.", 1): tensor for name, tensor in read_tensors(plain.directory).items()}
    tensors |= {name: np.ones((2, 2), np.float32) for name in ("model.visual.patch_embed.proj.weight", "mtp.fc.weight")}
    write_tensors(tmp_path, tensors)
    text = read_values(plain.directory)
    del text["architectures"]
    text["rope_parameters"] |= {"mrope_section": [1, 1, 0], "mrope_interleaved": True}
    values = {"model_type": kind, "architectures": ["AnyForConditionalGeneration"], "text_config": text, "vision_config": {}}
    write_values(tmp_path, values)
    options = RuntimeOptions(numerics=Numerics.FAST, dtype=WeightType.F32, num_threads=2, device="cpu", backend=backend)
    loaded = load_network(tmp_path, options)
    assert loaded.bundled_head == "mtp"
    assert [notice.split(":")[0] for notice in loaded.notices] == ["the checkpoint's image and audio encoders are not loaded"]
    expected = prompt_logits(open_backend(plain.directory, backend), plain.token_ids)
    assert np.array_equal(prompt_logits(loaded.network, plain.token_ids), expected)


@pytest.mark.spread(0.25)
@pytest.mark.parametrize("case", ["qwen3_5", "qwen3_next", "lfm2", "granite"])
@BY_BACKEND
def test_bfloat16_hybrid_checkpoint_is_computed_in_float32(tmp_path: Path, case: str, backend: str) -> None:
    family, values = CASES[case]
    with row_by_row():
        reference = make_reference(write_checkpoint(tmp_path, family, dtype="bfloat16", **values))
    check_a_prompt(reference, backend, bound=BOUND)


@pytest.mark.parametrize("case", CASES)
def test_shape_and_size_of_derived_hybrid_tensors_are_known_before_reading(references: References, case: str) -> None:
    directory = references(case).directory
    config = read_model_config(directory)
    weights = open_weights(directory, config)
    for name in weights:
        facts, tensor = weights.tensor_info(name), weights[name]
        assert (facts.shape, facts.weight_type, facts.nbytes) == (tensor.shape, tensor.weight_type, tensor.nbytes), name
        assert as_float32(tensor).shape == tensor.shape
    small = {name for name in quantization_schemes(weights, QuantOptions(bits=4, group=32)) if "conv." in name or "norm" in name}
    assert not small


@pytest.mark.parametrize(
    ("case", "name"),
    [
        ("qwen3_5", "model.layers.3.self_attn.q_proj.weight"),
        ("qwen3_5", "model.layers.0.linear_attn.in_proj_z.weight"),
        ("qwen3_next", "model.layers.0.linear_attn.in_proj_ba.weight"),
        ("lfm2", "model.layers.0.conv.in_proj.weight"),
        ("lfm2", "model.embedding_norm.weight"),
        ("granite", "model.layers.2.mamba.A_log"),
        ("granite", "model.layers.2.shared_mlp.input_linear.weight"),
        ("granite-moe", "model.layers.2.shared_mlp.output_linear.weight"),
        ("nemotron_h-moe", "model.layers.1.mixer.fc1_latent_proj.weight"),
        ("nemotron_h-moe", "model.norm_f.weight"),
        ("olmo_hybrid", "model.layers.1.linear_attn.q_conv1d.weight"),
        ("falcon_h1-normed", "model.layers.2.mamba.out_proj.weight"),
    ],
)
def test_missing_or_misshapen_hybrid_tensor_is_named(references: References, tmp_path: Path, case: str, name: str) -> None:
    shutil.copytree(references(case).directory, tmp_path / "other")
    tensors = {stored.replace("backbone.", "model."): tensor for stored, tensor in read_tensors(tmp_path / "other").items()}
    for changed in ({name: tensors[name][1:]}, None):
        rest = {other: tensor for other, tensor in tensors.items() if other != name}
        write_tensors(tmp_path / "other", rest | (changed or {}))
        with pytest.raises(CheckpointError, match=name.replace(".", r"\.")):
            open_weights(tmp_path / "other", read_config(tmp_path / "other"))
