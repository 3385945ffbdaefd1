"""MTP: the multi-token-prediction layer that some checkpoints hold guesses token after token.

Sources: DeepSeek-V3 (arXiv:2412.19437, section 2.2) and the checkpoints' reference code. A pair joins token t + 1 with the target's
feature of position t, as in EAGLE, and is drafted with in the same way; the network differs: both halves are normed, the layer is an
ordinary one of the model's family, and a norm stands in front of the vocabulary matrix. Deviations: modules behind the first one
are left out, and the first one is applied again and again.

Layouts: `mtp.*` (Qwen3-Next and later: norms hold their weights less 1, queries and gates lie in one matrix), one layer more than
config.json counts (DeepSeek-V3, GLM: copies of the embedding and of the vocabulary matrix may lie beside it), both in GGUF files
`blk.L.nextn.*`, and `mtp_layers.*`, which are MiMo's and mix [feature, embedding], or lie in a file of the speculators library. The
next feature is the normed output in all of them.
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
from paceline.drafters.frequent_ids import GuessedIds, guessed_ids
from paceline.drafters.head_experts import with_single_experts
from paceline.drafters.head_files import HeadFiles
from paceline.drafters.head_kinds import HeadKind
from paceline.drafters.pairs.config import PairConfig
from paceline.drafters.pairs.drafter import PairDrafter
from paceline.drafters.pairs.head import EMBEDDING, FEATURE, PairHead
from paceline.drafters.pairs.opening import settle
from paceline.drafters.target import LoadedTarget
from paceline.errors import CheckpointError, IncompatibleDrafterError
from paceline.models.checkpoint import is_gguf, open_weights
from paceline.models.config import ModelConfig, WeightType, config_from_values
from paceline.models.gguf.config import gguf_config
from paceline.models.gguf.file import open_gguf, split_parts
from paceline.models.gguf.weights import num_modules, open_module
from paceline.models.layers import AttentionConfig, ExpertMLP
from paceline.models.storage.quantized_cache import quantized_weights
from paceline.models.storage.tensor_file import FileTensor
from paceline.models.tensor_names import checkpoint_names, tensor_shapes
from paceline.models.weights import AnyTensor, LazyWeights, Tensor, Weights, as_float32, take_rows
from paceline.runtimes.base import Network
from paceline.runtimes.decoder import LOGITS, Blocks, Compose, Value, decoder_layer
from paceline.runtimes.load import open_head


@dataclass(frozen=True, slots=True)
class _Layout:
    """Where the parts of a module are.

    Attributes:
        prefix: of the names of its decoder layer.
        names: our name -> the file's.
        own_matrices: matrices it may bring although the target has them too.
        modules: the prefix of all modules' names, in front of their number.
        norms_less_one: its norm weights are stored less 1.
        holds_copies: its own matrices are meant to be the target's; others are used only where they guess better.
        may_be_plain: the next feature may be the output in front of the final norm, as the reference code has it.
        feature_first: the mixing matrix takes the feature in front of the embedding.
    """

    prefix: str
    names: Mapping[str, str]
    own_matrices: Mapping[str, str]
    modules: str
    norms_less_one: bool = False
    holds_copies: bool = False
    may_be_plain: bool = False
    feature_first: bool = False


_PARTS = {
    "mtp.": {"fc": "fc", "embedding_norm": "pre_fc_norm_embedding", "feature_norm": "pre_fc_norm_hidden", "final_norm": "norm"},
    "mtp_layers.0.": {
        "fc": "input_proj", "embedding_norm": "token_layernorm", "feature_norm": "hidden_layernorm", "final_norm": "final_layernorm",
    },
    "layers.": {"fc": "eh_proj", "embedding_norm": "enorm", "feature_norm": "hnorm", "final_norm": "shared_head.norm"},
}  # fmt: skip
_OWN_EMBEDDING = "mtp.embed_tokens.weight"
_GATE = "self_attn.attention_gate"
"""Name of a gate's tensor, after the layer's prefix, once it is split from the matrix of its queries."""


def _layout(files: HeadFiles, target: ModelConfig) -> _Layout:
    def named(prefix: str, parts: str) -> dict[str, str]:
        return {f"{ours}.weight": f"{prefix}{theirs}.weight" for ours, theirs in _PARTS[parts].items()}

    if any(name.startswith("mtp.") for name in files.tensors):
        has_own = _has_own_embedding(files)
        if has_own and _OWN_EMBEDDING not in files.tensors:
            raise CheckpointError(
                f"{files.path} lacks {_OWN_EMBEDDING} although its config.json sets mtp_use_dedicated_embeddings: download it again"
            )
        own = {"embedding.weight": _OWN_EMBEDDING}
        return _Layout("mtp.layers.0.", named("mtp.", "mtp."), own, "mtp.layers.", norms_less_one=True, holds_copies=not has_own)
    if any(name.startswith("mtp_layers.") for name in files.tensors):
        own = {"embedding.weight": "embed_tokens.weight", "lm_head.weight": "lm_head.weight"} if files.is_speculators else {}
        prefix = "mtp_layers.0."
        return _Layout(prefix, named(prefix, prefix), own, "mtp_layers.", feature_first=not files.is_speculators)
    prefix = f"layers.{target.num_layers}."
    if f"{prefix}eh_proj.weight" in files.tensors:
        own = {"embedding.weight": f"{prefix}embed_tokens.weight", "lm_head.weight": f"{prefix}shared_head.head.weight"}
        names = named(prefix, "layers.")
        return _Layout(prefix, names, own, "layers.", norms_less_one=target.norm_offset, holds_copies=True, may_be_plain=True)
    raise IncompatibleDrafterError(
        f"{files.path} holds no MTP module: neither mtp.* or mtp_layers.* tensors nor a layer {target.num_layers} with eh_proj.weight; "
        "use another drafter"
    )


def _has_own_embedding(files: HeadFiles) -> bool:
    """Whether a module's embedding is meant to be another than the target's."""
    text = files.config.get("text_config")
    return any(isinstance(values, Mapping) and values.get("mtp_use_dedicated_embeddings") is True for values in (files.config, text))


@dataclass(frozen=True, slots=True)
class MtpModule:
    """A loaded module.

    Attributes:
        config: sizes and switches, in the terms of heads that draft with pairs.
        weights: under the names of the network below; `lm_head.weight` is the target's where the file has none.
        embedding: embedding of the pairs' tokens.
        soft_cap: the target's logit soft cap, if its vocabulary matrix is used.
        feature_first: the mixing matrix takes the feature in front of the embedding.
        may_be_plain: the next feature may be the output in front of the final norm.
        notices: lines a user should see.
        with_copies: the same with the file's copies of the target's matrices, where these are no longer the same.
        ids: that it guesses alone, ascending: the first ones (a range), or others, [Vd]; None = all.
        is_copy: `lm_head.weight` is a copy of the rows of these ids.
    """

    config: PairConfig
    weights: Weights
    embedding: AnyTensor
    soft_cap: float | None
    feature_first: bool
    may_be_plain: bool
    notices: tuple[str, ...]
    with_copies: "MtpModule | None" = None
    ids: GuessedIds | None = None
    is_copy: bool = False


def load_mtp(files: HeadFiles, target: ModelConfig, target_weights: Weights, *, num_threads: int = 1) -> MtpModule:
    """The first module of a target's own checkpoint, or of a file of the speculators library.

    Args:
        num_threads: to convert a GGUF file's matrices with.

    Raises:
        CheckpointError: tensors are missing or of another shape, or there are some that no such module has; all of them are named.
        IncompatibleDrafterError: there is no module.
    """
    lm_head = target_weights["embedding.weight" if target.tied_embeddings else "lm_head.weight"]

    def module(layout: _Layout, layers: ModelConfig, weights: Weights, later: int) -> MtpModule:
        return MtpModule(
            PairConfig(kind=HeadKind.MTP, layers=layers, feature_size=target.hidden_size, normed_recurrence=True, own_embedding=False),
            weights,
            target_weights["embedding.weight"],
            target.logit_soft_cap,
            layout.feature_first,
            layout.may_be_plain,
            (f"{files.path}: of {later + 1} MTP modules the first one guesses at every depth",) * (later > 0),
        )

    if is_gguf(files.path):
        layers, file = _one_layer(target, norm_offset=target.norm_offset), open_gguf(files.path)
        makers = open_module(file, target, layers.layers[0], num_threads=num_threads)
        made = LazyWeights([*makers, "lm_head.weight"], lambda name: lm_head if name == "lm_head.weight" else makers[name]())
        return module(_Layout("", {}, {}, "", may_be_plain=not target.norm_offset), layers, made, num_modules(file, target) - 1)
    layout = _layout(files, target)
    layers = _one_layer(_layer_of(files, target), norm_offset=layout.norms_less_one)
    tensors, own, later = _read(files, layout, layers, target)
    shared = module(layout, layers, Weights({**tensors, "lm_head.weight": lm_head}), later)
    other = _with_own_matrices(shared, own)
    return replace(shared, with_copies=other) if layout.holds_copies else other or shared


def _read(
    files: HeadFiles, layout: _Layout, layers: ModelConfig, target: ModelConfig
) -> tuple[dict[str, AnyTensor], dict[str, Tensor], int]:
    """A module's tensors under our names, its own matrices, and how many modules follow.

    Raises:
        CheckpointError: as `load_mtp`.
    """
    size, mlp, attention = target.hidden_size, layers.layers[0].mlp, layers.attention
    if isinstance(mlp, ExpertMLP):
        files = with_single_experts(files, layout.prefix, mlp, size)
    if attention.is_gated:
        files = _with_gates(files, layout.prefix, attention, size)
    shapes = {name: shape for name, shape in tensor_shapes(layers).items() if name.startswith("layers.0.")}
    plain = checkpoint_names(layers)
    plain |= {name: name.replace("attention_gate", _GATE) for name in shapes if name.startswith("layers.0.attention_gate.")}
    names = {name: layout.prefix + plain[name].removeprefix("model.").removeprefix("layers.0.") for name in shapes} | dict(layout.names)
    shapes |= {"fc.weight": (size, 2 * size), **{name: (size,) for name in layout.names if name != "fc.weight"}}
    optional = dict.fromkeys(layout.own_matrices.values(), (target.vocab_size, size))
    files.check({names[name]: shape for name, shape in shapes.items()}, optional)
    tensors: dict[str, AnyTensor] = {name: files.weight(theirs) for name, theirs in names.items()}
    if layout.norms_less_one:
        tensors |= {name: _plus_one(tensor) for name, tensor in tensors.items() if name.endswith("norm.weight")}
    later = _check_all_used(files, layout, {*names.values(), *layout.own_matrices.values()}, target.num_layers)
    own = {name: files.weight(theirs) for name, theirs in layout.own_matrices.items() if theirs in files.tensors}
    return tensors, own, later


def _with_gates(files: HeadFiles, prefix: str, attention: AttentionConfig, hidden_size: int) -> HeadFiles:
    """The same files with each head's queries, the first half of its rows, in one matrix and its gates in another; nothing is read.

    Args:
        prefix: of the names of the head's layer.

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
        for half, part in enumerate(("self_attn.q_proj", _GATE)):
            rows = partial(_half_of, whole, half, attention.head_size)
            tensors[f"{prefix}{part}.{kind}"] = FileTensor(part_shape, whole.dtype, rows)
    return replace(files, tensors=tensors)


def _half_of(whole: FileTensor, half: int, head_size: int) -> NDArray[Any]:
    """The first or the second half of each head's rows."""
    array = whole.open()
    heads = array.reshape(-1, 2, head_size, *array.shape[1:])
    return np.ascontiguousarray(heads[:, half]).reshape(-1, *array.shape[1:])


def _with_own_matrices(module: MtpModule, own: Mapping[str, Tensor]) -> MtpModule | None:
    """The module with its own matrices in place of the target's, None where they are the same: those are in memory already."""
    given = {"embedding.weight": module.embedding, "lm_head.weight": module.weights["lm_head.weight"]}
    differ = {name: tensor for name, tensor in own.items() if not _is_same(tensor, given[name])}
    if not differ:
        return None
    has_head = "lm_head.weight" in differ
    return replace(
        module,
        config=replace(module.config, own_embedding="embedding.weight" in differ, own_lm_head=has_head),
        weights=Weights({**module.weights, "lm_head.weight": differ["lm_head.weight"]}) if has_head else module.weights,
        embedding=differ.get("embedding.weight", module.embedding),
        soft_cap=None if has_head else module.soft_cap,
    )


def with_ids(module: MtpModule, ids: GuessedIds, quantization: QuantOptions | None = None, *, num_threads: int = 1) -> MtpModule:
    """The module that guesses some ids alone: frequent ones, which the first are, where the vocabulary is in the order of its merges.

    Guesses are drawn from the distribution over these ids.

    Args:
        ids: ascending; a range begins at 0, and its rows of the vocabulary matrix are read where they lie.
        quantization: to so many bits these rows are copied; None, or where they take no more: they stay as they are stored.
    """
    rows = take_rows(module.weights["lm_head.weight"], slice(ids.stop) if isinstance(ids, range) else ids)
    stored = Weights({**module.weights, "lm_head.weight": rows})
    weights = stored
    if quantization is not None:
        others_stay = replace(quantization, overrides=(("lm_head.weight", quantization.bits), ("*", None)))
        weights = quantized_weights(stored, others_stay, None, num_threads=num_threads)
    return replace(module, weights=weights, ids=ids, is_copy=weights is not stored or not isinstance(ids, range))


def open_gguf_module(path: Path) -> HeadFiles | None:
    """The module inside a GGUF file, None where it has none.

    Raises:
        CheckpointError: the file is damaged, or not one of a model we run.
    """
    file = open_gguf(path)
    if not num_modules(file, gguf_config(file)):
        return None
    return HeadFiles(path, {}, {}, HeadKind.MTP, split_parts(path))


def _layer_of(files: HeadFiles, target: ModelConfig) -> ModelConfig:
    """Sizes of the module's layer: those of a target layer, unless its files have their own config."""
    values = files.config.get("transformer_layer_config")
    if not files.is_speculators or not isinstance(values, Mapping):
        return target
    path = files.path / "config.json" if files.path.is_dir() else files.path.with_name("config.json")
    return config_from_values(values, path, weight_type=target.weight_type)


def _one_layer(config: ModelConfig, *, norm_offset: bool) -> ModelConfig:
    """A network of one layer with attention to the whole text; with experts, if any layer of the target has some."""
    layers = [config.layers[index] for index in config.attentions]
    full = next((layer for layer in layers if layer.attention.window is None), layers[0])
    mlp = next((layer.mlp for layer in config.layers if isinstance(layer.mlp, ExpertMLP)), full.mlp)
    layer = replace(full, mixer=replace(full.attention, window=None), mlp=mlp)
    return replace(config, layers=(layer,), norm_offset=norm_offset)


def _check_all_used(files: HeadFiles, layout: _Layout, used: set[str], num_layers: int) -> int:
    """Refuse a module with unknown tensors; returns how many modules follow the first.

    Raises:
        CheckpointError: there are some.
    """
    number = re.compile(re.escape(layout.modules) + "([0-9]{1,6})[.]")
    number_of = {name: int(found[1]) for name in files.tensors if (found := number.match(name))}
    first = num_layers if layout.modules == "layers." else 0
    later = {name for name, number in number_of.items() if number > first}
    modules = ("mtp.", "mtp_layers.", layout.prefix)

    def is_other(name: str) -> bool:
        """Whether it is of a later module, or of the target: what its checkpoint holds, or what a trainer kept of it."""
        return name in later or (name.startswith("verifier_") if files.is_speculators else not name.startswith(modules))

    files.check_all_used(used, ignored=is_other)
    return len({number_of[name] for name in later})


def mtp_pairs(config: PairConfig, soft_cap: float | None = None, *, feature_first: bool = False) -> Compose:
    """The network: inputs `embedding` and `feature`; results `feature` [T, E] for the pairs behind these, `logits` [R, V].

        u = fc([embedding_norm(e), feature_norm(f)]);  o = layer(u);  logits = lm_head(final_norm(o))

    Args:
        soft_cap: the target's logit soft cap, if its matrix is used.
        feature_first: `fc` takes the two the other way round.
    """

    def compose(blocks: Blocks[Value]) -> Mapping[str, Value]:
        size = config.feature_size
        embedding = blocks.rms_norm(blocks.input(EMBEDDING, size), "embedding_norm")
        feature = blocks.rms_norm(blocks.input(FEATURE, size), "feature_norm")
        halves = (feature, embedding) if feature_first else (embedding, feature)
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
) -> PairHead:
    """The network of a module, ready to run; the arguments are those of `open_head`."""
    network = mtp_pairs(module.config, module.soft_cap, feature_first=module.feature_first)
    runtime = open_head(
        network,
        module.config.layers,
        module.weights,
        num_threads=num_threads,
        max_model_len=max_model_len,
        backend=backend,
        device=device,
        lm_head_of=None if module.config.own_lm_head or module.is_copy else lm_head_of,
        rounds_rows=module.is_copy,
    )
    first, chosen = (len(module.ids), None) if isinstance(module.ids, range) else (None, module.ids)
    return PairHead(module.config, runtime, runtime, module.embedding, target_ids=chosen, num_ids=first, notices=module.notices)


def candidates(module: MtpModule) -> tuple[PairConfig, ...]:
    """Every way in which a module may be meant; what all reference code agrees on by now, or the files say, comes first.

    With one layer more than config.json counts, vLLM's code once took the feature in front of the final norm; and the copies of the
    target's matrices that lie there, which transformers ignores, may have become others than these.
    """
    own = () if module.with_copies is None else (module.with_copies.config,)
    recurrences = (True, False) if module.may_be_plain else (True,)
    return tuple(replace(config, normed_recurrence=normed) for config in (module.config, *own) for normed in recurrences)


def open_mtp(files: HeadFiles, target: LoadedTarget) -> PairDrafter:
    """The drafter for the files of a module: those of the target's own checkpoint, or a file of the speculators library.

    Raises:
        CheckpointError, IncompatibleDrafterError: the files hold no complete module.
        ConfigError: it is to guess more ids than there are, or those of a text that cannot be read.
    """
    sizes = target.runtime.config
    ids = guessed_ids(target.head_options, target.tokenizer, sizes.vocab_size)
    module = load_mtp(files, sizes, open_weights(target.directory, sizes), num_threads=target.engine.num_threads)
    modules = [replace(one, weights=target.quantized(one.weights, files.files)) for one in (module, module.with_copies) if one is not None]

    def opened(config: PairConfig, max_model_len: int, ids: GuessedIds | None = None) -> PairHead:
        own = config.own_embedding, config.own_lm_head
        one = next(one for one in modules if (one.config.own_embedding, one.config.own_lm_head) == own)
        one, num_threads = replace(one, config=config), target.engine.num_threads
        if ids is not None:
            one = with_ids(one, ids, target.copy_quant, num_threads=num_threads)
        shared = target.lm_head_of
        return open_mtp_head(one, num_threads=num_threads, max_model_len=max_model_len, device=target.device, lm_head_of=shared)

    named = target.head_options.variant_for(files.kind)
    if named is None:
        admitted = candidates(module)
    else:
        flag = module.config.normed_recurrence if named.normed_recurrence is None else named.normed_recurrence
        admitted = (replace(module.config, normed_recurrence=flag),)
    config, notices = settle(files, admitted, opened, target, target.vocab_size)
    head = opened(config, target.max_model_len, ids)
    return PairDrafter(head, target.cache, vocab_size=target.vocab_size, tree_width=target.speculation.tree_width, notices=notices)


def _plus_one(tensor: AnyTensor) -> Tensor:
    return Tensor(np.float32(1.0) + as_float32(tensor), WeightType.F32, tensor.shape)


def _is_same(own: Tensor, shared: AnyTensor) -> bool:
    """Whether a file's matrix is the target's."""
    return isinstance(shared, Tensor) and own.weight_type is shared.weight_type and np.array_equal(own.array, shared.array)
