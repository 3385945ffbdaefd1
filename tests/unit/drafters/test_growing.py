"""Drafts grown in one call of the kernels are those that grow pass by pass."""

from collections.abc import Mapping

import numpy as np
import pytest

from harness.model_configs import make_config, with_attention
from harness.native_network import plain_tensor
from paceline.drafters.eagle.config import EagleConfig
from paceline.drafters.eagle.network import drafted_pairs, true_pairs
from paceline.drafters.head_kinds import HeadKind
from paceline.drafters.mtp import mtp_pairs
from paceline.drafters.pairs.config import PairConfig
from paceline.drafters.pairs.drafter import PairDrafter
from paceline.drafters.pairs.head import PairHead
from paceline.kv_cache.paged import KVCache
from paceline.kv_cache.row_plan import TreeLayout
from paceline.models.config import WeightType
from paceline.models.rope_config import RopeConfig
from paceline.models.weights import AnyTensor, Tensor, Weights
from paceline.runtimes.head import Ranking, open_head
from paceline.runtimes.native.growing import NativeGrower
from paceline.runtimes.native.library import kernels_path
from paceline.runtimes.rounding import to_bf16
from paceline.sampling.params import SamplingParams
from paceline.sampling.processors import LogitsProcessor
from paceline.speculation.drafter import CommittedRows, DraftBudget
from paceline.speculation.request import Request
from paceline.speculation.tree import DraftTree

HIDDEN, INNER, HEADS, KV_HEADS, DRAFT_IDS, VOCAB = 48, 64, 4, 2, 300, 500
LAYERS = make_config(
    family="llama", vocab_size=DRAFT_IDS, hidden_size=HIDDEN, intermediate_size=INNER, num_layers=1, num_heads=HEADS,
    num_kv_heads=KV_HEADS, head_size=HIDDEN // HEADS, norm_eps=1e-5, max_positions=100, rope=RopeConfig(), weight_type=WeightType.F32,
)  # fmt: skip
TABLES = {WeightType.F32: np.float32, WeightType.F16: np.float16, WeightType.BF16: np.uint16}

pytestmark = pytest.mark.skipif(kernels_path() is None, reason="no native kernels for this machine")


def tensors(columns: int, features: int, seed: int) -> Mapping[str, AnyTensor]:
    random = np.random.default_rng(seed)
    kv = HIDDEN // HEADS * KV_HEADS
    shapes = {"q_proj": (HIDDEN, columns), "k_proj": (kv, columns), "v_proj": (kv, columns), "o_proj": (HIDDEN, HIDDEN)}
    shapes |= {"gate_proj": (INNER, HIDDEN), "up_proj": (INNER, HIDDEN), "down_proj": (HIDDEN, INNER)}
    shapes = {f"layers.0.{name}.weight": shape for name, shape in shapes.items()}
    shapes |= {"fc.weight": (HIDDEN, features), "lm_head.weight": (DRAFT_IDS, HIDDEN)}
    made = {name: random.normal(0, 2.0 / np.sqrt(shape[1]), shape).astype(np.float32) for name, shape in shapes.items()}
    norms = ("layers.0.attention_norm", "layers.0.mlp_norm", "layers.0.hidden_norm", "embedding_norm", "feature_norm", "final_norm")
    made |= {f"{name}.weight": random.uniform(0.5, 1.5, HIDDEN).astype(np.float32) for name in norms}
    return {name: plain_tensor(values) for name, values in made.items()}


def table(kind: WeightType, seed: int) -> Tensor:
    values = np.random.default_rng(seed + 1).normal(0, 1, (VOCAB, HIDDEN)).astype(np.float32)
    return Tensor(to_bf16(values) if kind is WeightType.BF16 else values.astype(TABLES[kind]), kind, values.shape)


def head(method: str, seed: int) -> PairHead:
    """With embeddings of another type each, and for EAGLE-3 a draft vocabulary and another network for true pairs."""
    if method == "mtp":
        config = PairConfig(kind=HeadKind.MTP, layers=LAYERS, feature_size=HIDDEN)
        runtime = open_head(mtp_pairs(config), LAYERS, Weights(tensors(HIDDEN, 2 * HIDDEN, seed)), num_threads=2, max_context=400)
        return PairHead(config, runtime, runtime, table(WeightType.BF16, seed), target_ids=None)
    is_eagle3 = method == "eagle3"
    layers = with_attention(LAYERS, window=7) if method == "eagle with a window" else LAYERS
    kind, boundaries = (HeadKind.EAGLE3, (1, 2)) if is_eagle3 else (HeadKind.EAGLE, ())
    switches = {"norms_embedding": is_eagle3, "has_final_norm": is_eagle3}
    eagle = EagleConfig(kind=kind, layers=layers, feature_size=HIDDEN, boundaries=boundaries, **switches)
    weights = Weights(tensors(2 * HIDDEN if is_eagle3 else HIDDEN, 2 * HIDDEN, seed))
    runtime = open_head(true_pairs(eagle), layers, weights, num_threads=2, max_context=400)
    drafted = runtime.beside(drafted_pairs(eagle)) if is_eagle3 else runtime
    ids = np.sort(np.random.default_rng(seed).choice(VOCAB + 20, DRAFT_IDS, replace=False)) if is_eagle3 else None
    return PairHead(eagle, runtime, drafted, table(WeightType.F16 if is_eagle3 else WeightType.F32, seed), target_ids=ids)


def proposals(method: str, width: int, params: SamplingParams, seed: int, *, in_one_call: bool) -> list[DraftTree | None]:
    """What a drafter proposes in one request, step by step, whatever was committed between; past the trained window too."""
    random = np.random.default_rng(seed)
    cache = KVCache(np.zeros((2, 16, 1, 32, 2), np.float32), TreeLayout.MASK)
    opened = head(method, seed)
    opened.rank(Ranking(7, 2))  # of an earlier drafter, which the next one replaces
    drafter = PairDrafter(opened, cache, vocab_size=VOCAB, tree_width=width)
    assert drafter._grower is not None
    if not in_one_call:
        drafter._grower = None
    token_ids = random.integers(0, VOCAB, 60).tolist()
    request = Request(token_ids, 60, params, LogitsProcessor(params, VOCAB, token_ids), cache.new_sequence(), seed, 0, 10_000)
    found = []
    for count in (59, 1, 3, 1, 2, 30, 1, 28, 1, 1):
        start = request.sequence.committed_len
        while len(request.token_ids) <= start + count:
            request.token_ids.append(int(random.integers(0, VOCAB)))
        cache.reserve(request.sequence, range(-1, count - 1))
        cache.keep_path(request.sequence, count - 1)
        rows = random.normal(0, 1, (count, HIDDEN)).astype(np.float32)
        drafter.observe([CommittedRows(request, start, count, rows, np.stack([rows, -rows]) if drafter.needs.layers else None)])
        depth = int(random.integers(1, 6))
        layout = (TreeLayout.MASK, TreeLayout.PATHS)[int(random.integers(0, 2))]
        budget = DraftBudget(depth + 1 if width == 1 else 4 * depth, depth, layout)
        passes = drafter.head.runtime.num_passes
        found += drafter.propose([request], [budget])
        assert 1 <= drafter.head.runtime.num_passes - passes <= depth
    return found


def fields_of(tree: DraftTree | None) -> list[object] | None:
    return None if tree is None else [*map(list, (tree.token_ids, tree.parents, tree.depths, tree.sources)), tree.draft_probs]


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
@pytest.mark.parametrize("width", [1, 2, 3, 5])
@pytest.mark.parametrize("method", ["eagle", "eagle with a window", "eagle3", "mtp"])
def test_a_draft_is_the_same_in_one_call_and_pass_by_pass(method: str, width: int, temperature: float, seed: int) -> None:
    params = SamplingParams(temperature=temperature)
    together, apart = (proposals(method, width, params, seed, in_one_call=in_one_call) for in_one_call in (True, False))
    assert list(map(fields_of, together)) == list(map(fields_of, apart))
    assert sum(tree.num_draft_tokens for tree in together if tree is not None) > 20


def test_more_pairs_than_one_call_takes_run_before(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """59 of the prompt's pairs and more wait for the first draft."""
    monkeypatch.setattr(NativeGrower, "most_true", 20)
    monkeypatch.setattr("paceline.drafters.pairs.drafter.FLUSH_ROWS", 1000)
    together, apart = (proposals("eagle3", 3, SamplingParams(), seed, in_one_call=in_one_call) for in_one_call in (True, False))
    assert list(map(fields_of, together)) == list(map(fields_of, apart))


def begun(opened: PairHead, known: list[int], seed: int, **options: int) -> tuple[PairDrafter, Request]:
    """A drafter that has seen the features of all tokens but the last."""
    cache = KVCache(np.zeros((2, 16, 1, 32, 2), np.float32), TreeLayout.MASK)
    drafter = PairDrafter(opened, cache, vocab_size=VOCAB, **options)
    params = SamplingParams()
    request = Request(known, len(known), params, LogitsProcessor(params, VOCAB, known), cache.new_sequence(), seed, 0, 99)
    cache.reserve(request.sequence, range(-1, len(known) - 2))
    cache.keep_path(request.sequence, len(known) - 2)
    drafter.observe([CommittedRows(request, 0, len(known) - 1, np.ones((len(known) - 1, HIDDEN), np.float32))])
    return drafter, request


def test_a_row_that_is_none_ends_a_draft(seed: int) -> None:
    """The pairs of drafted tokens are damaged: what was guessed before is proposed, without an error."""
    damaged = head("eagle", seed)
    damaged._embedding.array[4:] = np.nan  # type: ignore[union-attr]
    drafter, request = begun(damaged, [1, 2, 3], seed)
    (tree,) = drafter.propose([request], [DraftBudget(5, 4, TreeLayout.MASK)])
    assert tree is not None
    assert tree.num_draft_tokens == 1


@pytest.mark.parametrize("width", [1, 3])
def test_a_root_whose_row_is_none_makes_a_plain_step(width: int, seed: int) -> None:
    damaged = head("eagle", seed)
    damaged._embedding.array[3] = np.nan  # type: ignore[union-attr]
    drafter, request = begun(damaged, [1, 2, 3], seed, tree_width=width)
    assert drafter.propose([request], [DraftBudget(9, 3, TreeLayout.MASK)]) == [None]
    assert drafter.head.runtime.num_passes == 1


def test_a_token_without_an_embedding_makes_a_plain_step(seed: int) -> None:
    drafter, request = begun(head("eagle", seed), [1, 2, VOCAB - 1], seed)
    drafter.head.embedded_ids = VOCAB - 1
    assert drafter.propose([request], [DraftBudget(9, 3, TreeLayout.MASK)]) == [None]
    assert drafter.head.runtime.num_passes == 0
