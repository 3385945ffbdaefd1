"""Trees of Medusa heads grown in one call of the kernels are those that grow from rows."""

import numpy as np
import pytest
from numpy.typing import NDArray

from harness.model_configs import make_config
from harness.native_network import plain_tensor
from paceline.drafters.medusa.checkpoint import MedusaHeads
from paceline.drafters.medusa.drafter import MedusaDrafter
from paceline.drafters.medusa.network import MedusaNetwork
from paceline.kv_cache.paged import CachedSequence
from paceline.kv_cache.row_plan import TreeLayout
from paceline.models.config import WeightType
from paceline.models.rope_config import RopeConfig
from paceline.models.weights import AnyTensor, Weights
from paceline.runtimes.native.library import kernels_path
from paceline.sampling.params import SamplingParams
from paceline.sampling.processors import LogitsProcessor
from paceline.speculation.drafter import CommittedRows, DraftBudget
from paceline.speculation.request import Request
from paceline.speculation.tree import DraftTree

HIDDEN, VOCAB, NUM_HEADS = 32, 300, 4
TARGET = make_config(
    family="llama", vocab_size=VOCAB, hidden_size=HIDDEN, intermediate_size=64, num_layers=1, num_heads=2, num_kv_heads=2,
    head_size=HIDDEN // 2, norm_eps=1e-5, max_positions=100, rope=RopeConfig(), weight_type=WeightType.F32,
)  # fmt: skip

pytestmark = pytest.mark.skipif(kernels_path() is None, reason="no native kernels for this machine")


def network(seed: int, *, is_shared: bool, has_map: bool) -> MedusaNetwork:
    random = np.random.default_rng(seed)
    rows = 120 if has_map else VOCAB
    names = ["lm_head"] if is_shared else [f"heads.{head}.lm_head" for head in range(NUM_HEADS)]
    shapes = {f"heads.{head}.blocks.0": (HIDDEN, HIDDEN) for head in range(NUM_HEADS)} | dict.fromkeys(names, (rows, HIDDEN))
    tensors: dict[str, AnyTensor] = {
        f"{name}.weight": plain_tensor(random.normal(0, 1.5 / np.sqrt(HIDDEN), shape).astype(np.float32)) for name, shape in shapes.items()
    }
    ids = np.sort(random.choice(VOCAB, rows, replace=False)) if has_map else None
    heads = MedusaHeads(NUM_HEADS, 1, Weights(tensors), is_shared, rows, token_map=ids)
    return MedusaNetwork(heads, TARGET, num_threads=2, backend="native")


def request_of(params: SamplingParams, seed: int, sample_index: int = 0) -> Request:
    known = [1, 2, 3]
    return Request(known, 3, params, LogitsProcessor(params, VOCAB, known), CachedSequence(), seed, sample_index, 10_000)


def show(drafter: MedusaDrafter, request: Request, feature: NDArray[np.float32]) -> None:
    drafter.observe([CommittedRows(request, len(request.token_ids) - 2, 1, feature[None])])


def proposals(drafter: MedusaDrafter, temperature: float, seed: int) -> list[DraftTree | None]:
    """Step by step, now with tokens that were guessed, so that what is measured of the heads changes, now with others."""
    random = np.random.default_rng(seed)
    request, found = request_of(SamplingParams(temperature=temperature), 2**63 + seed, 3), []
    for _ in range(40):
        show(drafter, request, random.normal(0, 1, HIDDEN).astype(np.float32))
        layout = list(TreeLayout)[int(random.integers(0, 3))]
        (tree,) = drafter.propose([request], [DraftBudget(int(random.integers(1, 20)), int(random.integers(0, 6)), layout)])
        found.append(tree)
        num_right = int(random.integers(0, 3))
        right = [] if tree is None else [int(tree.token_ids[node]) for node in tree.first_path()[:num_right]]
        request.token_ids += [*right, int(random.integers(0, VOCAB))]
    return found


def fields_of(tree: DraftTree | None) -> list[object] | None:
    return None if tree is None else [*map(list, (tree.token_ids, tree.parents, tree.depths, tree.sources)), tree.draft_probs]


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
@pytest.mark.parametrize("is_shared", [False, True])
@pytest.mark.parametrize("has_map", [False, True])
def test_a_tree_is_the_same_in_one_call_and_from_rows(*, temperature: float, is_shared: bool, has_map: bool, seed: int) -> None:
    together, apart = (MedusaDrafter(network(seed, is_shared=is_shared, has_map=has_map), vocab_size=VOCAB) for _ in range(2))
    assert all(together._grower(depth) is not None for depth in range(1, NUM_HEADS + 1))
    apart._growers = dict.fromkeys(range(1, NUM_HEADS + 1))
    found, expected = proposals(together, temperature, seed), proposals(apart, temperature, seed)
    assert list(map(fields_of, found)) == list(map(fields_of, expected))
    assert together._accuracy == apart._accuracy
    assert sum(map(sum, together._accuracy[temperature == 0.0].hits)) > 10
    assert any(tree is not None and len(set(tree.parents)) < len(tree.parents) for tree in found)


def test_a_feature_that_is_none_makes_no_tree(seed: int) -> None:
    drafter = MedusaDrafter(network(seed, is_shared=False, has_map=False), vocab_size=VOCAB)
    request = request_of(SamplingParams(), seed)
    show(drafter, request, np.full(HIDDEN, np.nan, np.float32))
    assert drafter.propose([request], [DraftBudget(9, 3, TreeLayout.MASK)]) == [None]
    show(drafter, request, np.ones(HIDDEN, np.float32))
    assert drafter.propose([request], [DraftBudget(9, 3, TreeLayout.MASK)]) != [None]
