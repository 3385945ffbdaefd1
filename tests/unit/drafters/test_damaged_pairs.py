"""Drafts from pairs with NaN rows, or a token without an embedding: fewer draft tokens, never an error."""

import numpy as np
import pytest

from harness.model_configs import make_config
from harness.native_network import plain_tensor
from paceline.drafters.eagle.config import EagleConfig
from paceline.drafters.eagle.network import target_feature_network
from paceline.drafters.head_kinds import HeadKind
from paceline.drafters.recurrent_heads.drafter import EagleStyleDrafter
from paceline.drafters.recurrent_heads.head import RecurrentHead
from paceline.kv_cache.cache import KVCache
from paceline.models.weights import Weights
from paceline.runtimes.load import load_head
from paceline.sampling.params import SamplingParams
from paceline.sampling.processors import LogitsProcessor
from paceline.speculation.drafter import CommittedRows, DraftBudget
from paceline.speculation.request import Request

HIDDEN, VOCAB = 16, 40
LAYERS = make_config(
    vocab_size=VOCAB, hidden_size=HIDDEN, intermediate_size=32, num_heads=2, num_kv_heads=1, head_size=HIDDEN // 2, max_positions=100
)


def begun(embedding: np.ndarray, known: list[int], seed: int, *, tree_width: int = 1) -> tuple[EagleStyleDrafter, Request]:
    """A drafter that has seen the features of all tokens but the last."""
    random = np.random.default_rng(seed)
    shapes = {"q_proj": (HIDDEN, HIDDEN), "k_proj": (HIDDEN // 2, HIDDEN), "v_proj": (HIDDEN // 2, HIDDEN), "o_proj": (HIDDEN, HIDDEN)}
    shapes |= {"gate_proj": (32, HIDDEN), "up_proj": (32, HIDDEN), "down_proj": (HIDDEN, 32), "mlp_norm": (HIDDEN,)}
    shapes = {f"layers.0.{name}.weight": shape for name, shape in shapes.items()}
    shapes |= {"fc.weight": (HIDDEN, 2 * HIDDEN), "lm_head.weight": (VOCAB, HIDDEN)}
    tensors = {name: plain_tensor(random.normal(0, 0.5, shape).astype(np.float32)) for name, shape in shapes.items()}
    tensors["lm_head.weight"].array[:4] = 0.0  # the tokens of the texts are not the most probable ones
    config = EagleConfig(kind=HeadKind.EAGLE, layers=LAYERS, target_hidden_size=HIDDEN)
    runtime = load_head(target_feature_network(config), LAYERS, Weights(tensors), num_threads=1, max_model_len=100)
    head = RecurrentHead(config, runtime, runtime, plain_tensor(embedding), target_ids=None)
    cache = KVCache([], 16)
    drafter = EagleStyleDrafter(head, cache, vocab_size=VOCAB, tree_width=tree_width)
    params = SamplingParams()
    request = Request(known, len(known), params, LogitsProcessor(params, VOCAB, known), cache.new_sequence(), seed, 0, 99)
    cache.reserve_rows(request.cached_sequence, range(-1, len(known) - 2))
    cache.keep_path(request.cached_sequence, len(known) - 2)
    drafter.observe([CommittedRows(request, 0, len(known) - 1, np.ones((len(known) - 1, HIDDEN), np.float32))])
    return drafter, request


@pytest.fixture
def embedding(seed: int) -> np.ndarray:
    return np.random.default_rng(seed + 1).normal(0, 1, (VOCAB, HIDDEN)).astype(np.float32)


def test_nan_logits_of_an_eagle_draft_token_end_the_draft(embedding: np.ndarray, seed: int) -> None:
    """The pairs of drafted tokens are damaged: tokens drafted before are proposed."""
    embedding[4:] = np.nan
    drafter, request = begun(embedding, [1, 2, 3], seed)
    (tree,) = drafter.propose([request], [DraftBudget(5, 4)])
    assert tree is not None
    assert (tree.num_draft_tokens, tree.token_ids[1] >= 4) == (1, True)


@pytest.mark.parametrize("tree_width", [1, 3])
def test_nan_logits_of_the_eagle_root_cause_a_plain_step(tree_width: int, embedding: np.ndarray, seed: int) -> None:
    embedding[3] = np.nan
    drafter, request = begun(embedding, [1, 2, 3], seed, tree_width=tree_width)
    assert drafter.propose([request], [DraftBudget(9, 3)]) == [None]
    assert drafter.head.runtime.num_passes == 1


def test_eagle_token_without_an_embedding_causes_a_plain_step(embedding: np.ndarray, seed: int) -> None:
    drafter, request = begun(embedding[: VOCAB - 1], [1, 2, VOCAB - 1], seed)
    assert drafter.propose([request], [DraftBudget(9, 3)]) == [None]
    assert drafter.head.runtime.num_passes == 0
