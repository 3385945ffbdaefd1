"""Recurrent layers of the torch runtime: what is kept, dropped, cut or adopted, a row is that of one pass over its own text."""

import numpy as np
import pytest

from harness.layer_caches import check_states
from harness.native_network import BUILT
from harness.recurrent_networks import MIXERS, recurrent_config, recurrent_weights
from paceline.errors import CapacityError
from paceline.kv_cache.cache import CachedSequence, KVCache
from paceline.kv_cache.recurrent_state import MIN_PREFILL_ROWS_WITHOUT_RECORDS, CheckpointConfig, RecurrentStateCache
from paceline.kv_cache.row_plan import path_to
from paceline.models.config import ModelConfig, WeightType
from paceline.models.weights import Weights
from paceline.runtimes.base import FloatArray, Network, assemble_pass
from paceline.runtimes.decoder import decoder

torch = pytest.importorskip("torch")

from paceline.runtimes.torch.network import TorchNetwork  # noqa: E402

KINDS = [MIXERS["delta"], MIXERS["narrow mamba"], None, MIXERS["biased convolution"], MIXERS["narrow delta"]]
BOUND = 1e-3
"""Logits are larger than 1, and states that forget nothing add rounding up."""


def open_torch(config: ModelConfig, seed: int, **options: object) -> TorchNetwork:
    return TorchNetwork(decoder(config), config, Weights(recurrent_weights(config, seed)), **options)  # type: ignore[arg-type]


def one_pass(network: Network, token_ids: list[int]) -> FloatArray:
    cache = network.new_cache(2 + len(token_ids) // 32)
    plan = cache.reserve_rows(cache.new_sequence(), range(-1, len(token_ids) - 1), len(token_ids))
    return network.forward(*assemble_pass([plan], [token_ids], [range(len(token_ids))])).logits.copy()


@pytest.mark.parametrize("name", MIXERS)
def test_torch_and_native_recurrent_networks_have_equal_logits(name: str, seed: int) -> None:
    from paceline.runtimes.native.network import NativeNetwork

    if not BUILT:
        pytest.skip("no native kernels for this machine")
    config = recurrent_config(MIXERS[name], None)
    native = NativeNetwork(decoder(config), config, Weights(recurrent_weights(config, seed)), num_threads=1, max_model_len=512)
    token_ids = np.random.default_rng(seed).integers(0, config.vocab_size, 70).tolist()
    np.testing.assert_allclose(one_pass(open_torch(config, seed), token_ids), one_pass(native, token_ids), atol=BOUND, rtol=BOUND)


def random_tree(random: np.random.Generator, num_known: int, num_drafted: int) -> list[int]:
    draft_parents = [int(random.integers(num_known - 1, node)) for node in range(num_known, num_known + num_drafted)]
    return [*range(-1, num_known - 1), *draft_parents]


@pytest.mark.spread(0.5)
@pytest.mark.parametrize("offset", range(4))
def test_torch_recurrent_rows_after_random_events_equal_one_pass(seed: int, offset: int) -> None:
    random, config = np.random.default_rng(seed + offset), recurrent_config(*KINDS)
    network, alone = (open_torch(config, seed) for _ in range(2))
    cache = network.new_cache(40, checkpoints=CheckpointConfig(interval_rows=64, max_checkpoints=4))
    sequence, text = cache.new_sequence(), list[int]()
    for _ in range(14):
        kind = random.choice(["keep", "keep", "keep", "drop", "skip", "preempt", "cut"])
        if kind == "preempt":
            cache.release_sequence(sequence)
            sequence = cache.new_sequence()
            text = text[: cache.match_prefix(sequence, [*text, 0])]
        elif kind == "cut":
            text = text[: cache.truncate(sequence, max(0, len(text) - int(random.integers(0, 3))))]
        else:
            known = int(random.choice([1, 3, MIN_PREFILL_ROWS_WITHOUT_RECORDS, 33]))
            tree = random_tree(random, known, int(random.choice([0, 2, 6])))
            text += check_a_pass(random, network, alone, cache, sequence, text, tree, known, str(kind))
    memory = next(memory for memory in cache.layer_caches if isinstance(memory, RecurrentStateCache))
    check_states(memory)


def check_a_pass(
    random: np.random.Generator,
    network: Network,
    alone: Network,
    cache: KVCache,
    sequence: CachedSequence,
    text: list[int],
    tree: list[int],
    known: int,
    kind: str,
) -> list[int]:
    """The tokens of the path that was kept."""
    ids = random.integers(0, network.config.vocab_size, len(tree)).tolist()
    node = int(random.integers(known - 1, len(tree)))
    path = path_to(tree, node)
    plan = cache.reserve_rows(sequence, tree, known)
    for _ in range(0 if kind == "skip" else int(random.integers(1, 3))):
        found = network.forward(*assemble_pass([plan], [ids], [path])).logits
        expected = one_pass(alone, text + [ids[row] for row in path])[len(text) :]
        np.testing.assert_allclose(found, expected, atol=BOUND, rtol=BOUND)
    if kind != "keep":
        cache.drop_reserved_rows(sequence)
        return []
    cache.keep_path(sequence, node)
    cache.register_prefix(sequence, text + [ids[row] for row in path])
    return [ids[row] for row in path]


def test_torch_recurrent_sequences_in_one_pass_equal_each_alone(seed: int) -> None:
    random, config = np.random.default_rng(seed), recurrent_config(*KINDS)
    network, alone = (open_torch(config, seed) for _ in range(2))
    cache = network.new_cache(40)
    texts = [random.integers(0, config.vocab_size, 60).tolist() for _ in range(3)]
    sequences, done = [cache.new_sequence() for _ in texts], [0, 0, 0]
    for _ in range(4):
        counts = random.choice([1, 5, 15], 3).tolist()
        plans = [cache.reserve_rows(sequence, range(-1, count - 1)) for sequence, count in zip(sequences, counts, strict=True)]
        ids = [text[begin : begin + count] for text, begin, count in zip(texts, done, counts, strict=True)]
        output = network.forward(*assemble_pass(plans, ids, [range(count) for count in counts]))
        for part, text, begin, count in zip(
            output.split_by_plan(plans, [range(count) for count in counts]), texts, done, counts, strict=True
        ):
            np.testing.assert_allclose(part.logits, one_pass(alone, text[: begin + count])[begin:], atol=BOUND, rtol=BOUND)
        for sequence, count in zip(sequences, counts, strict=True):
            cache.keep_path(sequence, count - 1)
        done = [begin + count for begin, count in zip(done, counts, strict=True)]


def test_recurrent_states_are_float32_for_every_weight_type(seed: int) -> None:
    config = recurrent_config(*KINDS)
    network = open_torch(config, seed, weight_type=WeightType.BF16)
    cache = network.new_cache(4)
    sequence = cache.new_sequence()
    network.forward(*assemble_pass([cache.reserve_rows(sequence, range(-1, 19), 20)], [[*range(20)]], [[19]]))
    cache.keep_path(sequence, 19)
    memory = next(memory for memory in cache.layer_caches if isinstance(memory, RecurrentStateCache))
    cache.reserve_rows(sequence, [-1])
    work = memory.plan_update(sequence.id)
    assert work.state.dtype is torch.float32
    assert work.state.abs().max() > 0
    cache.drop_reserved_rows(sequence)


def test_recurrent_network_needs_a_state_cache(seed: int) -> None:
    config = recurrent_config(MIXERS["delta"], None)
    network, other = open_torch(config, seed), open_torch(config, seed)
    network.allocate_kv(2)
    cache = other.new_cache(2)
    plan = cache.reserve_rows(cache.new_sequence(), [-1])
    with pytest.raises(RuntimeError, match="call new_cache"):
        network.forward(*assemble_pass([plan], [[0]], [[0]]))


def test_recurrent_states_larger_than_memory_are_a_capacity_error(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    network = open_torch(recurrent_config(MIXERS["delta"], None), seed)
    cache = network.new_cache(2)
    zeros = torch.zeros

    def refused(shape: tuple[int, ...], **options: object) -> object:
        if len(shape) == 1:
            raise RuntimeError("DefaultCPUAllocator: not enough memory")
        return zeros(shape, **options)

    monkeypatch.setattr(torch, "zeros", refused)
    with pytest.raises(CapacityError, match="lower max_num_seqs"):
        cache.reserve_rows(cache.new_sequence(), [-1])
