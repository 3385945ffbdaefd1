"""Block drafters compute what their publishers compute: held to a plain computation, and to transformers' Muse Glimmer assistant."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from harness.block_checkpoints import DFLASH, DSPARK, MASK, SIZES, TARGET_HIDDEN, VOCAB_SIZE, PlainBlock, block_tensors
from harness.eagle_checkpoints import Tensors, write_head
from harness.model_configs import make_config
from harness.native_network import plain_tensor
from paceline.drafters.block.checkpoint import open_block, read_block_config
from paceline.drafters.block.network import BlockHead, DraftBlock, PendingContext
from paceline.drafters.head_files import HeadFiles
from paceline.runtimes.base import RowRange
from paceline.runtimes.native.library import kernels_path

BLOCKS = np.array([3, 1, 2, 5, 4], np.int32)
FULL, SLIDING = "full_attention", "sliding_attention"
BOTH_WAYS = ((None, False),) * 3


@dataclass(frozen=True)
class Variant:
    config: Mapping[str, Any]
    tensors: Callable[[], Tensors]
    layers: Any = BOTH_WAYS
    plain: Mapping[str, Any] = field(default_factory=dict)


def dflash(nested: Mapping[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    return {**DFLASH, **more, "dflash_config": {**DFLASH["dflash_config"], **(nested or {})}}


def dspark(kind: str, with_markov: bool | None = None, **more: Any) -> Variant:
    config = {**DSPARK, "markov_head_type": kind, "confidence_head_with_markov": bool(with_markov), **more}
    return Variant(config, lambda: block_tensors(DSPARK, markov=kind, confidence=with_markov))


SLIDES = {"layer_types": [SLIDING, SLIDING, FULL], "sliding_window": 12}
VARIANTS: dict[str, Variant] = {
    "dflash, all rows see the block": Variant(DFLASH, block_tensors),
    "dflash, sliding layers are causal": Variant(dflash(**SLIDES), block_tensors, [(12, True), (12, True), (None, False)]),
    "dflash, sliding both ways": Variant(dflash(**SLIDES, is_causal=False), block_tensors, [(12, False), (12, False), (None, False)]),
    "dflash, causal": Variant(dflash({"causal": True}), block_tensors, [(None, True)] * 3),
    "dflash, use_swa": Variant(dflash({"use_swa": True, "swa_window_size": 9}), block_tensors, [(9, True)] * 3),
    "dflash, scales and cap": Variant(
        dflash({"input_embedding_scale": 2.5, "output_multiplier": 0.5, "final_logit_softcapping": 3.0}), block_tensors
    ),
    "dflash, scaled values": Variant(dflash(attention_value_scale=0.7), block_tensors),
    "dflash, no norms of queries and keys": Variant(DFLASH, lambda: block_tensors(qk_norm=False)),
    "dflash, interleaved rotation": Variant(dflash(rope_is_neox_style=False), block_tensors, plain={"interleaved": True}),
    "dspark, vanilla": dspark("vanilla"),
    "dspark, vanilla with confidence": dspark("vanilla", with_markov=False),
    "dspark, gated": dspark("gated", with_markov=True),
    "dspark, gated, confidence of the hidden state": dspark("gated", with_markov=False),
    "dspark, rnn": dspark("rnn", with_markov=True),
    "dspark, LFM2's rotation": Variant(
        {**DSPARK, "architectures": ["Lfm2DSparkDraftModel"]}, lambda: block_tensors(DSPARK, markov="vanilla"), plain={"interleaved": True}
    ),
    "dspark, at its own position": dspark("vanilla", sample_from_anchor=False),
}


def open_head(tmp_path: Path, config: Mapping[str, Any], tensors: Tensors, embedding: Any, lm_head: Any, backend: str) -> BlockHead:
    files = HeadFiles.open(write_head(tmp_path / "drafter", config, tensors))
    target = make_config(hidden_size=TARGET_HIDDEN, vocab_size=VOCAB_SIZE, num_layers=9)
    block = open_block(files, read_block_config(files, target), target)
    parts = {**dict(block.weights), "lm_head.weight": plain_tensor(lm_head.astype(np.float32))}
    head = BlockHead(block, parts, plain_tensor(embedding.astype(np.float32)), num_threads=2, max_model_len=128, backend=backend)
    head.runtime.allocate_kv(8)
    return head


def draft(head: BlockHead, num_known: int, anchor: int, size: int, *, at_anchor: bool) -> tuple[list[int], list[float], Any]:
    """Greedy tokens, confidences and rows of logits."""
    mask = np.ones((size, size), np.bool_)
    output = head.run_block([DraftBlock(anchor, RowRange(0, size, num_known, BLOCKS, mask), range(size))])
    shift = 0 if at_anchor else 1
    logits, hidden = np.array(output.logits)[shift:], np.array(output.hidden_states)[shift:]
    if not head.markov_rank:
        return logits.argmax(-1).tolist(), [], logits
    tokens, confidences, rows, previous, state = [], [], [], anchor, np.zeros(head.markov_rank, np.float32)
    for base, h in zip(logits, hidden, strict=True):
        e = head.markov_embedding(previous)
        latent, state = head.markov_latent(e, h, state)
        row = np.array(head.run_bias(latent[None], base[None]).logits[0])
        if head.config.has_confidence:
            confidences.append(head.confidence(h, e))
        previous = int(row.argmax())
        tokens.append(previous)
        rows.append(row)
    return tokens, confidences, np.stack(rows)


@pytest.mark.parametrize("backend", ["native", "torch"])
@pytest.mark.parametrize("name", VARIANTS)
def test_five_drafts_equal_the_definition(name: str, backend: str, tmp_path: Path) -> None:
    if backend == "native" and kernels_path() is None:
        pytest.skip("no native kernels here")
    variant, random = VARIANTS[name], np.random.default_rng(1)
    embedding, lm_head = random.normal(size=(VOCAB_SIZE, 32)), random.normal(size=(VOCAB_SIZE, 32))
    tensors = variant.tensors()
    head = open_head(tmp_path, variant.config, tensors, embedding, lm_head, backend)
    nested = variant.config.get("dflash_config", {})
    plain = PlainBlock({**variant.config, **nested, **variant.plain}, tensors, embedding, lm_head, variant.layers)
    size, num_known = variant.config["block_size"], 0
    at_anchor = bool(head.config.drafts_at_anchor)
    for count, rows in [(9, size), (1, size), (5, size), (8, 4), (20, size)]:
        features, anchor = random.normal(size=(count, 3 * TARGET_HIDDEN)).astype(np.float32), int(random.integers(0, MASK))
        plain.commit(features.astype(np.float64))
        head.run_context([PendingContext(features, RowRange(0, count, num_known, BLOCKS))])
        num_known += count
        tokens, confidences, logits = draft(head, num_known, anchor, rows, at_anchor=at_anchor)
        wanted, chances, expected = plain.draft(anchor, rows)
        assert tokens == wanted
        np.testing.assert_allclose(logits, expected, atol=1e-4)
        np.testing.assert_allclose(confidences, chances, atol=1e-5)


@pytest.mark.parametrize("window", [64, 9])
def test_drafts_equal_transformers_muse_glimmer_assistant(window: int, tmp_path: Path) -> None:
    modeling = pytest.importorskip("transformers.models.muse_glimmer_assistant")
    from transformers.cache_utils import DFlashCache

    sizes = {name: value for name, value in SIZES.items() if name not in ("rope_theta", "model_type", "vocab_size")}
    config = modeling.MuseGlimmerAssistantConfig(
        **sizes, sliding_window=window, block_size=8, mask_token_id=MASK, target_layer_ids=[1, 3, 5], bos_token_id=1, eos_token_id=2,
        pad_token_id=0, rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    )  # fmt: skip
    config._attn_implementation = "eager"
    torch.manual_seed(3)
    model = modeling.MuseGlimmerAssistantModel(config).eval()
    with torch.no_grad():
        for name, values in model.named_parameters():
            values.copy_(torch.randn_like(values) * (0.3 if values.dim() > 1 else 0.1) + (1.0 if "norm" in name else 0.0))
    model.save_pretrained(tmp_path / "saved")
    random = np.random.default_rng(2)
    embedding, lm_head = random.normal(size=(VOCAB_SIZE, 32)), random.normal(size=(VOCAB_SIZE, 32))
    files = HeadFiles.open(tmp_path / "saved")
    target = make_config(hidden_size=TARGET_HIDDEN, vocab_size=VOCAB_SIZE, num_layers=9)
    block = open_block(files, read_block_config(files, target), target)
    parts = {**dict(block.weights), "lm_head.weight": plain_tensor(lm_head.astype(np.float32))}
    head = BlockHead(block, parts, plain_tensor(embedding.astype(np.float32)), num_threads=2, max_model_len=128)
    head.runtime.allocate_kv(8)
    cache, num_known = DFlashCache(config=config), 0
    cache.activate_past_recording()
    for count in (9, 1, 5, 8, 20):
        features, anchor = random.normal(size=(count, 3 * TARGET_HIDDEN)).astype(np.float32), int(random.integers(0, MASK))
        head.run_context([PendingContext(features, RowRange(0, count, num_known, BLOCKS))])
        cache.set_previous_accepted_tokens(count)
        if num_known:
            cache.crop(-8)
        ids = torch.tensor([[anchor] + [MASK] * 7])
        with torch.no_grad():
            expected = model(
                noise_embeds=torch.tensor(embedding, dtype=torch.float32)[ids], context_hidden_states=torch.tensor(features)[None],
                position_ids=torch.arange(num_known, num_known + count + 8)[None], cache=cache,
            ).last_hidden_state[0]  # fmt: skip
        num_known += count
        mask = np.ones((8, 8), np.bool_)
        output = head.run_block([DraftBlock(anchor, RowRange(0, 8, num_known, BLOCKS, mask), range(8))])
        np.testing.assert_allclose(output.hidden_states, expected.numpy(), atol=1e-4)
