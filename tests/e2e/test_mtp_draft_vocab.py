"""MTP modules with a draft vocabulary of the first ids: which tokens they draft, and that no token changes."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from harness.checkpoint_files import edit_tensors
from harness.checkpoints import write_checkpoint
from harness.doctor_options import doctor_options
from harness.gguf_checkpoints import numbered_vocabulary
from harness.head_engines import ids_of, load_module, open_llm
from harness.hybrid_gguf import write_hybrid_gguf
from harness.hybrid_mtp import DELTA, add_module, module_tensors, write_donor
from paceline import ConfigError, SamplingParams
from paceline.config import QuantOptions, quant_options
from paceline.drafters.draft_sampler import DraftSampler
from paceline.drafters.mtp import MtpModule, load_mtp, open_mtp_head, restrict_draft_vocab
from paceline.drafters.recurrent_heads.cache import TargetFeaturePairs
from paceline.drafters.recurrent_heads.drafter import EagleStyleDrafter
from paceline.drafters.recurrent_heads.head import FeaturePairOutputs, RecurrentHead
from paceline.models.config import WeightType
from paceline.models.storage.quantized_cache import quantized_weights
from paceline.models.weights import GroupedTensor, Tensor, Weights, as_float32, to_bf16
from paceline.proof.doctor import diagnose
from paceline.runtimes.base import RowRange
from paceline.runtimes.load import RuntimeOptions, load_network
from paceline.runtimes.logits_summary import SAMPLING_DTYPE
from paceline.runtimes.native.network import NativeNetwork
from paceline.runtimes.native.packed_weights import PackedWeights
from paceline.speculation.tree import DraftTree

VOCABULARY, FIRST, ASKED = 600, 304, 290
PROMPTS = [[5, 6, 7], [9], list(range(1, 80)), [531, 2]]
GREEDY = SamplingParams(max_tokens=24, ignore_eos=True)
SAMPLED = SamplingParams(max_tokens=24, temperature=1.0, seed=3, ignore_eos=True)
PENALISED = SamplingParams(max_tokens=24, temperature=0.8, top_p=0.9, frequency_penalty=0.3, seed=4, ignore_eos=True)


def write_whole(folder: Path, *, tied: bool = False) -> Path:
    """A model of 600 ids with its module."""
    values = {**DELTA, "vocab_size": VOCABULARY, "tie_word_embeddings": tied}
    target = write_checkpoint(folder / "model", "qwen3_5_text", **values)
    return add_module(target, module_tensors(write_donor(folder / "donor", "qwen3_5")))


def write_stored(folder: Path, stored: str, *, tied: bool) -> Path:
    """The same, as a GGUF file where `stored` is a block type."""
    if stored not in ("Q8_0", "Q4_0"):
        return write_whole(folder, tied=tied)
    return write_hybrid_gguf(write_whole(folder, tied=tied), folder / "model.gguf", stored, metadata=numbered_vocabulary(VOCABULARY))


def load(path: Path, stored: str) -> MtpModule:
    module = load_module(path)
    if stored == "bfloat16":
        lm_head = as_float32(module.weights["lm_head.weight"])
        rounded = Tensor(to_bf16(lm_head), WeightType.BF16, lm_head.shape)
        return replace(module, weights=Weights({**module.weights, "lm_head.weight": rounded}))
    if stored not in ("int8", "int4"):
        return module
    options = quant_options("draft_quantization", stored)
    assert options is not None
    return replace(module, weights=quantized_weights(module.weights, options, None))


def run(head: RecurrentHead, *, ranks: bool) -> FeaturePairOutputs:
    """A pass over 20 true pairs, with logits of each."""
    random = np.random.default_rng(4)
    head.runtime.allocate_kv(4)
    rows = RowRange(0, 20, 1, np.arange(3, dtype=np.int32), None, 1)
    pairs = TargetFeaturePairs(random.integers(1, VOCABULARY, 20).astype(np.int32), random.normal(0, 1, (20, 64)).astype(np.float32), rows)
    draws = None
    if ranks:
        head.summary_options = DraftSampler(None, VOCABULARY).summary_options(3)
        draws = np.zeros(20, SAMPLING_DTYPE)
        draws["key"], draws["temperature"] = np.arange(20), 0.7
    return head.run_target_feature_pairs([pairs], needs_logits=True, needs_all_logits=True, sampling=draws)


@pytest.mark.spread(0.3)
@pytest.mark.parametrize("backend", ["native", "torch"])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("stored", ["float32", "bfloat16", "int8", "int4", "Q8_0", "Q4_0"])
def test_draft_vocab_size_limits_mtp_logits_to_the_first_ids(tmp_path: Path, stored: str, tied: bool, backend: str) -> None:
    """Their logits are those of all ids, cut off; drawn tokens and the sum of probabilities are over these alone."""
    module = load(write_stored(tmp_path, stored, tied=tied), stored)
    whole = open_mtp_head(module, num_threads=2, max_model_len=128, backend=backend)
    part = open_mtp_head(restrict_draft_vocab(module, range(FIRST)), num_threads=2, max_model_len=128, backend=backend)
    logits: NDArray[np.float32] = run(whole, ranks=False).logits.copy()
    assert logits.shape == (20, VOCABULARY)
    assert (logits.argmax(axis=1) >= FIRST).any(), "some of its tokens are others"
    found = run(part, ranks=False).logits.copy()
    assert found.shape == (20, FIRST)
    if backend == "native":
        assert np.array_equal(found, logits[:, :FIRST])
    assert np.allclose(found, logits[:, :FIRST], rtol=1e-4, atol=1e-4)
    ranked = run(part, ranks=True).output.summaries
    scaled = logits[:, :FIRST].astype(np.float64) / 0.7
    for row, own in zip(ranked, scaled, strict=True):
        assert list(row.token_ids) == list(np.argsort(-own, kind="stable")[:4])
        assert abs(row.log_sum_exp - np.log(np.exp(own - own.max()).sum()) - own.max()) < 1e-3
        assert 0 <= row.sampled_id < FIRST


@pytest.mark.parametrize("backend", ["native", "torch"])
@pytest.mark.parametrize("stored", ["float32", "bfloat16", "int8", "Q8_0", "Q4_0"])
def test_draft_vocab_corpus_limits_mtp_logits_to_its_ids(tmp_path: Path, stored: str, backend: str) -> None:
    module, ids = load(write_stored(tmp_path, stored, tied=False), stored), np.arange(5, VOCABULARY, 5)
    whole = open_mtp_head(module, num_threads=2, max_model_len=128, backend=backend)
    part = open_mtp_head(restrict_draft_vocab(module, ids), num_threads=2, max_model_len=128, backend=backend)
    logits: NDArray[np.float32] = run(whole, ranks=False).logits[:, ids].copy()
    found = run(part, ranks=False).logits.copy()
    assert found.shape == (20, len(ids))
    error = np.abs(found - logits)
    if backend == "native" and stored in ("float32", "bfloat16"):
        assert error.max() == 0
    assert error.mean() < (0.05 if backend == "native" else 1e-4) * logits.std(), "rows are rounded to bytes, nothing else"
    assert part.target_ids is ids


@pytest.mark.parametrize("stored", ["bfloat16", "int8", "Q8_0"])
def test_draft_vocab_rows_are_a_view_of_the_whole_matrix(tmp_path: Path, stored: str) -> None:
    module = load(write_stored(tmp_path, stored, tied=False), stored)
    whole, part = module.weights["lm_head.weight"], restrict_draft_vocab(module, range(FIRST)).weights["lm_head.weight"]
    assert part.shape == (FIRST, 64)
    if isinstance(whole, Tensor) and isinstance(part, Tensor):
        assert np.shares_memory(whole.array, part.array)
    else:
        assert isinstance(whole, GroupedTensor)
        assert isinstance(part, GroupedTensor)
        for ours, theirs in zip(part.matrix.arrays, whole.matrix.arrays, strict=True):
            assert np.shares_memory(ours, theirs)


@pytest.mark.parametrize(("stored", "bits"), [("float32", 8), ("bfloat16", 8), ("bfloat16", 4), ("Q8_0", 4), ("int8", 4)])
def test_draft_vocab_with_fewer_bits_than_stored_is_a_quantised_copy(tmp_path: Path, stored: str, bits: int) -> None:
    module, quantization = load(write_stored(tmp_path, stored, tied=False), stored), QuantOptions(bits=bits)
    copy = restrict_draft_vocab(module, range(FIRST), quantization, num_threads=2)
    facts = copy.weights.tensor_info("lm_head.weight")
    assert (copy.has_lm_head_copy, facts.bits, facts.shape) == (True, bits, (FIRST, 64))
    assert list(copy.weights) == list(module.weights)
    for name in module.weights:
        assert name == "lm_head.weight" or copy.weights[name] is module.weights[name]
    exact = run(open_mtp_head(restrict_draft_vocab(module, range(FIRST)), num_threads=2, max_model_len=128), ranks=False).logits.copy()
    head = open_mtp_head(copy, num_threads=2, max_model_len=128)
    assert isinstance(head.runtime, NativeNetwork)
    assert isinstance(head.runtime._shared.weights.lookup_table("lm_head"), PackedWeights), "rows are rounded to bytes"
    found = run(head, ranks=False).logits
    assert 0 < np.abs(found - exact).mean() < (0.02 if bits == 8 else 0.15) * exact.std()


@pytest.mark.parametrize(("stored", "bits"), [("Q8_0", 8), ("int8", 8), ("Q4_0", 4), ("Q4_0", 8)])
def test_draft_vocab_stored_with_no_more_bits_is_not_copied(tmp_path: Path, stored: str, bits: int) -> None:
    module = load(write_stored(tmp_path, stored, tied=False), stored)
    found, view = restrict_draft_vocab(module, range(FIRST), QuantOptions(bits=bits)), restrict_draft_vocab(module, range(FIRST))
    assert not found.has_lm_head_copy
    for ours, theirs in zip(*(one.weights["lm_head.weight"].matrix.arrays for one in (found, view)), strict=True):
        assert np.shares_memory(ours, theirs)


def test_draft_vocab_of_a_16_bit_target_is_copied_and_counted_by_doctor(tmp_path: Path) -> None:
    """`doctor` counts the copy; --draft-quantization none keeps the view."""
    target = write_checkpoint(tmp_path / "model", "qwen3_5_text", dtype="float16", **{**DELTA, "vocab_size": VOCABULARY})
    tensors = module_tensors(write_donor(tmp_path / "donor", "qwen3_5"))
    edit_tensors(target, lambda stored: stored.update({name: tensor.astype(np.float16) for name, tensor in tensors.items()}))
    options = {"draft_vocab_size": ASKED}
    plain, llm = open_llm(target, "none"), open_llm(target, "mtp", drafter_options=options)
    kept = open_llm(target, "mtp", drafter_options=options, draft_quantization="none")
    both = [
        open_llm(target, "mtp", drafter_options=options, quantization="int8", draft_quantization=quantization)
        for quantization in ("none", "auto")
    ]
    tables = [one.drafter.head.runtime._shared.weights.lookup_table("lm_head") for one in (llm, kept, *both)]
    assert [isinstance(table, PackedWeights) for table in tables] == [True, False, True, True]
    assert np.shares_memory(tables[2].data, both[0].runtime.packed_lm_head_rows(VOCABULARY).data)
    assert not np.shares_memory(tables[3].data, both[1].runtime.packed_lm_head_rows(VOCABULARY).data)
    for params in (GREEDY, SAMPLED):
        assert ids_of(llm.generate(PROMPTS, params)) == ids_of(plain.generate(PROMPTS, params))
    facts = [
        diagnose(doctor_options(model=str(target), drafters=("mtp",), drafter_options=given)).memory
        for given in (options, {})  # without a draft vocabulary the head reads the target's lm_head
    ]
    assert facts[0].drafts[0].weights_bytes - facts[1].drafts[0].weights_bytes == FIRST * 64 + FIRST * 4


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("stored", ["Q8_0", "Q4_0"])
def test_draft_vocab_reads_a_quantised_matrix_in_place(tmp_path: Path, stored: str, tied: bool) -> None:
    path = write_stored(tmp_path, stored, tied=tied)
    module, target = load(path, stored), load_network(path, RuntimeOptions(num_threads=2, max_model_len=128)).network
    assert isinstance(target, NativeNetwork)
    first = restrict_draft_vocab(module, range(FIRST))
    apart = run(open_mtp_head(first, num_threads=2, max_model_len=128), ranks=False).logits.copy()
    head = open_mtp_head(first, num_threads=2, max_model_len=128, lm_head_source=target)
    assert isinstance(head.runtime, NativeNetwork)
    whole = target.packed_lm_head_rows(VOCABULARY)
    assert whole is not None
    own = head.runtime._shared.weights.lookup_table("lm_head")
    assert isinstance(own, PackedWeights)
    assert np.shares_memory(own.data, whole.data)
    beside = run(head, ranks=False).logits
    np.testing.assert_array_equal(beside, apart)


@pytest.mark.spread(0.5)
@pytest.mark.usefixtures("always_drafts")
@pytest.mark.parametrize("acceptance", ["match", "rejection"])
@pytest.mark.parametrize(
    ("stored", "tied", "backend", "tree_width", "quantization"),
    [
        ("float32", False, "native", 1, "none"),
        ("float32", True, "native", 3, "int8"),
        ("Q8_0", True, "native", 1, "none"),
        ("float32", True, "torch", 1, "none"),
    ],
)
def test_draft_vocab_changes_no_token(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    stored: str,
    tied: bool,
    backend: str,
    tree_width: int,
    quantization: str,
    acceptance: str,
) -> None:
    """With rejection sampling the output depends on the drafts; draft probabilities are over the first ids."""
    trees: list[DraftTree] = []
    propose = EagleStyleDrafter.propose

    def kept(self: EagleStyleDrafter, *given: Any) -> list[DraftTree | None]:
        found = propose(self, *given)
        trees.extend(tree for tree in found if tree is not None)
        return found

    monkeypatch.setattr(EagleStyleDrafter, "propose", kept)
    target = write_stored(tmp_path, stored, tied=tied)
    shape = {"backend": backend, "prefill_chunk_size": 32}
    plain = open_llm(target, "none", **shape)
    llm = open_llm(
        target,
        "mtp",
        tree_width=tree_width,
        draft_quantization=quantization,
        acceptance=acceptance,
        drafter_options={"draft_vocab_size": ASKED},
        **shape,
    )
    assert f"drafts ids below {FIRST}" in llm.banner
    for params in (GREEDY, SAMPLED, PENALISED):
        trees.clear()
        outputs = llm.generate(PROMPTS, params)
        if acceptance == "match" or params is GREEDY:
            assert ids_of(outputs) == ids_of(plain.generate(PROMPTS, params))
        assert sum(output.speculation.num_draft_tokens for output in outputs) > 50
        assert all(token < FIRST for tree in trees for token in tree.token_ids[1:])
        drawn = [probs for tree in trees for probs in tree.draft_probs.values()]
        assert bool(drawn) == (acceptance == "rejection" and params is not GREEDY and tree_width == 1)  # branches are chosen
        for probs in drawn:
            assert probs.is_valid()
            assert probs.probs[FIRST:].sum() == 0 if probs.token_ids is None else probs.token_ids[-1] < FIRST
    assert llm.stats().drafter_failures == 0


@pytest.mark.usefixtures("always_drafts")
@pytest.mark.parametrize(("backend", "tree_width", "quantization"), [("native", 1, "auto"), ("native", 3, "none")])
def test_draft_vocab_corpus_selects_the_ids(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, backend: str, tree_width: int, quantization: str
) -> None:
    """The ids of its words, and no others; no token changes, and doctor counts the rows that are copied."""
    proposed: set[int] = set()
    propose = EagleStyleDrafter.propose

    def kept(self: EagleStyleDrafter, *given: Any) -> list[DraftTree | None]:
        found = propose(self, *given)
        proposed.update(token for tree in found if tree is not None for token in tree.token_ids[1:])
        return found

    monkeypatch.setattr(EagleStyleDrafter, "propose", kept)
    target, text, ids = write_whole(tmp_path), tmp_path / "text", range(VOCABULARY - FIRST, VOCABULARY)
    text.write_text(" ".join(f"w{token}" for token in ids), encoding="utf-8")
    options = {"draft_vocab_size": FIRST, "draft_vocab_corpus": str(text)}
    plain = open_llm(target, "none", backend=backend)
    llm = open_llm(target, "mtp", tree_width=tree_width, draft_quantization=quantization, drafter_options=options, backend=backend)
    assert f"{FIRST} draft ids" in llm.banner
    assert isinstance(llm.drafter, EagleStyleDrafter)
    assert llm.drafter.head.target_ids is not None
    assert llm.drafter.head.target_ids.tolist() == list(ids)
    for params in (GREEDY, SAMPLED, PENALISED):
        assert ids_of(llm.generate(PROMPTS, params)) == ids_of(plain.generate(PROMPTS, params))
    assert len(proposed) > 3
    assert proposed <= set(ids)
    assert llm.stats().drafter_failures == 0
    found = diagnose(doctor_options(model=str(target), drafters=("mtp",), drafter_options=options, draft_quantization="none"))
    whole = diagnose(doctor_options(model=str(target), drafters=("mtp",), draft_quantization="none"))
    assert found.memory.drafts[0].weights_bytes - whole.memory.drafts[0].weights_bytes == FIRST * 64 * 4
    assert f"drafts the {FIRST} most frequent ids of {text}" in str(found.as_dict())


def test_doctor_counts_the_lm_head_of_an_mtp_module_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By doctor: its copied rows take the place of all of them."""
    target, found = write_whole(tmp_path), load_mtp

    def with_own(*given: Any, **named: Any) -> MtpModule:
        module = found(*given, **named)
        return replace(module, config=replace(module.config, has_own_lm_head=True))

    def bytes_of(**options: int) -> int:
        question = doctor_options(
            model=str(target),
            drafters=("mtp",),
            drafter_options=options,
            quantization=quant_options("quantization", "int8"),
            draft_quantization="auto",
        )
        memory = diagnose(question).memory
        assert memory is not None
        return memory.drafts[0].weights_bytes

    shared = bytes_of(draft_vocab_size=FIRST)
    monkeypatch.setattr("paceline.proof.pairing.load_mtp", with_own)
    assert bytes_of(draft_vocab_size=FIRST) == shared
    assert bytes_of() > shared


def test_missing_corpus_is_an_error_before_loading(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target, options = write_whole(tmp_path), {"draft_vocab_corpus": str(tmp_path / "none")}
    text = "which does not exist: give a text like those you generate"
    found = diagnose(doctor_options(model=str(target), drafters=("mtp",), drafter_options=options))
    assert any(text in problem for problem in found.problems)
    monkeypatch.setattr("paceline.engine.loader.load_network", lambda *given, **named: pytest.fail("the target was loaded"))
    with pytest.raises(ConfigError, match=text):
        open_llm(target, "mtp", drafter_options=options)


def test_draft_vocab_defaults_to_all_ids(tmp_path: Path) -> None:
    target = write_whole(tmp_path)
    for given in ({}, {"drafter_options": {"draft_vocab_size": VOCABULARY}}):
        llm = open_llm(target, "mtp", **given)
        assert isinstance(llm.drafter, EagleStyleDrafter)
        assert llm.drafter.head.draft_vocab_size == (VOCABULARY if given else None)
        assert ("drafts ids below" in llm.banner) is bool(given)
        assert run(llm.drafter.head, ranks=False).logits.shape == (20, VOCABULARY)


def test_draft_vocab_size_beyond_the_vocabulary_is_refused_before_loading(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = write_whole(tmp_path)
    text = "drafter_options: draft_vocab_size is 608 and the target has 600 ids: use at most 600, or leave it out to draft all ids"
    found = diagnose(doctor_options(model=str(target), drafters=("mtp",), drafter_options={"draft_vocab_size": 608}))
    assert text in found.problems
    found = diagnose(doctor_options(model=str(target), drafters=("mtp",), drafter_options={"draft_vocab_size": ASKED}))
    assert found.problems == []
    monkeypatch.setattr("paceline.engine.loader.load_network", lambda *given, **named: pytest.fail("the target was loaded"))
    with pytest.raises(ConfigError, match=text):
        open_llm(target, "mtp", drafter_options={"draft_vocab_size": 608})
    with pytest.raises(ConfigError, match="'draft_vocab_size' is for mtp heads, and the drafter is ngram"):
        open_llm(target, "ngram", drafter_options={"draft_vocab_size": 300})
