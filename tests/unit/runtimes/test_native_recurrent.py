"""Recurrent layers of the native runtime: what they compute, and that a row's bits depend on its own text alone."""

import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from harness.layer_caches import check_states
from harness.native_network import BUILT
from harness.recurrent_networks import MIXERS, recurrent_config, recurrent_weights
from paceline.kv_cache.cache import CachedSequence, KVCache
from paceline.kv_cache.recurrent_state import MIN_PREFILL_ROWS_WITHOUT_RECORDS, CheckpointConfig, RecurrentStateCache
from paceline.kv_cache.row_plan import path_to
from paceline.models.config import ModelConfig
from paceline.models.layers import GatedDeltaConfig, GatedNorm, Mamba2Config, Recurrent, ShortConvConfig
from paceline.models.weights import Weights, as_float32
from paceline.runtimes.base import FloatArray, assemble_pass
from paceline.runtimes.decoder import HIDDEN_STATES, NetworkDefinition, decoder, recurrent_block
from paceline.runtimes.native.network import NativeNetwork

if not BUILT:
    pytest.skip("no native kernels for this machine", allow_module_level=True)

Doubles = NDArray[np.float64]
ALL_KINDS = [MIXERS["delta"], MIXERS["mamba"], None, MIXERS["convolution"], MIXERS["narrow mamba"], MIXERS["narrow delta"]]


def open_network(config: ModelConfig, seed: int, definition: NetworkDefinition | None = None, num_threads: int = 2) -> NativeNetwork:
    weights = Weights(recurrent_weights(config, seed))
    return NativeNetwork(definition or decoder(config), config, weights, num_threads=num_threads, max_model_len=2048)


def num_states(states: RecurrentStateCache) -> int:
    """States in use, spare ones excluded."""
    return sum(1 for _ in states._all_states()) - len(states._spare_states)


def memory_of(cache: KVCache) -> RecurrentStateCache:
    return next(memory for memory in cache.layer_caches if isinstance(memory, RecurrentStateCache))


class Reference:
    """A mixer in float64, as its source writes it down, row after row."""

    def __init__(self, mixer: Recurrent, tensors: Weights) -> None:
        self._mixer = mixer
        self._weights = {
            name.removeprefix("layers.0."): as_float32(tensors[name]).astype(np.float64) for name in tensors if name.startswith("layers.0.")
        }

    def __call__(self, x: Doubles) -> Doubles:
        mixer = self._mixer
        if isinstance(mixer, ShortConvConfig):
            mixed = self._of("c_proj", x) * self._convolved(self._of("b_proj", x) * self._of("conv_proj", x))
        else:
            is_separate = isinstance(mixer, GatedDeltaConfig) and mixer.has_separate_qkv_projections
            parts = ("q_proj", "k_proj", "v_proj") if is_separate else ("conv_proj",)
            taken = self._convolved(np.concatenate([self._of(part, x) for part in parts], axis=1))
            taken, z = taken / (1 + np.exp(-taken)), self._of("z_proj", x)
            z = z * mixer.gate_scale if isinstance(mixer, Mamba2Config) else z
            z = z / (1 + np.exp(-z))
            if isinstance(mixer, GatedDeltaConfig):
                mixed = self._delta(mixer, taken, self._of("b_proj", x), self._of("a_proj", x))
                mixed = (self._normed(mixed, mixer.norm_eps or 1e-5) * self._weights["gated_norm.weight"]).reshape(len(x), -1) * z
            else:
                mixed = self._mamba(mixer, taken, self._of("dt_proj", x) * mixer.dt_scale).reshape(len(x), -1)
                mixed = (
                    self._grouped_norm(mixer, mixed) * z if mixer.norm is GatedNorm.BEFORE_GATE else self._grouped_norm(mixer, mixed * z)
                )
                return self._of("out_proj", mixed) * mixer.output_scale
        return self._of("out_proj", mixed)

    def _grouped_norm(self, mixer: Mamba2Config, x: Doubles) -> Doubles:
        return self._normed(x.reshape(len(x), mixer.norm_groups, -1)).reshape(len(x), -1) * self._weights["gated_norm.weight"]

    def _of(self, name: str, x: Doubles) -> Doubles:
        product: Doubles = x @ self._weights[f"{name}.weight"].T + self._weights.get(f"{name}.bias", 0.0)
        return product

    def _normed(self, x: Doubles, epsilon: float = 1e-5) -> Doubles:
        normed: Doubles = x / np.sqrt((x**2).mean(-1, keepdims=True) + epsilon)
        return normed

    def _convolved(self, x: Doubles) -> Doubles:
        weight, size = self._weights["conv.weight"], self._mixer.kernel_size
        padded = np.concatenate([np.zeros((size - 1, x.shape[1])), x])
        rows = [(padded[row : row + size] * weight.T).sum(0) for row in range(len(x))]
        return np.stack(rows) + self._weights.get("conv.bias", 0.0)

    def _times(self, x: Doubles) -> Doubles:
        times: Doubles = np.log1p(np.exp(x + self._weights["decay.bias"]))
        return times

    def _delta(self, mixer: GatedDeltaConfig, taken: Doubles, b: Doubles, a: Doubles) -> Doubles:
        width, share = mixer.num_key_heads * mixer.key_size, mixer.num_value_heads // mixer.num_key_heads
        q, k = (
            part.reshape(len(taken), mixer.num_key_heads, -1).repeat(share, 1) for part in (taken[:, :width], taken[:, width : 2 * width])
        )
        q, k = (part / np.sqrt((part**2).sum(-1, keepdims=True) + 1e-6) for part in (q, k))
        v = taken[:, 2 * width :].reshape(len(taken), mixer.num_value_heads, -1)
        decays, betas = np.exp(self._weights["decay.weight"] * self._times(a)), mixer.beta_scale / (1 + np.exp(-b))
        state, rows = np.zeros((mixer.num_value_heads, mixer.key_size, mixer.value_size)), []
        for row in range(len(taken)):
            state = decays[row][:, None, None] * state
            read = np.einsum("hkv,hk->hv", state, k[row])
            state = state + np.einsum("hk,hv->hkv", k[row], betas[row][:, None] * (v[row] - read))
            rows.append(np.einsum("hkv,hk->hv", state, q[row]) * mixer.key_size**-0.5)
        return np.stack(rows)

    def _mamba(self, mixer: Mamba2Config, taken: Doubles, dt: Doubles) -> Doubles:
        width, size = mixer.num_heads * mixer.head_size, mixer.num_groups * mixer.state_size
        x = taken[:, :width].reshape(len(taken), mixer.num_heads, -1)
        b, c = (
            part.reshape(len(taken), mixer.num_groups, -1).repeat(mixer.num_heads // mixer.num_groups, 1)
            for part in (taken[:, width : width + size], taken[:, width + size :])
        )
        times = self._times(dt).clip(*mixer.dt_limits)
        state, rows = np.zeros((mixer.num_heads, mixer.head_size, mixer.state_size)), []
        for row in range(len(taken)):
            decay = np.exp(self._weights["decay.weight"] * times[row])
            state = decay[:, None, None] * state + np.einsum("hp,hn->hpn", times[row][:, None] * x[row], b[row])
            rows.append(np.einsum("hpn,hn->hp", state, c[row]) + self._weights["skip.weight"][:, None] * x[row])
        return np.stack(rows)


@pytest.mark.parametrize("num_rows", [1, 2, 7, 100])
@pytest.mark.parametrize("mixer", MIXERS.values(), ids=MIXERS)
def test_recurrent_mixer_equals_its_reference(mixer: Recurrent, num_rows: int, seed: int) -> None:
    config = recurrent_config(mixer)
    network = open_network(config, seed, lambda blocks: {HIDDEN_STATES: recurrent_block(blocks, mixer, blocks.embedding("embedding"), 0)})
    token_ids = np.random.default_rng(seed).integers(0, config.vocab_size, num_rows).tolist()
    cache = network.new_cache(8)
    plan = cache.reserve_rows(cache.new_sequence(), range(-1, num_rows - 1), num_rows)
    found = network.forward(*assemble_pass([plan], [token_ids], [[]])).hidden_states
    wanted = Reference(mixer, network.weights)(network.embed(np.array(token_ids, np.int32)).astype(np.float64))
    np.testing.assert_allclose(found, wanted, rtol=2e-5, atol=2e-5 * np.abs(wanted).max())


class PlainDecoding:
    """Logits after each token of a text, run one by one in a network of their own; a text that goes on where the last one ended is
    not run again from its beginning."""

    def __init__(self, config: ModelConfig, seed: int) -> None:
        self._network = open_network(config, seed, num_threads=1)
        self._cache = self._network.new_cache(64)
        self._sequence, self._text, self._rows = self._cache.new_sequence(), list[int](), list[FloatArray]()

    def logits(self, text: Sequence[int]) -> FloatArray:
        if self._text != list(text[: len(self._text)]):
            self._cache.release_sequence(self._sequence)
            self._sequence, self._text, self._rows = self._cache.new_sequence(), [], []
        for token in text[len(self._text) :]:
            plan = self._cache.reserve_rows(self._sequence, [-1])
            self._rows.append(self._network.forward(*assemble_pass([plan], [[token]], [[0]])).logits[0].copy())
            self._cache.keep_path(self._sequence, 0)
            self._text.append(token)
        return np.stack(self._rows)


def plain_logits(config: ModelConfig, seed: int, token_ids: Sequence[int]) -> FloatArray:
    return PlainDecoding(config, seed).logits(token_ids)


def random_tree(random: np.random.Generator, num_known: int, num_drafted: int) -> list[int]:
    is_chain = random.random() < 0.3
    draft_parents = [
        node - 1 if is_chain else int(random.integers(num_known - 1, node)) for node in range(num_known, num_known + num_drafted)
    ]
    return [*range(-1, num_known - 1), *draft_parents]


@pytest.mark.parametrize("num_threads", [1, 2])
def test_recurrent_rows_equal_plain_decoding_after_rejections(num_threads: int, seed: int) -> None:
    random, config = np.random.default_rng(seed), recurrent_config(*ALL_KINDS)
    network = open_network(config, seed, num_threads=num_threads)
    plain = [PlainDecoding(config, seed) for _ in range(3)]
    for _ in range(4):
        cache = network.new_cache(128)
        memory, texts, sequences = memory_of(cache), [[], [], []], [cache.new_sequence() for _ in range(3)]
        for _ in range(12):
            running = [index for index in range(3) if random.random() < 0.7] or [0]
            trees, tokens, knowns = [], [], []
            for _ in running:
                knowns.append(int(random.choice([1, 1, 1, 2, MIN_PREFILL_ROWS_WITHOUT_RECORDS, 40])))
                trees.append(random_tree(random, knowns[-1], int(random.choice([0, 0, 3, 9]))))
                tokens.append(random.integers(0, config.vocab_size, len(trees[-1])).tolist())
            plans = [cache.reserve_rows(sequences[index], tree, known) for index, tree, known in zip(running, trees, knowns, strict=True)]
            output = network.forward(*assemble_pass(plans, tokens, [range(len(tree)) for tree in trees]))
            rows = np.split(output.logits.copy(), np.cumsum([len(tree) for tree in trees])[:-1])
            for index, tree, ids, known, found in zip(running, trees, tokens, knowns, rows, strict=True):
                node = int(random.integers(known - 1, len(tree)))
                path = path_to(tree, node)
                text = [*texts[index], *(ids[row] for row in path)]
                np.testing.assert_array_equal(found[path], plain[index].logits(text)[-len(path) :])
                if random.random() < 0.2:
                    cache.drop_reserved_rows(sequences[index])
                else:
                    cache.keep_path(sequences[index], node)
                    texts[index] = text
            check_states(memory)
        for sequence in sequences:
            cache.release_sequence(sequence)
        assert num_states(memory) == 0


def committed_state(network: NativeNetwork, cache: KVCache, sequence: object) -> FloatArray:
    """The state after the committed rows, computed by a row that is dropped."""
    plan = cache.reserve_rows(sequence, [-1])  # type: ignore[arg-type]
    network.forward(*assemble_pass([plan], [[0]], [[0]]))
    cache.drop_reserved_rows(sequence)  # type: ignore[arg-type]
    state = memory_of(cache).plan_update(plan.sequence_id).state
    return state.copy()  # type: ignore[no-any-return]


def test_recurrent_state_after_decoding_equals_that_after_prefill(seed: int, large_counts: bool) -> None:
    config = recurrent_config(*ALL_KINDS)
    network, count = open_network(config, seed), 4096 if large_counts else 300
    token_ids = np.random.default_rng(seed).integers(0, config.vocab_size, count).tolist()
    states = []
    for step in (1, 7, 256):
        cache = network.new_cache(count // 32 + 4)
        sequence = cache.new_sequence()
        for start in range(0, count, step):
            ids = token_ids[start : start + step]
            network.forward(*assemble_pass([cache.reserve_rows(sequence, range(-1, len(ids) - 1), len(ids))], [ids], [[]]))
            cache.keep_path(sequence, len(ids) - 1)
        states.append(committed_state(network, cache, sequence))
    np.testing.assert_array_equal(states[0], states[1])
    np.testing.assert_array_equal(states[0], states[2])


def run_schedule(random: np.random.Generator, network: NativeNetwork, cache: KVCache, vocab_size: int) -> FloatArray | None:
    """Passes that are kept in part, dropped, run twice or not at all, cuts, preemptions; the state in the end must be a fresh run's."""
    sequence, text = cache.new_sequence(), list[int]()
    for _ in range(int(random.integers(1, 8))):
        kind = random.choice(["keep", "keep", "keep", "drop", "skip", "preempt", "cut"])
        if kind == "preempt":
            cache.release_sequence(sequence)
            sequence = cache.new_sequence()
            text = text[: cache.match_prefix(sequence, [*text, 0])]
            continue
        if kind == "cut":
            text = text[: cache.truncate(sequence, max(0, len(text) - int(random.integers(0, 3))))]
            continue
        known = int(random.choice([1, 1, 3, MIN_PREFILL_ROWS_WITHOUT_RECORDS, 33]))
        tree = random_tree(random, known, int(random.choice([0, 2, 6])))
        ids = random.integers(0, vocab_size, len(tree)).tolist()
        plan = cache.reserve_rows(sequence, tree, known)
        for _ in range(0 if kind == "skip" else int(random.integers(1, 3))):
            network.forward(*assemble_pass([plan], [ids], [[0]]))
        if kind == "keep":
            node = int(random.integers(known - 1, len(tree)))
            text += [ids[row] for row in path_to(tree, node)]
            cache.keep_path(sequence, node)
            cache.register_prefix(sequence, text)
        else:
            cache.drop_reserved_rows(sequence)
    if random.random() < 0.2 or not text:  # aborted
        cache.release_sequence(sequence)
        return None
    states = [committed_state(network, cache, sequence)]
    cache.release_sequence(sequence)
    sequence = cache.new_sequence()
    network.forward(*assemble_pass([cache.reserve_rows(sequence, range(-1, len(text) - 1), len(text))], [text], [[0]]))
    cache.keep_path(sequence, len(text) - 1)
    states.append(committed_state(network, cache, sequence))
    cache.release_sequence(sequence)
    np.testing.assert_array_equal(*states)
    return states[0]


def test_recurrent_state_after_random_events_equals_a_fresh_run(seed: int, large_counts: bool) -> None:
    random, config = np.random.default_rng(seed), recurrent_config(*ALL_KINDS)
    network = open_network(config, seed, num_threads=1)
    cache = network.new_cache(40, checkpoints=CheckpointConfig(interval_rows=64, max_checkpoints=5))
    count = 10_000 if large_counts else 200
    compared = sum(run_schedule(random, network, cache, config.vocab_size) is not None for _ in range(count))
    assert compared > count / 2
    memory = memory_of(cache)
    check_states(memory)
    cache.check_consistency()
    assert 0 < num_states(memory) <= 5
    cache.pool.release(cache.pool.allocate(40))  # evicts everything
    assert num_states(memory) == 0


@pytest.mark.parametrize("stride", [32, 96])
def test_cached_prefixes_have_the_recurrent_state_of_plain_decoding(stride: int, seed: int) -> None:
    random, config = np.random.default_rng(seed), recurrent_config(*ALL_KINDS)
    network = open_network(config, seed)
    cache = network.new_cache(100, checkpoints=CheckpointConfig(interval_rows=stride, max_checkpoints=3))
    token_ids = random.integers(0, config.vocab_size, 250).tolist()
    wanted, hits = plain_logits(config, seed, token_ids), set()
    for _ in range(12):
        sequence, stop = cache.new_sequence(), int(random.integers(60, 250))
        length = cache.match_prefix(sequence, token_ids)
        hits.add(length)
        assert length % 32 == 0
        while length < stop:
            ids = token_ids[length : length + int(random.choice([1, 20, 64]))]
            output = network.forward(
                *assemble_pass([cache.reserve_rows(sequence, range(-1, len(ids) - 1), len(ids))], [ids], [range(len(ids))])
            )
            np.testing.assert_array_equal(output.logits, wanted[length : length + len(ids)])
            cache.keep_path(sequence, len(ids) - 1)
            length += len(ids)
            cache.register_prefix(sequence, token_ids)
            check_states(memory_of(cache))
        cache.release_sequence(sequence)
        assert num_states(memory_of(cache)) <= 3
    assert len(hits) > 2


def test_truncated_recurrent_rows_leave_no_state(seed: int) -> None:
    random, config = np.random.default_rng(seed), recurrent_config(*ALL_KINDS)
    network = open_network(config, seed)
    cache = network.new_cache(20, checkpoints=CheckpointConfig(max_checkpoints=0))
    sequence, text = cache.new_sequence(), list[int]()
    for _ in range(15):
        agreed = len(text)
        for _ in range(int(random.integers(1, 4))):
            ids = random.integers(0, config.vocab_size, int(random.integers(1, 3))).tolist()
            plan = cache.reserve_rows(sequence, range(-1, len(ids) - 1), pinned_len=agreed)
            output = network.forward(*assemble_pass([plan], [ids], [range(len(ids))]))
            np.testing.assert_array_equal(output.logits, plain_logits(config, seed, text + ids)[len(text) :])
            cache.keep_path(sequence, len(ids) - 1)
            text += ids
        length = int(random.integers(agreed, len(text) + 1))
        assert cache.truncate(sequence, length) == length
        del text[length:]
    assert cache.truncate(sequence, 0) == 0
    assert num_states(memory_of(cache)) == 0


def test_repeated_pass_updates_the_recurrent_state_once(seed: int) -> None:
    config = recurrent_config(*ALL_KINDS)
    network = open_network(config, seed)
    cache = network.new_cache(20)
    sequence = cache.new_sequence()
    wanted = plain_logits(config, seed, [1, 2, 3, 4])
    for token in (1, 2, 3, 4):
        plan = cache.reserve_rows(sequence, [-1])
        for _ in range(3):
            np.testing.assert_array_equal(network.forward(*assemble_pass([plan], [[token]], [[0]])).logits[0], wanted[token - 1])
        cache.keep_path(sequence, 0)


def interrupted_at(line: int) -> Callable[..., Any]:
    """A trace function that raises KeyboardInterrupt at this line that the memory of states runs."""
    left = [line]

    def trace(frame: Any, event: str, argument: object) -> Any:
        if not frame.f_code.co_filename.endswith("kv_cache/recurrent_state.py"):
            return None
        if event == "line":
            left[0] -= 1
            if left[0] == 0:
                raise KeyboardInterrupt
        return trace

    return trace


def append(network: NativeNetwork, cache: KVCache, sequence: CachedSequence, token_ids: Sequence[int], count: int, known: int) -> None:
    """Run and keep the next `count` tokens."""
    length = sequence.committed_len
    ids = token_ids[length : length + count]
    network.forward(*assemble_pass([cache.reserve_rows(sequence, range(-1, count - 1), known)], [ids], [[0]]))
    cache.keep_path(sequence, count - 1)
    cache.register_prefix(sequence, token_ids[: length + count])


@pytest.mark.parametrize("num_known", [1, MIN_PREFILL_ROWS_WITHOUT_RECORDS])
def test_interrupt_in_the_recurrent_state_cache_leaves_other_requests(num_known: int, seed: int) -> None:
    """The request ends, as in the engine; a request that reuses its cache gets the rows of plain decoding."""
    config = recurrent_config(*ALL_KINDS)
    network, token_ids = open_network(config, seed, num_threads=1), np.random.default_rng(seed).integers(0, config.vocab_size, 90).tolist()
    wanted, line, is_over, num_hits = plain_logits(config, seed, token_ids), 0, False, 0
    while not is_over:
        line += 1
        cache = network.new_cache(30, checkpoints=CheckpointConfig(interval_rows=32, max_checkpoints=4))
        sequence = cache.new_sequence()
        append(network, cache, sequence, token_ids, 33, 33)
        for count in [1] * 20 + [12]:  # the end of the second block is pending
            append(network, cache, sequence, token_ids, count, 1)
        sys.settrace(interrupted_at(line))
        try:
            append(network, cache, sequence, token_ids, num_known + 2, num_known)
            is_over = True
        except KeyboardInterrupt:
            sys.settrace(None)
            cache.drop_reserved_rows(sequence)
        finally:
            sys.settrace(None)
        cache.release_sequence(sequence)
        sequence = cache.new_sequence()
        length = cache.match_prefix(sequence, token_ids)
        num_hits += length > 0
        ids = token_ids[length:]
        plan = cache.reserve_rows(sequence, range(-1, len(ids) - 1), len(ids))
        np.testing.assert_array_equal(network.forward(*assemble_pass([plan], [ids], [range(len(ids))])).logits, wanted[length:])
    assert line > 50
    assert num_hits > line / 2


FAULTS: dict[str, tuple[str, Callable[..., Any]]] = {
    "records of other rows than those kept become pending": (
        "keep_path",
        lambda self, plan, commit, real=RecurrentStateCache.keep_path: real(self, plan, commit._replace(rows=range(len(commit.rows)))),
    ),
    "rows that were dropped stay pending": (
        "keep_path",
        lambda self, plan, commit, real=RecurrentStateCache.keep_path: real(self, plan, commit._replace(rows=range(plan.num_rows))),
    ),
    "what a pass took in is forgotten": ("_finish_pass", lambda self, text: text.has_run.fill(0)),
    "spare states do not begin at zero": (
        "_new_state",
        lambda self, real=RecurrentStateCache._new_state, **_: real(self),
    ),
    "a text begins with a state without the records behind it": (
        "_allocate_records",
        lambda self, text, count, real=RecurrentStateCache._allocate_records: real(self, text, count)[
            : 0 if text.length and count > 1 else None
        ],
    ),
}


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
def test_planted_faults_in_native_recurrent_states_are_found(
    fault: tuple[str, Callable[..., Any]], seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(RecurrentStateCache, *fault)
    with pytest.raises((AssertionError, RuntimeError, IndexError, ValueError)):
        test_recurrent_state_after_random_events_equals_a_fresh_run(seed, large_counts=False)


@pytest.mark.parametrize("part", ["decay.bias", "decay.weight", "gates"])
@pytest.mark.parametrize("mixer", [MIXERS["delta"], MIXERS["mamba"], MIXERS["narrow mamba"]], ids=["delta", "mamba", "limits"])
def test_nan_in_recurrent_weights_reaches_the_logits(mixer: Recurrent, part: str, seed: int) -> None:
    """Damaged weights must not turn into plausible values."""
    config = recurrent_config(mixer)
    tensors = recurrent_weights(config, seed)
    name = f"layers.0.{part}" if part != "gates" else f"layers.0.{'a' if isinstance(mixer, GatedDeltaConfig) else 'dt'}_proj.weight"
    tensors[name].array.reshape(-1)[0] = np.nan
    network = NativeNetwork(decoder(config), config, Weights(tensors), num_threads=1, max_model_len=64)
    cache = network.new_cache(2)
    logits = network.forward(*assemble_pass([cache.reserve_rows(cache.new_sequence(), range(-1, 2))], [[1, 2, 3]], [range(3)])).logits
    assert np.isnan(logits[1:]).all()
