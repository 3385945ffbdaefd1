"""Block drafters next to the classes of z-lab's dflash and of the speculators library, in an environment of their own (make test-clients).

Windows shorter than a text are compared with z-lab's classes only. speculators trains with a window that begins at the anchor for all rows;
what serves its files gives each row a window of its own, and so do we.
"""

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from clients.run_foreign import run_foreign
from harness.model_configs import make_config
from harness.native_network import plain_tensor
from paceline.drafters.block.checkpoint import open_block_checkpoint
from paceline.drafters.block.config import read_block_config
from paceline.drafters.block.network import SELECTOR_VECTORS, BlockHead, DraftBlock, PendingContext
from paceline.drafters.head_files import HeadFiles
from paceline.runtimes import load as load_module
from paceline.runtimes.base import RowRange

COUNTS = (9, 1, 5, 8, 20)
TABLE = np.array([3, 1, 2, 5, 4], np.int32)
VOCAB_SIZE, MASK = 97, 96
DRAFT_IDS = list(range(4, 94, 3))
TOLERANCE = 1e-4
LAYER = {
    "model_type": "qwen3", "vocab_size": VOCAB_SIZE, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 512, "rms_norm_eps": 1e-6,
}  # fmt: skip
SLIDING = {"layer_types": ["sliding_attention", "sliding_attention", "full_attention"], "use_sliding_window": True}
NARROW, WIDE = {**SLIDING, "sliding_window": 12}, {**SLIDING, "sliding_window": 400}
BLOCK = {"block_size": 7, "mask_token_id": MASK, "aux_hidden_state_layer_ids": [0, 4, 6]}
ZLAB = {"block_size": 8, "num_target_layers": 9}
NESTED = {"mask_token_id": MASK, "target_layer_ids": [1, 3, 5]}
SELECTOR = {"conv_kernel_size": 3, "conv_group_size": 8, "selector_rank": 12, "selector_top_k": 6}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 8.0, "original_max_position_embeddings": 32}


@dataclass(frozen=True)
class Case:
    """A drafter to be made.

    Attributes:
        layer, config: changed in the library's configs.
        draft_ids: of its vocabulary; None = the target's.
    """

    library: str
    kind: str
    layer: Mapping[str, Any] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)
    draft_ids: list[int] | None = None


def zlab(nested: Mapping[str, Any] | None = None, layer: Mapping[str, Any] | None = None, **more: Any) -> Case:
    return Case("dflash", "dflash", layer or {}, {**ZLAB, **more, "dflash_config": {**NESTED, **(nested or {})}})


def dspark(kind: str, *, with_markov: bool | None = None, **more: Any) -> Case:
    heads = {"markov_rank": 6, "markov_head_type": kind, "enable_confidence_head": with_markov is not None}
    heads["confidence_head_with_markov"] = bool(with_markov)
    return Case("speculators", "dspark", more.pop("layer", {}), {**heads, **more})


CASES: dict[str, Case] = {
    "z-lab, full": zlab(),
    "z-lab, sliding layers are causal": zlab(layer=NARROW),
    "z-lab, sliding both ways": zlab(layer=NARROW, is_causal=False),
    "z-lab, causal": zlab(is_causal=True),
    "z-lab, scales and cap": zlab({"input_embedding_scale": 2.5, "output_multiplier": 0.5, "final_logit_softcapping": 3.0}),
    "z-lab, no cap": zlab({"final_logit_softcapping": 0.0}),
    "z-lab, default layers": Case("dflash", "dflash", config={**ZLAB, "dflash_config": {"mask_token_id": MASK}}),
    "z-lab, biases": zlab(layer={"attention_bias": True}),
    "z-lab, yarn": zlab(layer={"rope_parameters": YARN}),
    "z-lab, dflash2": Case("dflash", "dflash2", config={**ZLAB, "dflash_config": {**NESTED, **SELECTOR}}),
    "z-lab, dflash2, sliding": Case(
        "dflash", "dflash2", NARROW, {**ZLAB, "dflash_config": {**NESTED, **SELECTOR, "output_multiplier": 0.5}}
    ),
    "dflash2": Case("speculators", "dflash2", config=SELECTOR),
    "dflash2, sliding": Case("speculators", "dflash2", WIDE, SELECTOR),
    "dflash2, sliding layers are causal": Case("speculators", "dflash2", WIDE, {**SELECTOR, "sliding_window_non_causal": False}),
    "dflash": Case("speculators", "dflash"),
    "dflash, its own vocabulary": Case("speculators", "dflash", draft_ids=DRAFT_IDS),
    "dflash, sliding layers are causal": Case("speculators", "dflash", WIDE),
    "dflash, sliding both ways": Case("speculators", "dflash", WIDE, {"sliding_window_non_causal": True}),
    "dflash, from the anchor": Case("speculators", "dflash", config={"sample_from_anchor": True}),
    "dspark, vanilla": dspark("vanilla"),
    "dspark, vanilla, confidence of the hidden state": dspark("vanilla", with_markov=False),
    "dspark, gated": dspark("gated", with_markov=True),
    "dspark, rnn": dspark("rnn", with_markov=True),
    "dspark, rnn, at its own position": dspark("rnn", with_markov=True, sample_from_anchor=False),
    "dspark, vanilla, at its own position": dspark("vanilla", with_markov=True, sample_from_anchor=False),
    "dspark, sliding layers are causal": dspark("gated", layer=WIDE),
    "dspark, no bias": dspark("vanilla", markov_rank=0, with_markov=False),
    "dspark, its own vocabulary": Case(
        "speculators", "dspark", config=dspark("rnn", with_markov=True).config, draft_ids=DRAFT_IDS
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def drafters(clients: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a drafter for each case, its inputs and the rows of its drafts."""
    folder = tmp_path_factory.mktemp("blocks")
    cases = {}
    for seed, (name, case) in enumerate(CASES.items()):
        sizes = {"draft_vocab_size": len(case.draft_ids) if case.draft_ids else VOCAB_SIZE}
        config = case.config if case.library == "dflash" else {**BLOCK, **sizes, **case.config}
        cases[name] = {**asdict(case), "seed": seed, "layer": {**LAYER, **case.layer}, "config": config}
    (folder / "cases.json").write_text(json.dumps(cases), encoding="utf-8")
    run_foreign(clients / "speculators", "block_heads.py", folder / "cases.json", folder)
    return folder


@pytest.mark.parametrize("backend", ["native", "torch"])
@pytest.mark.parametrize("name", CASES)
def test_block_drafts_equal_those_of_the_publishers_classes(
    name: str, backend: str, drafters: Path, monkeypatch: pytest.MonkeyPatch, tally: "Counter[str]"
) -> None:
    if backend == "torch":
        monkeypatch.setattr(load_module, "kernels_path", lambda: None)
    given, case = np.load(drafters / f"{name}.npz"), CASES[name]
    head = load_head(drafters / name, given)
    assert head.config.sample_from_anchor is case.config.get("sample_from_anchor", case.kind == "dspark")
    assert (None if head.target_ids is None else head.target_ids.tolist()) == case.draft_ids
    own = (2, 5, 7) if "default" in name else (2, 4, 6)
    assert head.config.layer_boundaries == (own if case.library == "dflash" else (0, 4, 6))
    num_known, size = 0, head.config.block_size
    for number, count in enumerate(COUNTS):
        features = given["features"][num_known : num_known + count]
        head.run_context([PendingContext(features, RowRange(0, count, num_known, TABLE))])
        num_known += count
        anchor, mask = int(given["anchors"][number]), np.ones((size, size), np.bool_)
        output = head.run_block([DraftBlock(anchor, RowRange(0, size, num_known, TABLE, mask))])
        shift = 0 if head.config.sample_from_anchor else 1
        logits, hidden = np.array(output.logits), np.array(output.hidden_states)
        np.testing.assert_allclose(logits[shift:], given[f"{number}.logits"], atol=TOLERANCE)
        if head.config.num_rescored_tokens:
            selected = np.array(output.results[SELECTOR_VECTORS])[shift:]
            assert select(head, logits[shift:], selected, anchor) == given[f"{number}.tokens"].tolist()
        elif f"{number}.tokens" in given:
            compare_biased(head, anchor, logits, hidden, {key: given.get(f"{number}.{key}") for key in ("tokens", "rows", "confidences")})
        tally["draft tokens that are those of the publishers' classes"] += len(logits) - shift


def select(head: BlockHead, logits: NDArray[np.float32], selected: NDArray[np.float32], anchor: int) -> list[int]:
    """The greedy tokens of a draft, each the best of its row's candidates after the one before."""
    tokens = [anchor]
    for row, own in zip(logits, selected, strict=True):
        ids = np.sort(np.argsort(-row)[: head.config.num_rescored_tokens]).astype(np.int32)
        tokens.append(int(ids[head.rescore_candidates([tokens[-1]], own, ids, row[ids])[0].argmax()]))
    return tokens[1:]


def compare_biased(
    head: BlockHead, anchor: int, logits: NDArray[np.float32], hidden: NDArray[np.float32], given: Mapping[str, Any]
) -> None:
    """The rows with the bias of the tokens before, the greedy tokens and their confidences."""
    shift = 0 if head.config.sample_from_anchor else 1
    previous, state = anchor, head.first_markov_state(anchor, hidden[0], sample_from_anchor=bool(head.config.sample_from_anchor))
    for slot, (base, h) in enumerate(zip(logits[shift:], hidden[shift:], strict=True)):
        e = head.markov_embedding(previous)
        latent, state = head.markov_latent(e, h, state)
        row = np.array(head.add_markov_bias(latent[None], base[None]).logits[0])
        np.testing.assert_allclose(row, given["rows"][slot], atol=TOLERANCE)
        if given["confidences"] is not None:
            assert abs(head.predict_confidence(h, e) - float(given["confidences"][slot])) < 1e-5
        best = int(row.argmax())
        previous = best if head.target_ids is None else int(head.target_ids[best])
        assert previous == given["tokens"][slot]


def load_head(folder: Path, given: Mapping[str, NDArray[Any]]) -> BlockHead:
    files = HeadFiles.open(folder)
    target = make_config(hidden_size=32, vocab_size=VOCAB_SIZE, num_layers=9)
    block = open_block_checkpoint(files, read_block_config(files, target), target)
    parts = dict(block.weights)
    parts.setdefault("lm_head.weight", plain_tensor(given["lm_head"]))
    embedding = parts.pop("embedding.weight", plain_tensor(given["embedding"]))
    head = BlockHead(block, parts, embedding, num_threads=2, max_model_len=128)
    head.runtime.allocate_kv(8)
    return head
