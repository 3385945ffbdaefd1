"""Weights of Medusa heads, read from four formats and renamed to the names of `network.py`.

Head i has residual blocks j = 0 … n - 1. The formats are: (1) `{i}.{j}.linear.*` and lm_head `{i}.{n}.weight`, by the paper's code;
(2) the same without lm_heads, where the target's lm_head is used, by TGI; (3) the tensors of (1) or (2) with the prefix `medusa_head.`, in
the checkpoint of a whole model; (4) `blocks.{i}.layers.{j}.*` with `lm_heads.{i}.weight` or one shared `lm_head.weight`, and optionally a
`token_map` of target ids, by vLLM. The heads are counted by their tensors, because configs may have wrong numbers.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from paceline.drafters.head_files import HeadFiles, check_target_sizes, read_token_map
from paceline.errors import CheckpointError
from paceline.models.config import ModelConfig
from paceline.models.weights import AnyTensor, Weights, take_rows

_NESTED_PREFIX = re.compile(r"^medusa_heads?\.")
_INDEX_PATTERN = "([0-9]{1,6})"  # index of a head or block; more digits only occur in damaged files
_MAX_UNCHECKED_BLOCKS = 1024  # of more blocks than this (heads x blocks of a head), the file must hold at least half
_ORIGINAL_TENSOR_PATTERN = re.compile(rf"{_INDEX_PATTERN}\.{_INDEX_PATTERN}\.(linear\.)?(weight|bias)")  # formats (1) to (3)
_VLLM_BLOCK_PATTERN = re.compile(rf"blocks\.{_INDEX_PATTERN}\.layers\.{_INDEX_PATTERN}\.(weight|bias)")
_VLLM_LM_HEAD_PATTERN = re.compile(rf"lm_heads\.{_INDEX_PATTERN}\.weight")


@dataclass(frozen=True, slots=True)
class MedusaHeads:
    """The weights of all Medusa heads."""

    num_heads: int  # number of heads; head d drafts the token d + 1 positions after the last committed token
    num_blocks: int  # number of residual blocks of each head
    weights: Weights  # `heads.{i}.blocks.{j}.weight` [E, E] and `.bias` [E]; `heads.{i}.lm_head.weight` [rows, E], or one `lm_head.weight`
    heads_share_lm_head: bool  # all heads use the same lm_head
    num_lm_head_rows: int  # number of rows of each lm_head
    token_map: NDArray[np.int64] | None = None  # [rows] target id of each lm_head row, ascending; None = row indices are target ids
    soft_cap: float | None = None  # the target's soft cap of logits, if the target's lm_head is used
    notices: tuple[str, ...] = ()  # messages for the user, shown at load
    uses_target_lm_head: bool = False  # the heads use the target's lm_head


@dataclass(frozen=True, slots=True)
class _TensorNames:
    blocks: Mapping[tuple[int, int, str], str]  # (head, block, "weight" or "bias") -> name of the tensor
    lm_heads: Mapping[int, str]  # head -> name of its lm_head
    shared_lm_head: str | None  # name of the lm_head of all heads; None if the files have none
    num_heads: int
    num_blocks: int
    patterns: tuple[str, str]  # patterns of block and lm_head names, with {} for each index


def load_medusa(files: HeadFiles, target: ModelConfig, target_lm_head: AnyTensor) -> MedusaHeads:
    """Load Medusa heads, and check that they fit the target.

    Args:
        target_lm_head: the target's lm_head, for heads without one.

    Raises:
        CheckpointError: tensors are missing or of the wrong shape.
        IncompatibleDrafterError: the heads were made for another target.
    """
    names = _find_tensor_names(files)
    weight_names = (name for (_, _, kind), name in names.blocks.items() if kind == "weight")
    _, hidden = files.matrix_shape(next(weight_names, "")) or (0, 0)
    check_target_sizes(files, target, hidden_size=hidden)
    shared = names.shared_lm_head
    has_lm_heads = bool(names.lm_heads) or shared is not None
    num_lm_head_rows = _check_tensor_shapes(files, names, target.hidden_size)
    if not has_lm_heads:
        num_lm_head_rows = target_lm_head.shape[0]
    token_map, row_indices = read_token_map(files, target.vocab_size) if "token_map" in files.tensors else (None, slice(None))
    if token_map is None:
        check_target_sizes(files, target, hidden_size=hidden, num_vocab_rows=num_lm_head_rows)
    elif len(token_map) != num_lm_head_rows:
        raise CheckpointError(f"{files.path}: token_map has {len(token_map)} entries for vocabulary matrices of {num_lm_head_rows} rows")
    weights: dict[str, AnyTensor] = {}
    for (head, block, kind), name in sorted(names.blocks.items()):
        weights[f"heads.{head}.blocks.{block}.{kind}"] = files.weight(name)
    for head, name in names.lm_heads.items():
        weights[f"heads.{head}.lm_head.weight"] = take_rows(files.weight(name), row_indices)
    if not names.lm_heads:
        weights["lm_head.weight"] = target_lm_head if shared is None else take_rows(files.weight(shared), row_indices)
    used = [*names.blocks.values(), *names.lm_heads.values(), "token_map", *([shared] if shared else [])]
    is_whole_model = any(_NESTED_PREFIX.match(name) for name in files.tensors)
    files.check_all_used(used, ignored=lambda name: is_whole_model and not _NESTED_PREFIX.match(name))
    return MedusaHeads(
        names.num_heads,
        names.num_blocks,
        Weights(weights),
        not names.lm_heads,
        num_lm_head_rows,
        token_map,
        None if has_lm_heads else target.logit_soft_cap,
        _wrong_num_heads_notice(files, names.num_heads),
        not has_lm_heads,
    )


def _find_tensor_names(files: HeadFiles) -> _TensorNames:
    prefix = next((match[0] for name in files.tensors if (match := _NESTED_PREFIX.match(name))), "")
    full_names = {_NESTED_PREFIX.sub("", name, count=1): name for name in files.tensors}
    vllm_blocks = {match: full_names[name] for name in full_names if (match := _VLLM_BLOCK_PATTERN.fullmatch(name))}
    if vllm_blocks:
        blocks = {(int(match[1]), int(match[2]), match[3]): name for match, name in vllm_blocks.items()}
        lm_heads = {int(match[1]): full_names[name] for name in full_names if (match := _VLLM_LM_HEAD_PATTERN.fullmatch(name))}
        shared = full_names.get("lm_head.weight") if not lm_heads else None
        if not lm_heads and shared is None and not files.config.get("original_lm_head"):
            raise CheckpointError(
                f"{files.path} is no complete medusa head for this target: it lacks lm_heads.0.weight and lm_head.weight, and its "
                "config.json does not set original_lm_head, which would take the target's"
            )
    else:
        rows = [(match, full_names[name]) for name in full_names if (match := _ORIGINAL_TENSOR_PATTERN.fullmatch(name))]
        blocks = {(int(match[1]), int(match[2]), match[4]): name for match, name in rows if match[3]}
        lm_heads = {int(match[1]): name for match, name in rows if not match[3] and match[4] == "weight"}
        shared = None
    if not blocks:
        raise CheckpointError(f"{files.path} holds no medusa heads: expected tensors such as 0.0.linear.weight or blocks.0.layers.0.weight")
    num_heads = 1 + max(max(head for head, _, _ in blocks), max(lm_heads, default=0))
    num_blocks = 1 + max(block for _, block, _ in blocks)
    if num_heads * num_blocks > max(_MAX_UNCHECKED_BLOCKS, 2 * len(blocks)):
        raise CheckpointError(
            f"{files.path} names heads up to {num_heads - 1} and blocks up to {num_blocks - 1} and holds {len(blocks)} tensors of them: "
            "the file is damaged, download it again"
        )
    patterns = ("blocks.{}.layers.{}", "lm_heads.{}.weight") if vllm_blocks else ("{}.{}.linear", f"{{}}.{num_blocks}.weight")
    return _TensorNames(blocks, lm_heads, shared, num_heads, num_blocks, (prefix + patterns[0], prefix + patterns[1]))


def _check_tensor_shapes(files: HeadFiles, names: _TensorNames, hidden: int) -> int:
    """Check that all heads have the same tensors and shapes; return the number of rows of each lm_head, 0 if there is none."""
    block_name, head_name = names.patterns
    shapes = {kind: (hidden, hidden) if kind == "weight" else (hidden,) for _, _, kind in names.blocks} | {"weight": (hidden, hidden)}
    required = {
        f"{block_name.format(head, block)}.{kind}": shape
        for head in range(names.num_heads)
        for block in range(names.num_blocks)
        for kind, shape in shapes.items()
    }
    first = names.shared_lm_head if names.shared_lm_head is not None else names.lm_heads.get(min(names.lm_heads, default=0))
    shape = None if first is None else files.matrix_shape(first)
    num_lm_head_rows = 0 if shape is None else shape[0]
    if names.shared_lm_head is not None:
        required[names.shared_lm_head] = (num_lm_head_rows, hidden)
    elif names.lm_heads:
        required |= {head_name.format(head): (num_lm_head_rows, hidden) for head in range(names.num_heads)}
    files.check_shapes(required)
    return num_lm_head_rows


def _wrong_num_heads_notice(files: HeadFiles, num_heads: int) -> tuple[str, ...]:
    declared = files.config.get("medusa_num_heads", files.config.get("num_heads"))
    if not isinstance(declared, int) or declared == num_heads:
        return ()
    return (f"{files.path}: config.json names {declared} medusa heads, the file holds {num_heads}: all of them are used",)
