"""MTP: the multi-token-prediction layer of a model's own checkpoint drafts token after token.

A pair joins token t + 1 with the target's feature of position t, as in EAGLE, and drafting is the same. The network differs: both halves
are normed, the layer is an ordinary one of the model's family, and a norm precedes the vocabulary matrix. The next feature is the normed
output. Deviation: only the first module is used, again and again.

Sources: DeepSeek-V3 (arXiv:2412.19437, section 2.2) and the checkpoints' reference code. docs/methods/mtp.md has the tensor layouts.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.config import QuantOptions
from paceline.drafters.draft_vocab import DraftVocab, draft_vocab
from paceline.drafters.head_files import HeadFiles
from paceline.drafters.head_kinds import HeadKind
from paceline.drafters.recurrent_heads.drafter import EagleStyleDrafter
from paceline.drafters.recurrent_heads.head import EMBEDDING, FEATURE, RecurrentHead, RecurrentHeadConfig
from paceline.drafters.target import LoadedTarget
from paceline.errors import CheckpointError, IncompatibleDrafterError
from paceline.models.checkpoint import is_gguf, open_weights
from paceline.models.config import ModelConfig, WeightType, config_from_values
from paceline.models.gguf.config import gguf_config
from paceline.models.gguf.file import open_gguf, split_parts
from paceline.models.gguf.weights import num_mtp_modules, open_mtp_module
from paceline.models.layer_builder import NUM_EXPERTS_KEYS
from paceline.models.layers import AttentionConfig, ExpertMLP
from paceline.models.storage.quantized_cache import quantized_weights
from paceline.models.storage.tensor_file import FileTensor
from paceline.models.tensor_names import checkpoint_names, tensor_shapes
from paceline.models.weights import AnyTensor, LazyWeights, Tensor, Weights, as_float32, take_rows
from paceline.runtimes.base import Network
from paceline.runtimes.decoder import LOGITS, Blocks, NetworkDefinition, Value, decoder_layer
from paceline.runtimes.load import load_head


@dataclass(frozen=True, slots=True)
class _ModuleLayout:
    """Tensor names of a module.

    Attributes:
        prefix: of its decoder layer's tensors.
        names: internal name -> the file's.
        file_matrices: embedding and vocabulary matrix, internal name -> the file's.
        modules: the prefix of all modules' names, followed by their number.
        has_norm_offset: norm weights are stored less 1.
        has_target_copies: its own matrices are copies of the target's, which are used instead, as in transformers.
        is_feature_first: the mixing matrix takes [feature, embedding].
    """

    prefix: str
    names: Mapping[str, str]
    file_matrices: Mapping[str, str]
    modules: str
    has_norm_offset: bool = False
    has_target_copies: bool = False
    is_feature_first: bool = False


_LAYER_TENSOR_NAMES = {
    "mtp.": {"fc": "fc", "embedding_norm": "pre_fc_norm_embedding", "feature_norm": "pre_fc_norm_hidden", "final_norm": "norm"},
    "mtp_layers.0.": {
        "fc": "input_proj", "embedding_norm": "token_layernorm", "feature_norm": "hidden_layernorm", "final_norm": "final_layernorm",
    },
    "layers.": {"fc": "eh_proj", "embedding_norm": "enorm", "feature_norm": "hnorm", "final_norm": "shared_head.norm"},
}  # fmt: skip
_OWN_EMBEDDING = "mtp.embed_tokens.weight"
_GATE_TENSOR = "self_attn.attention_gate"
"""Name after the layer's prefix of an output gate's tensor, once it is split from the matrix of the queries."""
_EXPERT_STACKS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}


def _module_layout(files: HeadFiles, target: ModelConfig) -> _ModuleLayout:
    def named(prefix: str, parts: str) -> dict[str, str]:
        return {f"{ours}.weight": f"{prefix}{theirs}.weight" for ours, theirs in _LAYER_TENSOR_NAMES[parts].items()}

    if any(name.startswith("mtp.") for name in files.tensors):
        has_own = _has_own_embedding(files)
        if has_own and _OWN_EMBEDDING not in files.tensors:
            raise CheckpointError(
                f"{files.path} lacks {_OWN_EMBEDDING} although its config.json sets mtp_use_dedicated_embeddings: download it again"
            )
        own = {"embedding.weight": _OWN_EMBEDDING}
        return _ModuleLayout(
            "mtp.layers.0.", named("mtp.", "mtp."), own, "mtp.layers.", has_norm_offset=True, has_target_copies=not has_own
        )
    if any(name.startswith("mtp_layers.") for name in files.tensors):
        own = {"embedding.weight": "embed_tokens.weight", "lm_head.weight": "lm_head.weight"} if files.is_speculators else {}
        prefix = "mtp_layers.0."
        return _ModuleLayout(prefix, named(prefix, prefix), own, "mtp_layers.", is_feature_first=not files.is_speculators)
    prefix = f"layers.{target.num_layers}."
    if f"{prefix}eh_proj.weight" in files.tensors:
        own = {"embedding.weight": f"{prefix}embed_tokens.weight", "lm_head.weight": f"{prefix}shared_head.head.weight"}
        names = named(prefix, "layers.")
        return _ModuleLayout(prefix, names, own, "layers.", has_norm_offset=target.has_norm_offset, has_target_copies=True)
    raise IncompatibleDrafterError(
        f"{files.path} holds no MTP module: neither mtp.* or mtp_layers.* tensors nor a layer {target.num_layers} with eh_proj.weight; "
        "use another drafter"
    )


def _has_own_embedding(files: HeadFiles) -> bool:
    """Return whether config.json gives the module an embedding of its own."""
    text = files.config.get("text_config")
    return any(isinstance(values, Mapping) and values.get("mtp_use_dedicated_embeddings") is True for values in (files.config, text))


@dataclass(frozen=True, slots=True)
class MtpModule:
    """A loaded module.

    Attributes:
        config: sizes and switches.
        weights: under the names of `mtp_network`; `lm_head.weight` is the target's if the file has none.
        embedding: embedding table of the pairs' tokens.
        soft_cap: the target's logit soft cap, if its vocabulary matrix is used.
        is_feature_first: the mixing matrix takes [feature, embedding].
        notices: one-line remarks for the user.
        draft_vocab: the ids that it drafts; None = all.
        has_lm_head_copy: `lm_head.weight` is a copy of the rows of these ids.
    """

    config: RecurrentHeadConfig
    weights: Weights
    embedding: AnyTensor
    soft_cap: float | None
    is_feature_first: bool
    notices: tuple[str, ...]
    draft_vocab: DraftVocab | None = None
    has_lm_head_copy: bool = False


def load_mtp(files: HeadFiles, target: ModelConfig, target_weights: Weights, *, num_threads: int = 1) -> MtpModule:
    """Load the first module of a target's own checkpoint, or of a file of the speculators library.

    Args:
        num_threads: for the conversion of a GGUF file's matrices.

    Raises:
        CheckpointError: tensors are missing, of another shape, or unknown; all of them are named.
        IncompatibleDrafterError: there is no module.
    """
    lm_head = target_weights["embedding.weight" if target.tied_embeddings else "lm_head.weight"]

    def module(layers: ModelConfig, weights: Weights, num_later_modules: int, *, is_feature_first: bool = False) -> MtpModule:
        return MtpModule(
            RecurrentHeadConfig(
                kind=HeadKind.MTP, layers=layers, feature_size=target.hidden_size, normed_recurrence=True, has_own_embedding=False
            ),
            weights,
            target_weights["embedding.weight"],
            target.logit_soft_cap,
            is_feature_first,
            (f"{files.path}: of {num_later_modules + 1} MTP modules the first one drafts every position",) * (num_later_modules > 0),
        )

    if is_gguf(files.path):
        layers, file = _single_layer_config(target, has_norm_offset=target.has_norm_offset), open_gguf(files.path)
        makers = open_mtp_module(file, target, layers.layers[0], num_threads=num_threads)
        made = LazyWeights([*makers, "lm_head.weight"], lambda name: lm_head if name == "lm_head.weight" else makers[name]())
        return module(layers, made, num_mtp_modules(file, target) - 1)
    layout = _module_layout(files, target)
    layers = _single_layer_config(_layer_config(files, target), has_norm_offset=layout.has_norm_offset)
    tensors, own, num_later_modules = _read_tensors(files, layout, layers, target)
    loaded = module(layers, Weights({**tensors, "lm_head.weight": lm_head}), num_later_modules, is_feature_first=layout.is_feature_first)
    return loaded if layout.has_target_copies else _with_file_matrices(loaded, own)


def _read_tensors(
    files: HeadFiles, layout: _ModuleLayout, layers: ModelConfig, target: ModelConfig
) -> tuple[dict[str, AnyTensor], dict[str, Tensor], int]:
    """Return a module's tensors under internal names, its own matrices, and the number of modules after it.

    Raises:
        CheckpointError: as `load_mtp`.
    """
    size, mlp, attention = target.hidden_size, layers.layers[0].mlp, layers.attention
    if isinstance(mlp, ExpertMLP):
        files = _split_experts(files, layout.prefix, mlp, size)
    if attention.is_gated:
        files = _split_gates(files, layout.prefix, attention, size)
    shapes = {name: shape for name, shape in tensor_shapes(layers).items() if name.startswith("layers.0.")}
    plain = checkpoint_names(layers)
    plain |= {name: name.replace("attention_gate", _GATE_TENSOR) for name in shapes if name.startswith("layers.0.attention_gate.")}
    names = {name: layout.prefix + plain[name].removeprefix("model.").removeprefix("layers.0.") for name in shapes} | dict(layout.names)
    shapes |= {"fc.weight": (size, 2 * size), **{name: (size,) for name in layout.names if name != "fc.weight"}}
    optional = dict.fromkeys(layout.file_matrices.values(), (target.vocab_size, size))
    files.check({names[name]: shape for name, shape in shapes.items()}, optional)
    tensors: dict[str, AnyTensor] = {name: files.weight(theirs) for name, theirs in names.items()}
    if layout.has_norm_offset:
        tensors |= {name: _add_norm_offset(tensor) for name, tensor in tensors.items() if name.endswith("norm.weight")}
    later = _check_all_used(files, layout, {*names.values(), *layout.file_matrices.values()}, target.num_layers)
    own = {name: files.weight(theirs) for name, theirs in layout.file_matrices.items() if theirs in files.tensors}
    return tensors, own, later


def _split_experts(files: HeadFiles, prefix: str, mlp: ExpertMLP, hidden_size: int) -> HeadFiles:
    """Return the same files with stacked experts one by one, `<prefix>mlp.experts.E.gate_proj.weight`; no tensor is read.

    Args:
        prefix: of the names of the module's layer.
        mlp: the experts that the target's config describes.

    Raises:
        CheckpointError: the number of experts differs, or a stack has another shape.
    """
    prefix = f"{prefix}mlp.experts."
    tensors, count = dict(files.tensors), mlp.routing.num_experts
    numbers = {int(found[1]) for name in tensors if (found := re.match(re.escape(prefix) + r"([0-9]{1,6})\.", name))}
    key = next((key for key in NUM_EXPERTS_KEYS if files.config.get(key) is not None), None)
    expected_count = f"{'the target has' if key is None else f'config.json has {key} ='} {count}; one of the two is another model's"
    if numbers and len(numbers) != count:
        raise CheckpointError(f"{files.path}: {prefix}* are {len(numbers)} experts, but {expected_count}")
    inner = mlp.expert.intermediate_size
    for stack, parts in _EXPERT_STACKS.items():
        tensor = tensors.pop(prefix + stack, None)
        if tensor is None:
            continue
        rows, columns = (hidden_size, inner) if stack == "down_proj" else (inner, hidden_size)
        shape = (count, len(parts) * rows, columns)
        if tensor.shape != shape:
            raise CheckpointError(
                f"{files.path}: tensor {prefix + stack!r} has shape {list(tensor.shape)}, expected {list(shape)}: {expected_count}"
            )
        for expert in range(count):
            for number, part in enumerate(parts):
                rows_of_part = partial(_expert_rows, tensor, expert, number * rows, rows)
                tensors[f"{prefix}{expert}.{part}.weight"] = FileTensor((rows, columns), tensor.dtype, rows_of_part)
    return replace(files, tensors=tensors)


def _expert_rows(stack: FileTensor, expert: int, first: int, count: int) -> NDArray[Any]:
    return np.ascontiguousarray(stack.open()[expert, first : first + count])


def _split_gates(files: HeadFiles, prefix: str, attention: AttentionConfig, hidden_size: int) -> HeadFiles:
    """Return the same files with queries and output gates in separate matrices; no tensor is read.

    The first half of each head's rows are queries, the second half gates.

    Args:
        prefix: of the names of the module's layer.

    Raises:
        CheckpointError: the stored matrix, or its bias, has another shape.
    """
    tensors = dict(files.tensors)
    shapes: dict[str, tuple[int, ...]] = {"weight": (2 * attention.query_size, hidden_size), "bias": (2 * attention.query_size,)}
    for kind, shape in shapes.items():
        name = f"{prefix}self_attn.q_proj.{kind}"
        whole = tensors.get(name)
        if whole is None:
            continue
        if whole.shape != shape:
            raise CheckpointError(
                f"{files.path}: tensor {name!r} has shape {list(whole.shape)}, expected {list(shape)}: queries and gates of "
                f"{attention.num_heads} heads, as the target's layers have them; is it another model's?"
            )
        part_shape = (attention.query_size, *shape[1:])
        for half, part in enumerate(("self_attn.q_proj", _GATE_TENSOR)):
            rows = partial(_query_or_gate_rows, whole, half, attention.head_size)
            tensors[f"{prefix}{part}.{kind}"] = FileTensor(part_shape, whole.dtype, rows)
    return replace(files, tensors=tensors)


def _query_or_gate_rows(whole: FileTensor, half: int, head_size: int) -> NDArray[Any]:
    """Return the rows of the queries (half 0) or of the output gates (half 1) of a fused matrix."""
    array = whole.open()
    heads = array.reshape(-1, 2, head_size, *array.shape[1:])
    return np.ascontiguousarray(heads[:, half]).reshape(-1, *array.shape[1:])


def _with_file_matrices(module: MtpModule, own: Mapping[str, Tensor]) -> MtpModule:
    """Return the module with the matrices of its own file, except those that equal the target's."""
    shared = {"embedding.weight": module.embedding, "lm_head.weight": module.weights["lm_head.weight"]}
    differ = {name: tensor for name, tensor in own.items() if not _equals_target_matrix(tensor, shared[name])}
    if not differ:
        return module
    has_head = "lm_head.weight" in differ
    return replace(
        module,
        config=replace(module.config, has_own_embedding="embedding.weight" in differ, has_own_lm_head=has_head),
        weights=Weights({**module.weights, "lm_head.weight": differ["lm_head.weight"]}) if has_head else module.weights,
        embedding=differ.get("embedding.weight", module.embedding),
        soft_cap=None if has_head else module.soft_cap,
    )


def restrict_vocab(module: MtpModule, vocab: DraftVocab, quantization: QuantOptions | None = None, *, num_threads: int = 1) -> MtpModule:
    """Return the module with a draft vocabulary: it multiplies only these rows of the vocabulary matrix.

    Args:
        vocab: the rows of a range are read where they are stored; others are copied.
        quantization: of the copied rows; None, or not smaller than stored: as they are stored.
    """
    rows = take_rows(module.weights["lm_head.weight"], slice(vocab.stop) if isinstance(vocab, range) else vocab)
    stored = Weights({**module.weights, "lm_head.weight": rows})
    weights = stored
    if quantization is not None:
        lm_head_only = replace(quantization, overrides=(("lm_head.weight", quantization.bits), ("*", None)))
        weights = quantized_weights(stored, lm_head_only, None, num_threads=num_threads)
    is_copy = weights is not stored or not isinstance(vocab, range)
    return replace(module, weights=weights, draft_vocab=vocab, has_lm_head_copy=is_copy)


def open_gguf_module(path: Path) -> HeadFiles | None:
    """Open the module inside a GGUF file; None if it has none.

    Raises:
        CheckpointError: the file is damaged, or of an unsupported model.
    """
    file = open_gguf(path)
    if not num_mtp_modules(file, gguf_config(file)):
        return None
    return HeadFiles(path, {}, {}, HeadKind.MTP, split_parts(path))


def _layer_config(files: HeadFiles, target: ModelConfig) -> ModelConfig:
    """Return the sizes of the module's layer: those of the target's layers, unless its files have their own config."""
    values = files.config.get("transformer_layer_config")
    if not files.is_speculators or not isinstance(values, Mapping):
        return target
    return config_from_values(values, files.config_path, weight_type=target.weight_type)


def _single_layer_config(config: ModelConfig, *, has_norm_offset: bool) -> ModelConfig:
    """Return a network of one layer with full attention; with experts if any layer of the target has some."""
    layers = [config.layers[index] for index in config.attention_layers]
    full = next((layer for layer in layers if layer.attention.window is None), layers[0])
    mlp = next((layer.mlp for layer in config.layers if isinstance(layer.mlp, ExpertMLP)), full.mlp)
    layer = replace(full, mixer=replace(full.attention, window=None), mlp=mlp)
    return replace(config, layers=(layer,), has_norm_offset=has_norm_offset)


def _check_all_used(files: HeadFiles, layout: _ModuleLayout, used: set[str], num_layers: int) -> int:
    """Check that no tensor is unknown; return the number of modules after the first.

    Raises:
        CheckpointError: a tensor is unknown.
    """
    number = re.compile(re.escape(layout.modules) + "([0-9]{1,6})[.]")
    number_of = {name: int(found[1]) for name in files.tensors if (found := number.match(name))}
    first = num_layers if layout.modules == "layers." else 0
    later = {name for name, number in number_of.items() if number > first}
    modules = ("mtp.", "mtp_layers.", layout.prefix)

    def is_other(name: str) -> bool:
        """Return whether a tensor belongs to a later module, or to the target itself."""
        return name in later or (name.startswith("verifier_") if files.is_speculators else not name.startswith(modules))

    files.check_all_used(used, ignored=is_other)
    return len({number_of[name] for name in later})


def mtp_network(config: RecurrentHeadConfig, soft_cap: float | None = None, *, is_feature_first: bool = False) -> NetworkDefinition:
    """Compose the network: inputs `embedding` and `feature`; results `feature` [T, E] for the next pairs, `logits` [R, V].

        u = fc([embedding_norm(e), feature_norm(f)]);  o = layer(u);  logits = lm_head(final_norm(o))

    Args:
        soft_cap: the target's logit soft cap, if its vocabulary matrix is used.
        is_feature_first: `fc` takes [feature, embedding].
    """

    def compose(blocks: Blocks[Value]) -> Mapping[str, Value]:
        size = config.feature_size
        embedding = blocks.rms_norm(blocks.input(EMBEDDING, size), "embedding_norm")
        feature = blocks.rms_norm(blocks.input(FEATURE, size), "feature_norm")
        halves = (feature, embedding) if is_feature_first else (embedding, feature)
        (mixed,) = blocks.linear(blocks.concat(*halves), "fc")
        x = decoder_layer(blocks, config.layers.layers[0], mixed, 0)
        out = blocks.rms_norm(x, "final_norm")
        logits = blocks.lm_head(blocks.logits_rows(out), "lm_head")
        if soft_cap is not None:
            logits = blocks.soft_cap(logits, soft_cap)
        return {FEATURE: out if config.normed_recurrence else x, LOGITS: logits}

    return compose


def open_mtp_head(
    module: MtpModule,
    *,
    num_threads: int,
    max_model_len: int,
    backend: str = "auto",
    device: str = "cpu",
    lm_head_of: Network | None = None,
) -> RecurrentHead:
    """Load the network of a module; the arguments are those of `load_head`."""
    network = mtp_network(module.config, module.soft_cap, is_feature_first=module.is_feature_first)
    runtime = load_head(
        network,
        module.config.layers,
        module.weights,
        num_threads=num_threads,
        max_model_len=max_model_len,
        backend=backend,
        device=device,
        lm_head_of=None if module.config.has_own_lm_head or module.has_lm_head_copy else lm_head_of,
        rounds_rows=module.has_lm_head_copy,
    )
    vocab = module.draft_vocab
    first, chosen = (len(vocab), None) if isinstance(vocab, range) else (None, vocab)
    return RecurrentHead(
        module.config, runtime, runtime, module.embedding, target_ids=chosen, draft_vocab_size=first, notices=module.notices
    )


def open_mtp(files: HeadFiles, target: LoadedTarget) -> EagleStyleDrafter:
    """Open the drafter for a module of the target's own checkpoint, or for a file of the speculators library.

    Raises:
        CheckpointError, IncompatibleDrafterError: the files hold no complete module.
        ConfigError: the draft vocabulary is larger than the target's, or its corpus cannot be read.
    """
    sizes, options, num_threads = target.runtime.config, target.head_options, target.engine.num_threads
    vocab = draft_vocab(options, target.tokenizer, sizes.vocab_size)
    module = load_mtp(files, sizes, open_weights(target.directory, sizes), num_threads=num_threads)
    module = replace(module, weights=target.quantized(module.weights, files.files))
    if options.normed_recurrence is not None:
        module = replace(module, config=replace(module.config, normed_recurrence=options.normed_recurrence))
    if vocab is not None:
        module = restrict_vocab(module, vocab, target.copy_quant, num_threads=num_threads)
    shared, max_model_len = target.lm_head_of, target.max_model_len
    head = open_mtp_head(module, num_threads=num_threads, max_model_len=max_model_len, device=target.device, lm_head_of=shared)
    return EagleStyleDrafter(head, target.cache, vocab_size=target.vocab_size, tree_width=target.speculation.tree_width)


def _add_norm_offset(tensor: AnyTensor) -> Tensor:
    return Tensor(np.float32(1.0) + as_float32(tensor), WeightType.F32, tensor.shape)


def _equals_target_matrix(own: Tensor, shared: AnyTensor) -> bool:
    """Return whether a matrix of the module's file equals the target's."""
    return isinstance(shared, Tensor) and own.weight_type is shared.weight_type and np.array_equal(own.array, shared.array)
