"""MTP (multi-token prediction): drafts with the MTP module, an additional layer in the checkpoints of some models.

The module's input at position t is a feature pair as in EAGLE: token t + 1 and the feature (hidden state) of position t. Both are
normalised. Then follow a decoder layer of the target's kind, a norm and the lm_head. The normalised output is the predicted feature of
position t + 1. Deviation: if a checkpoint has several modules, the first drafts all positions.

Sources: DeepSeek-V3 (arXiv:2412.19437, section 2.2) and the checkpoints' reference code. docs/methods/mtp.md lists the tensor names.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Unpack

import numpy as np
from numpy.typing import NDArray

from paceline.config import QuantOptions
from paceline.drafters.draft_vocab import DraftVocab, select_draft_vocab
from paceline.drafters.head_files import HeadFiles
from paceline.drafters.head_kinds import HeadKind
from paceline.drafters.recurrent_heads.drafter import EagleStyleDrafter
from paceline.drafters.recurrent_heads.head import EMBEDDING, FEATURE, RecurrentHead, RecurrentHeadConfig
from paceline.drafters.target import LoadedTarget
from paceline.errors import CheckpointError, IncompatibleDrafterError
from paceline.models.checkpoint import is_gguf, open_weights
from paceline.models.config import ModelConfig, config_from_values
from paceline.models.families.table import FAMILIES
from paceline.models.gguf.config import gguf_config
from paceline.models.gguf.file import open_gguf, split_parts
from paceline.models.gguf.weights import num_mtp_modules, open_mtp_module
from paceline.models.layer_builder import NUM_EXPERTS_KEYS
from paceline.models.layers import ExpertMLP
from paceline.models.storage.fused_matrices import RowSelection, fused_in_layer, is_transposed, num_rows
from paceline.models.storage.quantized_cache import quantized_weights
from paceline.models.storage.tensor_file import FileTensor
from paceline.models.tensor_names import checkpoint_names, tensor_shapes
from paceline.models.weights import AnyTensor, LazyWeights, Tensor, Weights, add_norm_offset, take_rows
from paceline.runtimes.decoder import LOGITS, NetworkDefinition, Ops, Value, decoder_layer
from paceline.runtimes.load import HeadPlacement, load_head


@dataclass(frozen=True, slots=True)
class _ModuleLayout:
    """How the tensors of an MTP module are named and stored in a file."""

    layer_prefix: str  # prefix of the names of the decoder layer's tensors
    names: Mapping[str, str]  # name in `mtp_network` -> name in the file, for the tensors that are not in the decoder layer
    own_matrix_names: Mapping[str, str]  # embedding.weight and lm_head.weight -> name in the file, if the module has its own
    modules_prefix: str  # prefix of the tensor names of all modules; the number of the module follows
    has_norm_offset: bool = False  # norms multiply by 1 + the stored weight
    has_target_copies: bool = False  # embedding and lm_head are copies of the target's, so the target's are used
    is_feature_first: bool = False  # the input of `fc` is [feature, embedding]; False: [embedding, feature]


_TENSOR_NAMES_BY_LAYOUT = {
    "mtp.": {"fc": "fc", "embedding_norm": "pre_fc_norm_embedding", "feature_norm": "pre_fc_norm_hidden", "final_norm": "norm"},
    "mtp_layers.0.": {
        "fc": "input_proj", "embedding_norm": "token_layernorm", "feature_norm": "hidden_layernorm", "final_norm": "final_layernorm",
    },
    "layers.": {"fc": "eh_proj", "embedding_norm": "enorm", "feature_norm": "hnorm", "final_norm": "shared_head.norm"},
}  # fmt: skip
_MTP_EMBEDDING_TENSOR = "mtp.embed_tokens.weight"
_STACKED_EXPERT_MATRICES = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}


def _detect_module_layout(files: HeadFiles, target: ModelConfig) -> _ModuleLayout:
    def tensor_names(prefix: str, layout: str) -> dict[str, str]:
        return {f"{internal}.weight": f"{prefix}{stored}.weight" for internal, stored in _TENSOR_NAMES_BY_LAYOUT[layout].items()}

    if any(name.startswith("mtp.") for name in files.tensors):
        configs = (files.config, files.config.get("text_config"))
        has_own_embedding = any(isinstance(config, Mapping) and config.get("mtp_use_dedicated_embeddings") is True for config in configs)
        if has_own_embedding and _MTP_EMBEDDING_TENSOR not in files.tensors:
            raise CheckpointError(
                f"{files.path} lacks {_MTP_EMBEDDING_TENSOR} although its config.json sets mtp_use_dedicated_embeddings: download it again"
            )
        own = {"embedding.weight": _MTP_EMBEDDING_TENSOR}
        return _ModuleLayout(
            "mtp.layers.0.", tensor_names("mtp.", "mtp."), own, "mtp.layers.", has_norm_offset=True, has_target_copies=not has_own_embedding
        )
    if any(name.startswith("mtp_layers.") for name in files.tensors):
        own = {"embedding.weight": "embed_tokens.weight", "lm_head.weight": "lm_head.weight"} if files.is_speculators else {}
        prefix = "mtp_layers.0."
        return _ModuleLayout(prefix, tensor_names(prefix, prefix), own, "mtp_layers.", is_feature_first=not files.is_speculators)
    prefix = f"layers.{target.num_layers}."
    if f"{prefix}eh_proj.weight" in files.tensors:
        own = {"embedding.weight": f"{prefix}embed_tokens.weight", "lm_head.weight": f"{prefix}shared_head.head.weight"}
        names = tensor_names(prefix, "layers.")
        return _ModuleLayout(prefix, names, own, "layers.", has_norm_offset=target.has_norm_offset, has_target_copies=True)
    raise IncompatibleDrafterError(
        f"{files.path} holds no MTP module: neither mtp.* or mtp_layers.* tensors nor a layer {target.num_layers} with eh_proj.weight; "
        "use another drafter"
    )


@dataclass(frozen=True, slots=True)
class MtpModule:
    config: RecurrentHeadConfig
    weights: Weights  # weights by the names in `mtp_network`; `lm_head.weight` is the target's if the module has none
    embedding: AnyTensor  # [V, E] token embedding
    soft_cap: float | None  # the target's soft cap of logits, if the target's lm_head is used
    is_feature_first: bool  # the input of `fc` is [feature, embedding]; False: [embedding, feature]
    notices: tuple[str, ...]  # messages for the user, shown at load
    draft_vocab: DraftVocab | None = None  # the ids that the module drafts; None = all ids of the target
    has_lm_head_copy: bool = False  # `lm_head.weight` is a copy of the target's rows for the draft vocabulary


def load_mtp(files: HeadFiles, target: ModelConfig, target_weights: Weights, *, num_threads: int = 1) -> MtpModule:
    """Load the first MTP module of the target's own checkpoint, or of a file of the speculators library.

    Args:
        target_weights: weights of the target; the module uses embedding and lm_head.
        num_threads: threads that convert the quantised matrices of a GGUF file.

    Raises:
        CheckpointError: tensors are missing, unknown, or of the wrong shape; the error lists all of them.
        IncompatibleDrafterError: the files contain no MTP module.
    """
    lm_head = target_weights["embedding.weight" if target.tied_embeddings else "lm_head.weight"]

    def build_module(layers: ModelConfig, weights: Weights, num_later_modules: int, *, is_feature_first: bool = False) -> MtpModule:
        return MtpModule(
            RecurrentHeadConfig(
                kind=HeadKind.MTP, layers=layers, target_hidden_size=target.hidden_size, normed_recurrence=True, has_own_embedding=False
            ),
            weights,
            target_weights["embedding.weight"],
            target.logit_soft_cap,
            is_feature_first,
            (f"{files.path}: of {num_later_modules + 1} MTP modules the first one drafts every position",) * (num_later_modules > 0),
        )

    if is_gguf(files.path):
        layers, file = _single_layer_config(target, has_norm_offset=target.has_norm_offset), open_gguf(files.path)
        openers = open_mtp_module(file, target, layers.layers[0], num_threads=num_threads)
        weights = LazyWeights([*openers, "lm_head.weight"], lambda name: lm_head if name == "lm_head.weight" else openers[name]())
        return build_module(layers, weights, num_mtp_modules(file, target) - 1)
    layout = _detect_module_layout(files, target)
    layers = _single_layer_config(_layer_config(files, target), has_norm_offset=layout.has_norm_offset)
    tensors, own_matrices, num_later_modules = _read_tensors(files, layout, layers, target)
    all_tensors = Weights({**tensors, "lm_head.weight": lm_head})
    module = build_module(layers, all_tensors, num_later_modules, is_feature_first=layout.is_feature_first)
    return module if layout.has_target_copies else _with_own_matrices(module, own_matrices)


def _read_tensors(
    files: HeadFiles, layout: _ModuleLayout, layers: ModelConfig, target: ModelConfig
) -> tuple[dict[str, AnyTensor], dict[str, Tensor], int]:
    """Return the first module's tensors by the names in `mtp_network`, its own embedding and lm_head, and the number of other modules."""
    size, mlp = target.hidden_size, layers.layers[0].mlp
    if isinstance(mlp, ExpertMLP):
        files = _split_experts(files, layout.layer_prefix, mlp, size)
    files = _split_fused(files, layout.layer_prefix, layers)
    shapes = {name: shape for name, shape in tensor_shapes(layers).items() if name.startswith("layers.0.")}
    file_names = checkpoint_names(layers)
    fused = {part for parts in fused_in_layer(layers.layers[0], FAMILIES[layers.family]).values() for part in parts}
    file_names |= {name: name for name in shapes if name.removeprefix("layers.0.").rpartition(".")[0] in fused}
    names = {name: layout.layer_prefix + file_names[name].removeprefix("model.").removeprefix("layers.0.") for name in shapes}
    names |= layout.names
    shapes |= {"fc.weight": (size, 2 * size), **{name: (size,) for name in layout.names if name != "fc.weight"}}
    optional = dict.fromkeys(layout.own_matrix_names.values(), (target.vocab_size, size))
    files.check_shapes({names[name]: shape for name, shape in shapes.items()}, optional)
    tensors: dict[str, AnyTensor] = {name: files.weight(file_name) for name, file_name in names.items()}
    if layout.has_norm_offset:
        tensors |= {name: add_norm_offset(tensor) for name, tensor in tensors.items() if name.endswith("norm.weight")}
    later = _check_all_used(files, layout, {*names.values(), *layout.own_matrix_names.values()}, target.num_layers)
    own_matrices = {name: files.weight(file_name) for name, file_name in layout.own_matrix_names.items() if file_name in files.tensors}
    return tensors, own_matrices, later


def _split_experts(files: HeadFiles, prefix: str, mlp: ExpertMLP, hidden_size: int) -> HeadFiles:
    """Replace tensors that stack all experts by tensors `<prefix>mlp.experts.<expert>.gate_proj.weight`, …; values are only read when used.

    Args:
        prefix: prefix of the tensor names of the module's decoder layer.
        mlp: sizes of the experts by the target's config.
    """
    prefix = f"{prefix}mlp.experts."
    tensors, count = dict(files.tensors), mlp.routing.num_experts
    expert_indices = {int(match[1]) for name in tensors if (match := re.match(re.escape(prefix) + r"([0-9]{1,6})\.", name))}
    key = next((key for key in NUM_EXPERTS_KEYS if files.config.get(key) is not None), None)
    expected_count = f"{'the target has' if key is None else f'config.json has {key} ='} {count}; one of the two is another model's"
    if expert_indices and len(expert_indices) != count:
        raise CheckpointError(f"{files.path}: {prefix}* are {len(expert_indices)} experts, but {expected_count}")
    intermediate_size = mlp.expert.intermediate_size
    for stack, parts in _STACKED_EXPERT_MATRICES.items():
        tensor = tensors.pop(prefix + stack, None)
        if tensor is None:
            continue
        rows, columns = (hidden_size, intermediate_size) if stack == "down_proj" else (intermediate_size, hidden_size)
        shape = (count, len(parts) * rows, columns)
        if tensor.shape != shape:
            raise CheckpointError(
                f"{files.path}: tensor {prefix + stack!r} has shape {list(tensor.shape)}, expected {list(shape)}: {expected_count}"
            )
        for expert in range(count):
            for number, part in enumerate(parts):
                rows_of_part = partial(_read_expert_rows, tensor, expert, number * rows, rows)
                tensors[f"{prefix}{expert}.{part}.weight"] = FileTensor((rows, columns), tensor.dtype, rows_of_part)
    return replace(files, tensors=tensors)


def _read_expert_rows(stack: FileTensor, expert: int, first_row: int, count: int) -> NDArray[Any]:
    return np.ascontiguousarray(stack.read_values()[expert, first_row : first_row + count])


def _split_fused(files: HeadFiles, prefix: str, layers: ModelConfig) -> HeadFiles:
    """Split fused matrices, such as `qkv_proj`, into the matrices of the network; values are only read when used."""
    tensors, expected = dict(files.tensors), tensor_shapes(layers)
    for source, parts in fused_in_layer(layers.layers[0], FAMILIES[layers.family]).items():
        first = expected[f"layers.0.{next(iter(parts))}.weight"]
        for kind, shape in {"weight": (num_rows(parts), first[1]), "bias": (num_rows(parts),)}.items():
            fused = tensors.pop(f"{prefix}{source}.{kind}", None)
            if fused is None:
                continue
            if fused.shape != shape:
                raise CheckpointError(
                    f"{files.path}: tensor {f'{prefix}{source}.{kind}'!r} has shape {list(fused.shape)}, expected {list(shape)} for "
                    f"{', '.join(parts)}, as the target's layers have them; is it another model's?"
                )
            for part, rows in parts.items():
                part_shape = expected.get(f"layers.0.{part}.{kind}", shape)
                tensors[f"{prefix}{part}.{kind}"] = FileTensor(part_shape, fused.dtype, partial(_read_fused_part, fused, part, rows))
    return replace(files, tensors=tensors)


def _read_fused_part(fused: FileTensor, part: str, rows: RowSelection) -> NDArray[Any]:
    array = fused.read_values()[rows]
    return np.ascontiguousarray(array.T if is_transposed(part) else array)


def _with_own_matrices(module: MtpModule, own: Mapping[str, Tensor]) -> MtpModule:
    """Return the module with its own embedding and lm_head, except matrices that are equal to the target's."""
    shared = {"embedding.weight": module.embedding, "lm_head.weight": module.weights["lm_head.weight"]}

    def is_copy(own: Tensor, target: AnyTensor) -> bool:
        return isinstance(target, Tensor) and own.weight_type is target.weight_type and np.array_equal(own.array, target.array)

    own_matrices = {name: tensor for name, tensor in own.items() if not is_copy(tensor, shared[name])}
    if not own_matrices:
        return module
    has_own_lm_head = "lm_head.weight" in own_matrices
    return replace(
        module,
        config=replace(module.config, has_own_embedding="embedding.weight" in own_matrices, has_own_lm_head=has_own_lm_head),
        weights=Weights({**module.weights, "lm_head.weight": own_matrices["lm_head.weight"]}) if has_own_lm_head else module.weights,
        embedding=own_matrices.get("embedding.weight", module.embedding),
        soft_cap=None if has_own_lm_head else module.soft_cap,
    )


def restrict_draft_vocab(
    module: MtpModule, vocab: DraftVocab, quantization: QuantOptions | None = None, *, num_threads: int = 1
) -> MtpModule:
    """Return the module with a draft vocabulary, so that it uses only the lm_head rows of these ids.

    Args:
        vocab: ids to draft. If they are not contiguous, their lm_head rows are copied.
        quantization: how to quantise the rows. They stay as stored if it is None or would make them larger.
    """
    rows = take_rows(module.weights["lm_head.weight"], slice(vocab.stop) if isinstance(vocab, range) else vocab)
    stored = Weights({**module.weights, "lm_head.weight": rows})
    weights = stored
    if quantization is not None:
        lm_head_quantization = replace(quantization, overrides=(("lm_head.weight", quantization.bits), ("*", None)))
        weights = quantized_weights(stored, lm_head_quantization, None, num_threads=num_threads)
    is_copy = weights is not stored or not isinstance(vocab, range)
    return replace(module, weights=weights, draft_vocab=vocab, has_lm_head_copy=is_copy)


def open_gguf_module(path: Path) -> HeadFiles | None:
    """Open the MTP module in the GGUF file of a model; None if the model has none.

    Raises:
        CheckpointError: the file is damaged, or its model is not supported.
    """
    file = open_gguf(path)
    if not num_mtp_modules(file, gguf_config(file)):
        return None
    return HeadFiles(path, {}, {}, HeadKind.MTP, split_parts(path))


def _layer_config(files: HeadFiles, target: ModelConfig) -> ModelConfig:
    """Return the config of the module's decoder layer: from a speculators config if it has one, else the target's."""
    values = files.config.get("transformer_layer_config")
    if not files.is_speculators or not isinstance(values, Mapping):
        return target
    return config_from_values(values, files.config_path, weight_type=target.weight_type)


def _single_layer_config(config: ModelConfig, *, has_norm_offset: bool) -> ModelConfig:
    """Return the config with one decoder layer: full attention, and experts if any layer of the target has experts."""
    layers = [config.layers[index] for index in config.attention_layers]
    full = next((layer for layer in layers if layer.attention.window is None), layers[0])
    mlp = next((layer.mlp for layer in config.layers if isinstance(layer.mlp, ExpertMLP)), full.mlp)
    layer = replace(full, mixer=replace(full.attention, window=None), mlp=mlp)
    return replace(config, layers=(layer,), has_norm_offset=has_norm_offset)


def _check_all_used(files: HeadFiles, layout: _ModuleLayout, used: set[str], num_layers: int) -> int:
    """Check that the files contain no unknown tensors; return the number of modules after the first."""
    pattern = re.compile(re.escape(layout.modules_prefix) + "([0-9]{1,6})[.]")
    module_number = {name: int(match[1]) for name in files.tensors if (match := pattern.match(name))}
    first = num_layers if layout.modules_prefix == "layers." else 0
    later = {name for name, number in module_number.items() if number > first}
    modules = ("mtp.", "mtp_layers.", layout.layer_prefix)

    def is_unused(name: str) -> bool:
        """Return whether a tensor belongs to another module, or to the target."""
        return name in later or (name.startswith("verifier_") if files.is_speculators else not name.startswith(modules))

    files.check_all_used(used, ignored=is_unused)
    return len({module_number[name] for name in later})


def mtp_network(config: RecurrentHeadConfig, soft_cap: float | None = None, *, is_feature_first: bool = False) -> NetworkDefinition:
    """Return the network of an MTP module. Inputs: `embedding`, `feature`. Results: `feature` (the predicted one) [T, E], `logits` [R, V].

        feature = layer(fc([embedding_norm(embedding), feature_norm(feature)]));  logits = lm_head(final_norm(output))

    `soft_cap` and `is_feature_first` are fields of `MtpModule`.
    """

    def define_network(ops: Ops[Value]) -> Mapping[str, Value]:
        size = config.target_hidden_size
        embedding = ops.rms_norm(ops.input(EMBEDDING, size), "embedding_norm")
        feature = ops.rms_norm(ops.input(FEATURE, size), "feature_norm")
        pair = (feature, embedding) if is_feature_first else (embedding, feature)
        (mixed,) = ops.linear(ops.concat(*pair), "fc")
        x = decoder_layer(ops, config.layers.layers[0], mixed, 0)
        out = ops.rms_norm(x, "final_norm")
        logits = ops.lm_head(ops.logits_rows(out), "lm_head")
        if soft_cap is not None:
            logits = ops.soft_cap(logits, soft_cap)
        return {FEATURE: out if config.normed_recurrence else x, LOGITS: logits}

    return define_network


def open_mtp_head(module: MtpModule, **placement: Unpack[HeadPlacement]) -> RecurrentHead:
    network = mtp_network(module.config, module.soft_cap, is_feature_first=module.is_feature_first)
    if module.config.has_own_lm_head or module.has_lm_head_copy:
        placement["lm_head_source"] = None
    runtime = load_head(network, module.config.layers, module.weights, **placement)
    vocab = module.draft_vocab
    range_size, target_ids = (len(vocab), None) if isinstance(vocab, range) else (None, vocab)
    return RecurrentHead(
        module.config, runtime, runtime, module.embedding, target_ids=target_ids, draft_vocab_size=range_size, notices=module.notices
    )


def open_mtp(files: HeadFiles, target: LoadedTarget) -> EagleStyleDrafter:
    """Create the drafter for a loaded target from the MTP module in its checkpoint, or in a file of the speculators library.

    Raises:
        CheckpointError: tensors are missing or damaged.
        IncompatibleDrafterError: the files contain no MTP module.
        ConfigError: the draft vocabulary is larger than the target's, or its corpus cannot be read.
    """
    target_config, options, num_threads = target.runtime.config, target.head_options, target.engine.num_threads
    vocab = select_draft_vocab(options, target.tokenizer, target_config.vocab_size)
    module = load_mtp(files, target_config, open_weights(target.directory, target_config), num_threads=num_threads)
    uses_target_lm_head = not module.config.has_own_lm_head
    module = replace(module, weights=target.quantize(module.weights, files.files, uses_target_lm_head=uses_target_lm_head))
    if options.normed_recurrence is not None:
        module = replace(module, config=replace(module.config, normed_recurrence=options.normed_recurrence))
    if vocab is not None:
        module = restrict_draft_vocab(module, vocab, target.lm_head_copy_quant, num_threads=num_threads)
    placement = target.placement
    if target.copies_lm_head:
        placement["lm_head_source"] = None
    head = open_mtp_head(module, **placement)
    return EagleStyleDrafter(head, target.cache, vocab_size=target.vocab_size, tree_width=target.speculation.tree_width)
