"""Block drafters equal their publishers' computation: a plain implementation, and transformers' Muse Glimmer assistant."""

import runpy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from harness.block_checkpoints import DFLASH, DFLASH2, DSPARK, GEMMA4, MASK, SIZES, TARGET_HIDDEN, VOCAB_SIZE, PlainBlock, block_tensors
from harness.block_gguf import write_gguf_block
from harness.eagle_checkpoints import Tensors, write_head
from harness.exact_targets import skip_without_kernels
from harness.model_configs import make_config
from harness.native_network import plain_tensor
from paceline.drafters import open_head_files
from paceline.drafters.block.checkpoint import open_block_checkpoint
from paceline.drafters.block.config import read_block_config
from paceline.drafters.block.network import SELECTOR_VECTORS, BlockHead, DraftBlock, PendingContext
from paceline.drafters.head_files import HeadFiles
from paceline.runtimes.base import RowRange

REFERENCE = Path(__file__).parents[2].parent / "shared" / "reference" / "block_drafters_reference.py"
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


def dflash2(nested: Mapping[str, Any] | None = None, **more: Any) -> Variant:
    config = {**DFLASH2, **more, "dflash_config": {**DFLASH2["dflash_config"], **(nested or {})}}
    return Variant(config, lambda: block_tensors(config))


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
    "dspark, rnn, at its own position": dspark("rnn", with_markov=True, sample_from_anchor=False),
    "dspark, at its own position": dspark("vanilla", sample_from_anchor=False),
    "dspark, Gemma 4's layers": Variant(GEMMA4, lambda: block_tensors(GEMMA4, markov="vanilla", confidence=True)),
    "dflash2": dflash2(),
    "dflash2, kernels of 3 rows, groups of 8": dflash2({"conv_kernel_size": 3, "conv_group_size": 8, "selector_top_k": 16}),
    "dflash2, groups of 16": dflash2({"conv_group_size": 16}),
    "dflash2, a single candidate": dflash2({"selector_top_k": 1}),
    "dflash2, scales and cap": dflash2({"input_embedding_scale": 2.5, "output_multiplier": 0.5, "final_logit_softcapping": 3.0}),
    "dflash2, drafts after its own position": dflash2(sample_from_anchor=True),
}


def head_files(tmp_path: Path, config: Mapping[str, Any], tensors: Tensors) -> HeadFiles:
    return HeadFiles.open(write_head(tmp_path / "drafter", config, tensors))


def gguf_files(tmp_path: Path) -> HeadFiles:
    files = open_head_files(tmp_path / "drafter.gguf")
    assert files is not None
    return files


def open_files(files: HeadFiles, embedding: Any, lm_head: Any, backend: str = "auto") -> BlockHead:
    target = make_config(hidden_size=embedding.shape[1], vocab_size=VOCAB_SIZE, num_layers=9)
    block = open_block_checkpoint(files, read_block_config(files, target), target)
    parts = {"lm_head.weight": plain_tensor(lm_head.astype(np.float32)), **dict(block.weights)}
    head = BlockHead(block, parts, plain_tensor(embedding.astype(np.float32)), num_threads=2, max_model_len=128, backend=backend)
    head.runtime.allocate_kv(8)
    return head


class Text:
    """A text whose features a head reads, and greedy drafts after it."""

    def __init__(self, head: BlockHead) -> None:
        self.head, self.num_known = head, 0

    def commit(self, features: Any) -> None:
        self.head.run_context([PendingContext(features, RowRange(0, len(features), self.num_known, BLOCKS))])
        self.num_known += len(features)

    def run(self, anchor: int, size: int) -> Any:
        mask = np.ones((size, size), np.bool_)
        return self.head.run_block([DraftBlock(anchor, RowRange(0, size, self.num_known, BLOCKS, mask))])

    def draft(self, anchor: int, size: int) -> tuple[list[int], list[float], Any]:
        """Tokens, confidences and rows of logits."""
        head, output = self.head, self.run(anchor, size)
        at_anchor = bool(head.config.sample_from_anchor)
        shift = 0 if at_anchor else 1
        logits, states = np.array(output.logits)[shift:], np.array(output.hidden_states)
        if head.config.num_rescored_tokens:
            return select(head, logits, np.array(output.results[SELECTOR_VECTORS])[shift:], anchor), [], logits
        if not head.markov_rank:
            return logits.argmax(-1).tolist(), [], logits
        state = head.first_markov_state(anchor, states[0], sample_from_anchor=at_anchor)
        tokens, confidences, rows, previous = [], [], [], anchor
        for base, h in zip(logits, states[shift:], strict=True):
            e = head.markov_embedding(previous)
            latent, state = head.markov_latent(e, h, state)
            row = np.array(head.add_markov_bias(latent[None], base[None]).logits[0])
            if head.config.has_confidence:
                confidences.append(head.predict_confidence(h, e))
            previous = int(row.argmax())
            tokens.append(previous)
            rows.append(row)
        return tokens, confidences, np.stack(rows)


def rounds(random: np.random.Generator, size: int, hidden: int = TARGET_HIDDEN) -> Iterator[tuple[Any, int, int]]:
    """Features of the next tokens of a text, the last token, and rows of the block after it."""
    for count, rows in [(9, size), (1, size), (5, size), (8, 4), (20, size)]:
        yield random.normal(size=(count, 3 * hidden)).astype(np.float32), int(random.integers(0, MASK)), rows


def select(head: BlockHead, logits: Any, selected: Any, anchor: int) -> list[int]:
    """Greedy tokens of a drafter with a selector."""
    tokens = [anchor]
    for row, vector in zip(logits, selected, strict=True):
        best = np.argsort(-row, kind="stable")[: head.config.num_rescored_tokens].astype(np.int32)
        tokens.append(int(best[head.rescore_candidates(tokens[-1:], vector, best, row[best])[0].argmax()]))
    return tokens[1:]


@pytest.mark.parametrize("backend", ["native", "torch"])
@pytest.mark.parametrize("name", VARIANTS)
def test_block_drafts_and_confidences_equal_the_definition(name: str, backend: str, tmp_path: Path) -> None:
    skip_without_kernels(backend)
    variant, random = VARIANTS[name], np.random.default_rng(1)
    embedding, lm_head = random.normal(size=(2, VOCAB_SIZE, 32))
    tensors = variant.tensors()
    text = Text(open_files(head_files(tmp_path, variant.config, tensors), embedding, lm_head, backend))
    nested = variant.config.get("dflash_config", {})
    plain = PlainBlock({**variant.config, **nested, **variant.plain}, tensors, embedding, lm_head, variant.layers)
    for features, anchor, rows in rounds(random, variant.config["block_size"]):
        plain.commit(features.astype(np.float64))
        text.commit(features)
        tokens, confidences, logits = text.draft(anchor, rows)
        wanted, chances, expected = plain.draft(anchor, rows)
        assert tokens == wanted
        np.testing.assert_allclose(logits, expected, atol=1e-4)
        np.testing.assert_allclose(confidences, chances, atol=1e-5)


@pytest.mark.parametrize("name", [name for name in VARIANTS if name.startswith("dflash2")])
def test_dflash2_drafts_equal_the_shared_reference_code(name: str, tmp_path: Path) -> None:
    if not REFERENCE.exists():
        pytest.skip(f"{REFERENCE} is not there")
    reference, variant, random = runpy.run_path(str(REFERENCE)), VARIANTS[name], np.random.default_rng(1)
    embedding, lm_head = random.normal(size=(2, VOCAB_SIZE, 32))
    tensors = variant.tensors()
    config = {**variant.config, **variant.config["dflash_config"]}
    wanted = reference["BlockDrafter"](config, {name: one.double().numpy() for name, one in tensors.items()}, embedding, lm_head)
    text = Text(open_files(head_files(tmp_path, variant.config, tensors), embedding, lm_head))
    for features, anchor, rows in rounds(random, 8):
        wanted.commit(features.astype(np.float64))
        text.commit(features)
        assert text.draft(anchor, rows)[0] == wanted.guesses(anchor, rows)[0]


@pytest.mark.parametrize("has_all_ids", [False, True])
def test_dflash2_scores_candidates_by_their_codebook_rows(has_all_ids: bool, tmp_path: Path) -> None:
    random, ids, chosen = np.random.default_rng(1), np.arange(0, VOCAB_SIZE, 2), np.array([3, 7, 20])
    embedding, lm_head = random.normal(size=(2, VOCAB_SIZE, 32))
    after = torch.randn(VOCAB_SIZE if has_all_ids else len(ids), 8)
    own = {"lm_head.weight": torch.randn(len(ids), 32), "d2t": torch.from_numpy(ids - np.arange(len(ids)))}
    tensors = block_tensors(DFLASH2) | own | {"candidate_selector.successor_codebook": after}
    head = open_files(head_files(tmp_path, DFLASH2, tensors), embedding, lm_head)
    vector, scores = random.normal(size=8).astype(np.float32), random.normal(size=3).astype(np.float32)
    found = head.rescore_candidates([5], vector, ids[chosen].astype(np.int32), scores)[0]
    before, rows = tensors["candidate_selector.predecessor_codebook"][5].numpy(), after.numpy()[ids[chosen] if has_all_ids else chosen]
    np.testing.assert_allclose(found, scores + rows @ (before * vector), atol=1e-5)


WIDE = {"hidden_size": 256, "intermediate_size": 256, "head_dim": 64}
FILES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "dflash": (dflash(), {}),
    "dflash, sliding both ways": (dflash(**SLIDES, is_causal=False), {}),
    "dflash, causal": (dflash(is_causal=True), {}),
    "dflash, scales and cap": (
        dflash({"input_embedding_scale": 2.5, "output_multiplier": 0.5, "final_logit_softcapping": 3.0, "attention_value_scale": 0.7}),
        {},
    ),
    "dspark": ({**DSPARK, "confidence_head_with_markov": True}, {"markov": "vanilla", "confidence": True}),
    "dspark, at its own position": ({**DSPARK, "sample_from_anchor": False}, {"markov": "vanilla", "confidence": False}),
    "dflash2": (dict(dflash2().config), {}),
}


@pytest.mark.parametrize("name", FILES)
def test_block_drafts_of_a_gguf_file_equal_those_of_safetensors(name: str, tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    config, parts = FILES[name]
    tensors = block_tensors(config, **parts)
    compare_with_gguf(tmp_path, config, tensors, write_gguf_block(tmp_path / "drafter.gguf", config, tensors))


@pytest.mark.parametrize("matrix_type", ["F16", "BF16", "Q8_0", "Q4_0", "Q4_K", "Q6_K"])
@pytest.mark.parametrize("kind", ["dspark", "dflash2"])
def test_quantised_gguf_block_drafter_equals_its_dequantised_values(kind: str, matrix_type: str, tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    config = {**(DSPARK if kind == "dspark" else DFLASH2), **WIDE}
    tensors = block_tensors(config, markov="vanilla" if kind == "dspark" else None, target_hidden=256)
    for values in tensors.values():
        values.mul_(0.3)  # so that rounding changes no token
    held = write_gguf_block(tmp_path / "drafter.gguf", config, tensors, matrix_type)
    compare_with_gguf(tmp_path, config, tensors, held, backend="torch")  # which rounds no rows
    logits = block_logits(tmp_path, config, "native"), block_logits(tmp_path, config, "torch")
    error = np.abs(logits[0] - logits[1]).mean() / logits[1].std()
    # the random blocks of K-quants have large values, which amplify the rounding from layer to layer
    assert error < (0.1 if matrix_type.endswith("_K") else 0.001), "rows are rounded to bytes, nothing else"


def block_logits(tmp_path: Path, config: Mapping[str, Any], backend: str) -> Any:
    """Logits of one block of `drafter.gguf`, after nine known positions."""
    random = np.random.default_rng(1)
    embedding, lm_head = random.normal(size=(2, VOCAB_SIZE, config["hidden_size"]))
    text = Text(open_files(gguf_files(tmp_path), embedding, lm_head, backend))
    text.commit(random.normal(size=(9, 3 * config["hidden_size"])).astype(np.float32))
    return np.array(text.run(7, config["block_size"]).logits)


def test_gguf_block_layers_without_v_proj_use_keys_as_values(tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    random = np.random.default_rng(1)
    embedding, lm_head = random.normal(size=(2, VOCAB_SIZE, 32))
    tensors = {name: values for name, values in block_tensors().items() if ".v_proj." not in name}
    write_gguf_block(tmp_path / "drafter.gguf", dflash(), tensors)
    text = Text(open_files(gguf_files(tmp_path), embedding, lm_head))
    plain = PlainBlock({**dflash(), **DFLASH["dflash_config"]}, tensors, embedding, lm_head, BOTH_WAYS)
    features = random.normal(size=(9, 3 * TARGET_HIDDEN)).astype(np.float32)
    plain.commit(features.astype(np.float64))
    text.commit(features)
    tokens, _, logits = text.draft(5, 8)
    wanted, _, expected = plain.draft(5, 8)
    assert tokens == wanted
    np.testing.assert_allclose(logits, expected, atol=1e-4)


def test_gguf_block_drafter_reads_the_target_ids_of_its_draft_vocabulary(tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    ids = np.arange(0, VOCAB_SIZE, 2)
    own = {"lm_head.weight": torch.randn(len(ids), 32), "d2t": torch.from_numpy(ids - np.arange(len(ids)))}
    tensors = block_tensors() | own
    compare_with_gguf(tmp_path, dflash(), tensors, write_gguf_block(tmp_path / "drafter.gguf", dflash(), tensors))


def compare_with_gguf(tmp_path: Path, config: Mapping[str, Any], tensors: Tensors, held: Tensors, backend: str = "auto") -> None:
    """Compare five drafts of `drafter.gguf` with those of its tensors `held` as safetensors."""
    random, size = np.random.default_rng(1), config["block_size"]
    embedding, lm_head = random.normal(size=(2, VOCAB_SIZE, config["hidden_size"]))
    files = gguf_files(tmp_path), head_files(tmp_path, config, held)
    assert files[0].kind is files[1].kind
    heads = [open_files(one, embedding, lm_head, backend) for one in files]
    assert heads[0].config == heads[1].config
    if heads[0].target_ids is not None:
        np.testing.assert_array_equal(heads[0].target_ids, heads[1].target_ids)
    texts = [Text(head) for head in heads]
    for features, anchor, rows in rounds(random, size, config["hidden_size"]):
        for text in texts:
            text.commit(features)
        found, expected = (text.draft(anchor, rows) for text in texts)
        assert found[0] == expected[0]
        np.testing.assert_allclose(found[1], expected[1], atol=1e-5)
        np.testing.assert_allclose(found[2], expected[2], atol=1e-4)


@pytest.mark.parametrize("backend", ["native", "torch"])
def test_blocks_of_several_sequences_in_one_pass_are_independent(backend: str, tmp_path: Path) -> None:
    skip_without_kernels(backend)
    random = np.random.default_rng(1)
    embedding, lm_head = random.normal(size=(2, VOCAB_SIZE, 32))
    head = open_files(head_files(tmp_path, DFLASH2, block_tensors(DFLASH2)), embedding, lm_head, backend)
    features = random.normal(size=(6, 3 * TARGET_HIDDEN)).astype(np.float32)
    parts = []
    for blocks, anchor, size in ((BLOCKS[:2], 7, 5), (BLOCKS[2:4], 9, 8)):
        head.run_context([PendingContext(features, RowRange(0, 6, 0, blocks))])
        parts.append(DraftBlock(anchor, RowRange(0, size, 6, blocks, np.ones((size, size), np.bool_))))
    together = np.array(head.run_block(parts).logits)
    alone = [np.array(head.run_block([part]).logits) for part in parts]
    np.testing.assert_allclose(together, np.concatenate(alone), atol=1e-4)


@pytest.mark.parametrize("window", [64, 9])
def test_block_drafts_equal_transformers_muse_glimmer_assistant(window: int, tmp_path: Path) -> None:
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
    embedding, lm_head = random.normal(size=(2, VOCAB_SIZE, 32))
    files = HeadFiles.open(tmp_path / "saved")
    text, cache = Text(open_files(files, embedding, lm_head)), DFlashCache(config=config)
    cache.activate_past_recording()
    for count in (9, 1, 5, 8, 20):
        features, anchor = random.normal(size=(count, 3 * TARGET_HIDDEN)).astype(np.float32), int(random.integers(0, MASK))
        num_known = text.num_known
        text.commit(features)
        cache.set_previous_accepted_tokens(count)
        if num_known:
            cache.crop(-8)
        ids = torch.tensor([[anchor] + [MASK] * 7])
        with torch.no_grad():
            expected = model(
                noise_embeds=torch.tensor(embedding, dtype=torch.float32)[ids], context_hidden_states=torch.tensor(features)[None],
                position_ids=torch.arange(num_known, num_known + count + 8)[None], cache=cache,
            ).last_hidden_state[0]  # fmt: skip
        np.testing.assert_allclose(text.run(anchor, 8).hidden_states, expected.numpy(), atol=1e-4)
