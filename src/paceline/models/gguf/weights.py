"""The weights of a GGUF file, by the network's internal tensor names."""

import math
import re
from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.errors import CheckpointError, name_list, shortened
from paceline.models.config import FLOAT_TYPES, ModelConfig
from paceline.models.families.table import FAMILIES
from paceline.models.gguf.blocks import StoredBlocks, convert_to_grouped_matrix
from paceline.models.gguf.config import ROPE_TENSORS, gguf_format
from paceline.models.gguf.fields import MTP_TENSOR_NAME
from paceline.models.gguf.file import GgufFile
from paceline.models.gguf.header import BLOCK_TYPES, GgufTensor
from paceline.models.gguf.stored_tensor import (
    StoredIndexFunction,
    TensorSource,
    check_stored_shape,
    order_digest_bytes,
    read_tensor,
    stored_blocks,
    stored_rows,
    tensor_info,
)  # fmt: skip
from paceline.models.gguf.tensor_locations import tensor_locations
from paceline.models.layers import XIELU_PARAMETERS, AttentionConfig, ExpertMLP, LayerConfig, Recurrent
from paceline.models.storage.mapped_files import drop_pages
from paceline.models.tensor_names import tensor_shapes
from paceline.models.weights import AnyTensor, LazyWeights, TensorInfo, half_split_order, shares_kv

_GGUF_MODULE_NAMES = {
    "embedding": "token_embd",
    "final_norm": "output_norm",
    "lm_head": "output",
    "attention_norm": "attn_norm",
    "attention_output_norm": "post_attention_norm",
    "mlp_norm": "ffn_norm",
    "mlp_output_norm": "post_ffw_norm",
    "q_proj": "attn_q",
    "k_proj": "attn_k",
    "v_proj": "attn_v",
    "o_proj": "attn_output",
    "q_a_proj": "attn_q_a",
    "q_a_norm": "attn_q_a_norm",
    "kv_a_norm": "attn_kv_a_norm",
    "q_norm": "attn_q_norm",
    "k_norm": "attn_k_norm",
    "gate_proj": "ffn_gate",
    "up_proj": "ffn_up",
    "down_proj": "ffn_down",
    "router": "ffn_gate_inp",
    "experts_norm": "pre_ffw_norm_2",
    "experts_output_norm": "post_ffw_norm_2",
    "shared_output_norm": "post_ffw_norm_1",
    "shared_gate": "ffn_gate_inp_shexp",
    "latent_proj": "ffn_latent_down",
    "latent_output": "ffn_latent_up",
    "layer_embedding": "per_layer_token_embd",
    "layer_inputs_proj": "per_layer_model_proj",
    "layer_inputs_norm": "per_layer_proj_norm",
    "input_gate": "inp_gate",
    "input_proj": "proj",
    "input_norm": "post_norm",
    "output_scale": "layer_output_scale",
    "altup_proj": "altup_proj",
    "altup_unembed_proj": "altup_unembd_proj",
    "altup_router_norm": "altup_router_norm",
    "altup_router": "altup_router",
    "altup_predict": "altup_predict_coef",
    "altup_correct": "altup_correct_coef",
    "altup_output_scale": "altup_correct_scale",
    "laurel_left": "laurel_l",
    "laurel_right": "laurel_r",
    "laurel_norm": "laurel_post_norm",
}
"""GGUF names of modules, by internal name. `GgufFormat.module_names` has a family's exceptions."""
_GGUF_TENSOR_NAMES = {
    "router.correction": "exp_probs_b.bias",
    "router.scales": "ffn_down_exps.scale",
    "router_norm.weight": "ffn_gate_inp.scale",
    "attention.sinks": "attn_sinks.weight",
}
_GGUF_MTP_MODULE_NAMES = {
    "fc.weight": "eh_proj",
    "embedding_norm.weight": "enorm",
    "feature_norm.weight": "hnorm",
    "final_norm.weight": "shared_head_norm",
}
"""GGUF names of the tensors that a module for multi-token prediction (MTP) has in addition to its layer, by internal name."""
_XIELU_SUFFIXES = tuple(f".activation.{part}" for part in XIELU_PARAMETERS)
_F32_TYPE = next(block_type for block_type in BLOCK_TYPES.values() if block_type.name == "F32")
_COPIED_MTP_MODULES = ("embed_tokens", "shared_head_head")  # copies of the embedding and lm_head
_KV_TENSOR_NAMES = ("attn_k.weight", "attn_v.weight", "attn_k_norm.weight")


@dataclass(frozen=True, slots=True)
class ExtraTensors:
    """Tensors in a drafting head's GGUF file that are in addition to those implied by the head's `ModelConfig`.

    Attributes:
        names_and_shapes: name in the file and shape of each tensor, by internal name. These names take precedence over the usual names.
        names_read_by_caller: names of further tensors in the file, which the caller reads itself.
        head_kind: kind of head, for errors.
    """

    names_and_shapes: Mapping[str, tuple[str, tuple[int, ...]]]
    names_read_by_caller: Container[str]
    head_kind: str


class GgufWeights(LazyWeights):
    """The weights in a GGUF file. A quantised matrix is converted to a `GroupedMatrix` on first use.

    Args:
        extra_tensors: tensors that the network has in addition to those of `config`; None = it has no others.
        regroup: requantise matrices to groups of 128 columns with one scale each, which is faster but changes values.
        num_threads: number of threads that convert matrices.
    """

    def __init__(
        self, file: GgufFile, config: ModelConfig, *, extra_tensors: ExtraTensors | None = None, regroup: bool = False, num_threads: int = 1
    ) -> None:
        """Find every tensor of the network.

        Raises:
            CheckpointError: A tensor is missing or unknown, or its shape or type is not supported.
        """
        self._sources = sources = _find_network_sources(file, config, extra_tensors)
        self._regroup = regroup
        super().__init__(sources, lambda name: read_tensor(name, sources[name], regroup=regroup, num_threads=num_threads))
        self.bundled_head = "mtp" if num_mtp_modules(file, config) else None

    def read_rows(self, name: str, row_indices: NDArray[np.int32]) -> NDArray[np.float32]:
        source = self._sources[name]
        if source.tensor.block_type.name in FLOAT_TYPES:
            return super().read_rows(name, row_indices)
        return convert_to_grouped_matrix(stored_rows(source)[row_indices], source.tensor.block_type, str(source.tensor)).values()

    def tensor_info(self, name: str) -> TensorInfo:
        return tensor_info(self._sources[name], regroup=self._regroup)

    def free_tensor(self, name: str) -> None:
        super().free_tensor(name)
        drop_pages([stored_rows(self._sources[name])])

    def stored_blocks(self, name: str) -> StoredBlocks | None:
        return None if self._regroup else stored_blocks(self._sources[name])

    def source_arrays(self, name: str) -> tuple[NDArray[Any], ...]:
        """Return the arrays in the GGUF file, and all settings, from which a tensor is computed."""
        if self._regroup:
            return super().source_arrays(name)
        source = self._sources[name]
        return stored_rows(source), order_digest_bytes(source)


def num_mtp_modules(file: GgufFile, config: ModelConfig) -> int:
    """Return the number of modules for multi-token prediction (MTP) after the last layer."""
    return sum(_is_mtp_tensor(name, file, config) and name.endswith(f".{MTP_TENSOR_NAME}") for name in file.tensors)


def open_mtp_module(file: GgufFile, config: ModelConfig, layer: LayerConfig, *, num_threads: int = 1) -> dict[str, Callable[[], AnyTensor]]:
    """Return for each tensor of the first MTP module, by internal name, a function that reads it.

    The layer is named `layers.0`. Copies of the embedding and lm_head are not read: converters round them once more than the originals.

    Args:
        layer: settings of the module's layer.
        num_threads: number of threads that convert matrices.

    Raises:
        CheckpointError: A tensor is missing or unknown, or its shape or type is not supported.
    """
    number, size = config.num_layers, config.hidden_size
    with_module, prefix = replace(config, layers=(*config.layers, layer)), f"layers.{config.num_layers}."
    layer_shapes = {name: shape for name, shape in tensor_shapes(with_module).items() if name.startswith(prefix)}
    parts = {name: f"blk.{number}.nextn.{part}.weight" for name, part in _GGUF_MTP_MODULE_NAMES.items()}
    if config.has_norm_offset and parts["final_norm.weight"] not in file.tensors:  # Qwen's MTP modules without a final norm use the model's
        parts["final_norm.weight"] = "output_norm.weight"
    shapes = {name: (size, 2 * size) if name == "fc.weight" else (size,) for name in parts}
    names_and_shapes = {name: (name_in_file, shapes[name]) for name, name_in_file in parts.items()}
    sources, missing = _find_sources(file, with_module, layer_shapes, names_and_shapes)
    if missing:
        raise CheckpointError(f"{file.path}: the module in block {number} lacks {name_list(missing)}; download the file again")
    known = {source.tensor.name for source in sources.values()} | {f"blk.{number}.nextn.{copy}.weight" for copy in _COPIED_MTP_MODULES}
    unknown = [name for name in file.tensors if name.startswith(f"blk.{number}.") and name not in known]
    if unknown:
        raise CheckpointError(f"{file.path} holds {name_list(unknown)} that no known mtp head has: it may compute something else with them")
    return {
        name.replace(prefix, "layers.0.", 1): partial(read_tensor, name, source, regroup=False, num_threads=num_threads)
        for name, source in sources.items()
    }


def _find_network_sources(file: GgufFile, config: ModelConfig, extra_tensors: ExtraTensors | None) -> dict[str, TensorSource]:
    names_and_shapes = {} if extra_tensors is None else extra_tensors.names_and_shapes
    shapes = {name: shape for name, shape in tensor_shapes(config).items() if name not in names_and_shapes}
    sources, missing = _find_sources(file, config, shapes, names_and_shapes)
    if missing:
        raise CheckpointError(f"{file.path} lacks {name_list(missing)} that its metadata requires; download the file again")
    known = {source.tensor.name for source in sources.values()} | set(ROPE_TENSORS)
    others = () if extra_tensors is None else extra_tensors.names_read_by_caller
    unknown = [name for name in file.tensors if name not in known and name not in others and not _is_unused(name, file, config)]
    if unknown:
        reason = f"a {config.family} model does not have; running without them would give other tokens"
        if extra_tensors is not None:
            reason = f"no {extra_tensors.head_kind} has: it may compute something else with them; use another drafter"
        raise CheckpointError(f"{file.path} holds {name_list(unknown)} that {reason}")
    return sources


def _find_sources(
    file: GgufFile, config: ModelConfig, shapes: Mapping[str, tuple[int, ...]], names_and_shapes: Mapping[str, tuple[str, tuple[int, ...]]]
) -> tuple[dict[str, TensorSource], list[str]]:
    """Return where each tensor is stored, and the GGUF names of tensors that the file lacks.

    Args:
        shapes: shapes of the tensors with usual GGUF names, by internal name.
        names_and_shapes: names in the file and shapes of the other tensors, by internal name.
    """
    gguf = gguf_format(FAMILIES[config.family])
    modules = {**_GGUF_MODULE_NAMES, **gguf.module_names}
    sources: dict[str, TensorSource] = {}
    missing: list[str] = []
    locations = tensor_locations(file, config)
    for name, shape in shapes.items():
        if name.endswith(_XIELU_SUFFIXES):
            sources[name] = _xielu_parameter(file, name, config)
            continue
        location = locations.get(name)
        name_in_file, stack_index = _gguf_name(name, modules, file) if location is None else (location.name, None)
        if name_in_file not in file.tensors and name_in_file.removesuffix(".weight") in file.tensors:
            name_in_file = name_in_file.removesuffix(".weight")  # Falcon-H1 files have this name without the suffix
        if name_in_file not in file.tensors:
            missing.append(name_in_file)
        elif location is not None:
            sources[name] = location.to_source(file.tensors[name_in_file], shape)
        else:
            layer = config.layers[int(name.split(".")[1])] if name.startswith("layers.") else None
            row_order = None
            if gguf.has_interleaved_rope and layer is not None:
                row_order = _half_split_row_order(layer.mixer, name.split(".")[-2], shape[0])
            sources[name] = TensorSource(file.tensors[name_in_file], shape, stack_index, row_order=row_order)
            check_stored_shape(sources[name], (*_stack_dimension(stack_index, layer, config), *shape))
    for name, (name_in_file, shape) in names_and_shapes.items():
        if name_in_file in file.tensors:
            sources[name] = TensorSource(file.tensors[name_in_file], shape)
            check_stored_shape(sources[name], shape)
        else:
            missing.append(name_in_file)
    return sources, list(dict.fromkeys(missing))


def _stack_dimension(index: int | None, layer: LayerConfig | None, config: ModelConfig) -> tuple[int, ...]:
    """Return (number of stacked matrices,) of the tensor whose slice `index` is a matrix; () if the matrix is a tensor of its own."""
    if index is None:
        return ()
    if layer is None:
        return () if config.altup is None else (config.altup.num_streams - 1,)
    return (layer.mlp.routing.num_experts,) if isinstance(layer.mlp, ExpertMLP) else ()


def _xielu_parameter(file: GgufFile, name: str, config: ModelConfig) -> TensorSource:
    """Return a parameter of xIELU from the metadata, which hold one number for all layers or a list with a number for each layer."""
    _, layer, _, part = name.split(".")
    key = f"xielu.{part}"
    given = file.metadata.get(key)
    values = given if isinstance(given, list) else [given] * config.num_layers
    if len(values) != config.num_layers or not all(isinstance(value, float) and math.isfinite(value) for value in values):
        raise CheckpointError(f"{file.path}: {key} = {shortened(given)}, expected a number for each of {config.num_layers} layers")
    data = np.array([values[int(layer)]], "<f4").view(np.uint8)
    return TensorSource(GgufTensor(file.path, key, _F32_TYPE, (1,), data), (1,))


def _gguf_name(name: str, modules: Mapping[str, str], file: GgufFile) -> tuple[str, int | None]:
    """Return the GGUF name of a network's tensor, and its index if the stored tensor stacks matrices of experts or of AltUp streams."""
    if not name.startswith("layers."):
        part, *index, kind = name.split(".")
        return f"{modules[part]}.{kind}", int(index[0]) if index else None
    _, layer, rest = name.split(".", 2)
    if rest in _GGUF_TENSOR_NAMES:
        return f"blk.{layer}.{_GGUF_TENSOR_NAMES[rest]}", None
    *path, part, kind = rest.split(".")
    if not path:
        return f"blk.{layer}.{modules[part]}.{kind}", None
    if path == ["shared_expert"]:
        return f"blk.{layer}.{modules[part]}{modules.get('shared_expert', '_shexp')}.{kind}", None
    separate = f"blk.{layer}.{modules[part]}.{path[1]}.{kind}"  # old files have a separate tensor for each expert
    return (separate, None) if separate in file.tensors else (f"blk.{layer}.{modules[part]}_exps.{kind}", int(path[1]))


def _is_unused(name: str, file: GgufFile, config: ModelConfig) -> bool:
    """Return whether a tensor is unused: of an MTP module, ignored in this format, or for keys or values taken from another layer."""
    if _is_mtp_tensor(name, file, config):
        return True
    found = re.fullmatch(r"blk\.(\d{1,9})\.(.*)", name)
    if found is None or int(found[1]) >= config.num_layers:
        return False
    is_ignored = found[2] in gguf_format(FAMILIES[config.family]).ignored_tensors
    return is_ignored or (found[2] in _KV_TENSOR_NAMES and shares_kv(config, int(found[1])))


def _is_mtp_tensor(name: str, file: GgufFile, config: ModelConfig) -> bool:
    """Return whether a tensor belongs to an MTP module: a block that follows the last layer and has an `eh_proj`."""
    found = re.match(r"blk\.(\d{1,9})\.", name)
    return found is not None and int(found[1]) >= config.num_layers and f"{found[0]}{MTP_TENSOR_NAME}" in file.tensors


def _half_split_row_order(mixer: AttentionConfig | Recurrent | None, part: str, num_rows: int) -> StoredIndexFunction | None:
    """Return the order that converts rows of q or k from interleaved to half-split rotary embeddings; None for other modules."""
    if part not in ("q_proj", "k_proj") or not isinstance(mixer, AttentionConfig):
        return None
    return partial(half_split_order, num_rows, mixer.head_size, mixer.rope.rotary_size(mixer.head_size))
