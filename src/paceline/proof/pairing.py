"""Check whether a draft model or a drafting head fits a target, from tokenizers and tensor shapes; no weights are read."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from paceline.config import QuantOptions
from paceline.drafters import HeadOptions
from paceline.drafters.block.checkpoint import open_block_checkpoint
from paceline.drafters.block.config import BLOCK_HEAD_KINDS, default_sample_from_anchor, describe_drafted_position, read_block_config
from paceline.drafters.draft_model import read_mask_token, too_large_reason
from paceline.drafters.draft_vocab import read_corpus
from paceline.drafters.eagle.checkpoint import check_embedding_rows, open_eagle_checkpoint
from paceline.drafters.eagle.config import ambiguous_options, read_eagle_config
from paceline.drafters.gemma4_assistant.checkpoint import load_assistant
from paceline.drafters.head_files import HeadFiles
from paceline.drafters.head_kinds import HeadKind
from paceline.drafters.medusa.checkpoint import load_medusa
from paceline.drafters.mtp import load_mtp, restrict_draft_vocab
from paceline.drafters.packaged import packaged_drafters
from paceline.drafters.pard2 import check_tokenizer, open_pard2_weights, read_pard2_config
from paceline.drafters.recurrent_heads.head import RecurrentHeadConfig
from paceline.models.config import WeightType
from paceline.models.kv_cache_dtype import KVCacheDtype
from paceline.models.quantize import quantization_schemes
from paceline.models.weights import AnyTensor, Tensor, Weights
from paceline.proof.checkpoint_facts import CheckpointFacts, read_tokenizer
from paceline.proof.memory_estimate import ModelMemory
from paceline.runtimes.load import default_kv_cache_dtype
from paceline.tokenizer.vocabulary import VocabularyComparison, compare_pieces

_CACHE_TYPE = KVCacheDtype.F32


@dataclass(frozen=True, slots=True)
class PairCheck:
    """Whether a pair works.

    Attributes:
        works: whether the drafter can be used.
        summary: one sentence, the numbers included.
        vocabulary: the comparison; None where a tokenizer could not be read.
        notes: what makes it slower than it could be.
    """

    works: bool
    summary: str
    vocabulary: VocabularyComparison | None = None
    notes: tuple[str, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        found = self.vocabulary
        return {
            "works": self.works,
            "summary": self.summary,
            "notes": list(self.notes),
            "match": None if found is None else found.match.value,
            "same_ids": None if found is None else found.same_id_share,
            "shared_pieces": None if found is None else found.shared_piece_share,
            "sample_coverage": None if found is None else found.sample_coverage,
            "spellable": None if found is None else found.spellable_share,
            "first_difference": None if found is None or found.first_difference is None else list(found.first_difference),
        }


def check_draft_model(target: CheckpointFacts, draft: CheckpointFacts) -> PairCheck:
    notes = _notes(target, draft)
    if target.tokenizer is None or draft.tokenizer is None:
        missing = target.path if target.tokenizer is None else draft.path
        summary = f"{missing} has no tokenizer.json: how the vocabularies relate shows when the models are loaded"
        return PairCheck(True, summary, None, notes)
    found = compare_pieces(target.tokenizer.pieces, draft.tokenizer.pieces, sample_ids=target.tokenizer.sample_ids)
    if found.is_unusable:
        return PairCheck(False, f"{found.why_unusable()}: use a draft model of the target's family, or the drafter suffix", found, notes)
    return PairCheck(True, f"{found.describe_match()}; {found.describe_token_conversion()}", found, notes)


def _notes(target: CheckpointFacts, draft: CheckpointFacts) -> tuple[str, ...]:
    notes = []
    is_pard = read_mask_token(draft.path, draft.config) is not None
    if is_pard:
        notes.append("it is a PARD model: one pass drafts all tokens")
    if draft.config.max_positions < target.config.max_positions:
        notes.append(
            f"the draft model was made for {draft.config.max_positions} tokens, the target for {target.config.max_positions}: "
            "of longer texts it reads the last tokens"
        )
    if line := too_large_reason(draft.path, draft.config, target.config):
        notes.append(line)
    ends, draft_ends = _end_pieces(target), _end_pieces(draft)
    if ends and draft_ends and not ends & draft_ends:
        notes.append(
            f"the target ends with {', '.join(sorted(ends))}, the draft model with {', '.join(sorted(draft_ends))}: "
            "the draft model goes on after the target's end"
        )
    return tuple(notes)


def _end_pieces(checkpoint: CheckpointFacts) -> set[str]:
    if checkpoint.tokenizer is None:
        return set()
    pieces = checkpoint.tokenizer.pieces
    return {pieces[token_id] for token_id in checkpoint.config.eos_token_ids if token_id < len(pieces)}


@dataclass(frozen=True, slots=True)
class HeadFacts:
    """A head whose files hold all that it needs for its target.

    Attributes:
        weights: its own tensors, without those it shares with the target.
        cache_bytes_per_1k: keys and values of 1000 tokens, in addition to the target's.
        copied_bytes: bytes of the rows that it copies from the target's vocabulary matrix, and of tables that stay as they are stored.
        ambiguous_options: drafter options that its files leave open, with the values to try besides the defaults.
    """

    path: Path
    kind: HeadKind
    weights: Mapping[str, AnyTensor]
    cache_bytes_per_1k: int
    copied_bytes: int = 0
    ambiguous_options: Sequence[tuple[str, Sequence[object]]] = ()

    def memory(self, quantization: QuantOptions | None) -> ModelMemory:
        """Return the memory that the head takes once it is loaded."""
        schemes = {} if quantization is None else quantization_schemes(Weights(self.weights), quantization)
        num_bytes = sum(schemes[name].nbytes(tensor.shape) if name in schemes else tensor.nbytes for name, tensor in self.weights.items())
        return ModelMemory(num_bytes + self.copied_bytes, self.cache_bytes_per_1k, "native")

    def as_dict(self) -> dict[str, Any]:
        return {
            "path": str(self.path),
            "kind": self.kind.value,
            "parameters": sum(prod(tensor.shape) for tensor in self.weights.values()),
            "stored_bytes": sum(tensor.nbytes for tensor in self.weights.values()),
        }


def check_head(
    files: HeadFiles, target: CheckpointFacts, options: HeadOptions, copy_quant: QuantOptions | None = None
) -> tuple[HeadFacts, PairCheck]:
    """Check a head against a target and return its facts.

    Args:
        copy_quant: quantisation of the rows that it copies from the target's vocabulary matrix.

    Raises:
        CheckpointError, IncompatibleDrafterError: it does not fit this target.
        ConfigError: an option has a value it does not take.
    """
    if files.kind is HeadKind.MEDUSA:
        facts, pair = _check_medusa(files, target, options)
    elif files.kind is HeadKind.GEMMA4_ASSISTANT:
        facts, pair = _check_assistant(files, target)
    elif files.kind in BLOCK_HEAD_KINDS:
        facts, pair = _check_block(files, target)
    elif files.kind is HeadKind.PARD2:
        facts, pair = _check_pard2(files, target)
    elif files.kind is HeadKind.MTP:
        facts, pair = _check_mtp(files, target, options, copy_quant)
    else:
        facts, pair = _check_eagle(files, target, options)
    fit = f"its sizes fit the target's (hidden size {target.config.hidden_size})"
    return facts, replace(pair, summary=f"{pair.summary}; {fit}; whether it was trained for these very weights shows in what is accepted")


def _check_block(files: HeadFiles, target: CheckpointFacts) -> tuple[HeadFacts, PairCheck]:
    config = read_block_config(files, target.config)
    opened = open_block_checkpoint(files, config, target.config)
    read = ", ".join(map(str, config.layer_boundaries))
    given, chosen = config.sample_from_anchor, f", {config.num_rescored_tokens} candidates a row" if config.num_rescored_tokens else ""
    place = describe_drafted_position(
        sample_from_anchor=default_sample_from_anchor(files) if given is None else given, is_known=given is not None
    )
    summary = f"{files.kind.value} drafter, blocks of {config.block_size}{chosen}, that reads layer boundaries {read}; {place}"
    copied_bytes = sum(table.nbytes for table in opened.lookup_tables.values())
    facts = HeadFacts(files.path, files.kind, opened.weights, config.layers.kv_bytes_per_token(_CACHE_TYPE) * 1000, copied_bytes)
    return facts, PairCheck(True, summary)


def _check_pard2(files: HeadFiles, target: CheckpointFacts) -> tuple[HeadFacts, PairCheck]:
    config = read_pard2_config(files, target.config)
    weights = open_pard2_weights(files, config)
    tokenizer, found = read_tokenizer(files.config_path.parent), None
    if target.tokenizer is not None and tokenizer is not None:
        found = compare_pieces(target.tokenizer.pieces, tokenizer.pieces, sample_ids=target.tokenizer.sample_ids)
        check_tokenizer(files.path, found)
    cache_dtype = default_kv_cache_dtype(config.layers, weights)
    facts = HeadFacts(files.path, files.kind, weights, config.layers.kv_bytes_per_token(cache_dtype) * 1000)
    return facts, PairCheck(True, f"PARD-2 draft model {_reading(config)} and drafts all tokens in one pass", found)


def _check_assistant(files: HeadFiles, target: CheckpointFacts) -> tuple[HeadFacts, PairCheck]:
    assistant = load_assistant(files, target.config)
    layers = assistant.config.layers
    read = sorted({layer.attention.kv_source_layer for layer in layers.layers if layer.attention.kv_source_layer is not None})
    summary = f"assistant of {layers.num_layers} layers that reads the keys and values of the target's layers {', '.join(map(str, read))}"
    return HeadFacts(files.path, files.kind, assistant.weights, 0), PairCheck(True, summary)


def _check_medusa(files: HeadFiles, target: CheckpointFacts, options: HeadOptions) -> tuple[HeadFacts, PairCheck]:
    sizes = target.config
    stand_in = Tensor(np.empty(0, np.float32), WeightType.F32, (sizes.vocab_size, sizes.hidden_size))  # only its shape is used
    heads = load_medusa(files, sizes, stand_in)
    own = {name: tensor for name, tensor in heads.weights.items() if tensor is not stand_in}
    matrix = "a vocabulary matrix each" if not heads.heads_share_lm_head else "one vocabulary matrix for all"
    if len(own) < len(heads.weights):
        matrix = "the target's vocabulary matrix"
    tree = "" if options.tree is None else f", tree {options.tree}"
    summary = f"{heads.num_heads} Medusa heads with {matrix}{tree}"
    return HeadFacts(files.path, files.kind, own, 0), PairCheck(True, summary, None, heads.notices)


def _check_eagle(files: HeadFiles, target: CheckpointFacts, options: HeadOptions) -> tuple[HeadFacts, PairCheck]:
    sizes = target.config
    config = read_eagle_config(files, sizes, options)
    opened = open_eagle_checkpoint(files, config, sizes)
    if target.tokenizer is not None:
        check_embedding_rows(files, opened.num_embedded_ids, min(len(target.tokenizer.pieces), sizes.vocab_size))
    is_ours = files.path.is_relative_to(packaged_drafters())  # the packaged heads were trained with the defaults
    unset = [] if is_ours else [switch for switch in ambiguous_options(files, config, sizes) if getattr(options, switch[0]) is None]
    note = (
        f"the head's files do not settle {', '.join(name for name, _ in unset)}: the documented defaults are used; --probe tries other "
        "values, and --drafter-options sets them"
    )
    facts = replace(_pair_facts(files, config, opened.weights), ambiguous_options=unset)
    return facts, PairCheck(True, f"{files.kind.value} head {_reading(config)}", None, (note,) if unset else ())


def _check_mtp(
    files: HeadFiles, target: CheckpointFacts, options: HeadOptions, copy_quant: QuantOptions | None
) -> tuple[HeadFacts, PairCheck]:
    num_ids = options.num_draft_ids(target.config.vocab_size)
    module = load_mtp(files, target.config, target.weights)
    shared = () if module.config.has_own_lm_head else ("lm_head.weight",)
    weights = Weights({name: tensor for name, tensor in module.weights.items() if name not in shared})
    place = "a file of its own" if files.is_speculators else "the target's own checkpoint"
    corpus = options.draft_vocab_corpus
    if corpus is not None:
        read_corpus(corpus)
    chosen = "" if corpus is None else f"the {num_ids} most frequent ids of {corpus}"
    limit = "" if num_ids is None else f" that drafts {chosen or f'ids below {num_ids}'}"
    facts = _pair_facts(files, module.config, weights)
    if num_ids is not None:
        own = restrict_draft_vocab(
            module, np.arange(num_ids) if chosen else range(num_ids), copy_quant
        )  # the copied lm_head has as many rows as the draft vocabulary
        if own.has_lm_head_copy:
            weights = Weights({name: tensor for name, tensor in weights.items() if name != "lm_head.weight"})
            copied = own.weights.tensor_info("lm_head.weight").nbytes
            facts = replace(_pair_facts(files, module.config, weights), copied_bytes=copied)
    if options.normed_recurrence is None:  # reference code differs in the next feature
        facts = replace(facts, ambiguous_options=[("normed_recurrence", [False])])
    return facts, PairCheck(True, f"mtp module of {place}{limit}", None, module.notices)


def _pair_facts(files: HeadFiles, config: RecurrentHeadConfig, weights: Weights) -> HeadFacts:
    return HeadFacts(files.path, files.kind, weights, config.layers.kv_bytes_per_token(_CACHE_TYPE) * 1000)


def _reading(config: RecurrentHeadConfig) -> str:
    if not config.layer_boundaries:
        return "that reads the final hidden states"
    final = " and the final hidden states" if config.feature_ends_with_final_state else ""
    return f"that reads layer boundaries {', '.join(map(str, config.layer_boundaries))}{final}"
