"""Read X-LoRA adapters in PEFT's format: a directory with settings, a classifier, and the LoRA adapters that the classifier weighs.

Source: PEFT 0.21, `XLoraConfig`, `XLoraModel`, `XLoraClassifier` and `XLoraLinearLayer`.
"""

import hashlib
import re
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.errors import CheckpointError, name_list, shortened
from paceline.models.adapters.adapter import Adapter, LowRankUpdate, XLoraMixture
from paceline.models.adapters.adapter_file import ADAPTER_FILES, adapter_files, as_float32
from paceline.models.adapters.modules import EMBEDDING, LM_HEAD
from paceline.models.adapters.read import MAX_ADAPTER_COPIES, check_adapter_name, read_adapter
from paceline.models.adapters.settings import CONFIG_FILE, read_settings
from paceline.models.config import ModelConfig
from paceline.models.families.table import FAMILIES
from paceline.models.json_fields import JsonFields
from paceline.models.storage.tensor_file import FileTensor, read_tensors
from paceline.models.weights import Weights
from paceline.small_files import is_file, read_json

_CLASSIFIER_TENSOR_PATTERN = re.compile(r"(?:base_model\.)?(?:model\.)?internal_xlora_classifier\.layers\.(\d{1,4})\.(weight|bias)")
_SCALED_MATRIX_ORDER = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
"""Order of a layer's matrices in the classifier's output if every matrix has its own scalings."""
_LAYER_MATRIX_NAME_PATTERN = re.compile(r"layers\.(\d+)\.[a-z_]+\.([a-z_]+)")
Floats = NDArray[np.float32]
_MAX_CLASSIFIER_DEPTH, _MAX_CLASSIFIER_WIDTH, _MAX_ADAPTERS = 64, 2**20, 256
_MIN_TEMPERATURE = 2.0**-126
"""The smallest normal float32 number, because scalings are computed in float32."""
_SUPPORTED_KEYS = (
    "peft_type", "hidden_size", "adapters", "enable_softmax", "enable_softmax_topk", "layerwise_scalings", "xlora_depth", "xlora_size",
    "xlora_dropout_p", "softmax_temperature", "top_k_lora", "scaling_pass_value", "global_scaling_weight", "use_bias",
)  # fmt: skip
_IGNORED_KEYS = (
    "auto_mapping", "base_model_name_or_path", "base_model_class", "parent_library", "revision", "task_type", "inference_mode",
    "peft_version", "use_trainable_adapters",
)  # fmt: skip


def is_xlora(directory: Path) -> bool:
    """Return whether a directory holds an X-LoRA adapter.

    Raises:
        CheckpointError: The adapter_config.json in it cannot be read.
    """
    values = read_json(directory / CONFIG_FILE)
    return values is not None and values.get("peft_type") == "XLORA"


def _read_settings(directory: Path) -> JsonFields:
    """Return the fields of an X-LoRA adapter's adapter_config.json, and refuse unsupported settings."""
    fields = JsonFields(read_json(directory / CONFIG_FILE) or {}, directory / CONFIG_FILE)
    unknown = [name for name, value in fields.values.items() if value and name not in (*_SUPPORTED_KEYS, *_IGNORED_KEYS)]
    if unknown:
        raise CheckpointError(
            f"{fields.path}: {', '.join(map(shortened, unknown[:20]))} are set, which no known X-LoRA adapter has: they may change the "
            "result; remove those that do not"
        )
    if not fields.flag("use_bias", default=True):
        raise CheckpointError(f"{fields.path}: use_bias is false, and PEFT's classifier has biases: save the adapter again with PEFT 0.21")
    return fields


def _read_mixture_settings(fields: JsonFields, num_adapters: int) -> dict[str, Any]:
    """Return the arguments of `XLoraMixture` that the settings contain."""
    top_k = None if fields.values.get("top_k_lora") is None else fields.integer("top_k_lora", maximum=num_adapters)
    has_softmax = fields.flag("enable_softmax_topk", default=False)
    return {
        "temperature": _read_temperature(fields) if fields.flag("enable_softmax", default=True) else None,
        "top_k": top_k,
        "has_softmax_of_top_k": has_softmax,
        "scaling_pass_value": _read_scaling_pass_value(fields, num_adapters, top_k, has_softmax_of_top_k=has_softmax),
    }


def _read_adapter_paths(fields: JsonFields) -> tuple[str, ...]:
    """Return the directory of each adapter. The names must be "0", "1", …, because PEFT uses names and numbers interchangeably."""
    found = fields.values.get("adapters")
    if not isinstance(found, Mapping) or not found or len(found) > _MAX_ADAPTERS or not all(isinstance(one, str) for one in found.values()):
        raise CheckpointError(
            f"{fields.path}: adapters = {shortened(found)}, expected an object of 1 to {_MAX_ADAPTERS} names with a directory each"
        )
    if list(found) != [str(number) for number in range(len(found))]:
        raise CheckpointError(
            f"{fields.path}: adapters are named {', '.join(map(shortened, list(found)[:20]))}, and PEFT finds only adapters that are named "
            f'by their numbers: name them "0" to "{len(found) - 1}", in the order of the classifier\'s outputs'
        )
    return tuple(found.values())


def _read_temperature(fields: JsonFields) -> float:
    temperature = fields.number("softmax_temperature", 1.0)
    if temperature < _MIN_TEMPERATURE:
        raise CheckpointError(f"{fields.path}: softmax_temperature = {temperature:g}, expected a number of at least {_MIN_TEMPERATURE:.3g}")
    return temperature


def _read_scaling_pass_value(fields: JsonFields, num_adapters: int, top_k: int | None, *, has_softmax_of_top_k: bool) -> float:
    """Return the value that all scalings have in the scaling pass. PEFT applies top-k and its softmax to `scaling_pass_value` as well."""
    if "scaling_pass_value" in fields.values and fields.values["scaling_pass_value"] is None:
        raise CheckpointError(
            f"{fields.path}: scaling_pass_value is null, which PEFT cannot compute with: set a number, such as {1 / num_adapters:g} "
            "(1 / number of adapters) or 0"
        )
    value = fields.number("scaling_pass_value", 0.0)
    if value == 0.0:
        return 0.0
    if top_k is not None and top_k < num_adapters:
        raise CheckpointError(
            f"{fields.path}: scaling_pass_value = {value:g} with top_k_lora = {top_k} of {num_adapters}: all scalings of that pass are "
            "equal, so the largest are not defined; set scaling_pass_value to 0 or top_k_lora to null, as in the training"
        )
    return 1.0 / num_adapters if has_softmax_of_top_k else value


def read_any_adapter(
    directory: Path, *, name: str, config: ModelConfig, weights: Weights | None = None, memory_bytes: int | None = None
) -> Adapter:
    """Read the adapter in a directory, LoRA or X-LoRA. Arguments and errors as in `read_adapter`."""
    read = read_xlora if is_xlora(directory) else read_adapter
    return read(directory, name=name, config=config, weights=weights, memory_bytes=memory_bytes)


def read_xlora(
    directory: Path, *, name: str, config: ModelConfig, weights: Weights | None = None, memory_bytes: int | None = None
) -> Adapter:
    """Read the X-LoRA adapter in a directory. Arguments and errors as in `read_adapter`.

    Its LoRA adapters are in the directories that the settings name, or else in numbered subdirectories of `directory`.
    """
    check_adapter_name(name)
    fields = _read_settings(directory)
    if (hidden_size := fields.integer("hidden_size", 4096)) != config.hidden_size:
        raise CheckpointError(
            f"{fields.path}: hidden_size = {hidden_size}, the model's is {config.hidden_size}: use the adapter with the model "
            "it was made for"
        )
    paths = _read_adapter_paths(fields)
    settings, has_layerwise_scalings = _read_mixture_settings(fields, len(paths)), fields.flag("layerwise_scalings", default=False)
    global_weight, (index_step, widths) = fields.number("global_scaling_weight", 1.0), _read_classifier_layers(fields)
    adapters = []
    for number, path in enumerate(paths):
        adapter_directory = _find_adapter_directory(directory, number, path)
        adapter = read_adapter(adapter_directory, name=f"{name} {number}", config=config, weights=weights, memory_bytes=memory_bytes)
        _check_xlora_support(adapter_directory, adapter)
        adapters.append(adapter)
        if memory_bytes is not None:
            size = sum(update.lora_a.nbytes + update.lora_b.nbytes for update in adapter.low_rank_updates.values())
            memory_bytes = max(0, memory_bytes - MAX_ADAPTER_COPIES * size)
    matrices = dict.fromkeys(matrix for adapter in adapters for matrix in adapter.low_rank_updates)
    order = _scaling_order(fields.path, config, list(matrices)) if has_layerwise_scalings else dict.fromkeys(matrices, 0)
    num_scaled_matrices = len(order) if has_layerwise_scalings else 1
    mixture = XLoraMixture(
        num_adapters=len(adapters),
        num_scaled_matrices=num_scaled_matrices,
        classifier=_read_classifier(directory, fields.path, len(adapters), index_step, [*widths, num_scaled_matrices * len(adapters)]),
        scaling_indices={matrix: _scaling_indices(adapters, matrix, order[matrix]) for matrix in matrices},
        **settings,
    )
    updates = {matrix: _concatenate_updates(adapters, matrix, global_weight, fields.path) for matrix in matrices}
    return Adapter(name, _adapter_digest(global_weight, adapters, mixture), updates, {}, {}, mixture)


def _find_adapter_directory(directory: Path, number: int, path: str) -> Path:
    """Return the directory of an adapter: `path` from the settings if it holds an adapter, else the numbered directory."""
    for candidate in (*([directory / path] if path else []), directory / str(number)):
        if is_file(candidate / CONFIG_FILE):
            return candidate
    raise CheckpointError(
        f"{directory} is an X-LoRA adapter of several LoRA adapters, and number {number} ({shortened(path)}) is missing: put its "
        f"directory there as {directory / str(number)}"
    )


def _check_xlora_support(directory: Path, adapter: Adapter) -> None:
    """Refuse an adapter with biases or replaced matrices, which X-LoRA does not scale, or with matrices for which X-LoRA is unsupported."""
    unscaled = [f"the bias of {name}" for name in adapter.biases] + [f"the whole of {name}" for name in adapter.replacements]
    if unscaled:
        raise CheckpointError(
            f"{directory} changes {name_list(unscaled, 'part')}, which X-LoRA does not scale: use an adapter with only low-rank updates"
        )
    unsupported = [name for name in adapter.low_rank_updates if name in (EMBEDDING, LM_HEAD) or ".experts." in name]
    if unsupported or read_settings(directory).target_parameters:
        raise CheckpointError(
            f"{directory} changes {name_list(unsupported, 'product') if unsupported else 'parameters (target_parameters)'}, for which "
            "X-LoRA is not supported, only for attention and dense MLPs; use an adapter of these"
        )


def _scaling_order(path: Path, config: ModelConfig, matrices: Sequence[str]) -> dict[str, int]:
    """Return each adapted matrix's index in the classifier's output: matrices are sorted by layer, then by `_SCALED_MATRIX_ORDER`."""
    positions = {}
    for name in matrices:
        found = _LAYER_MATRIX_NAME_PATTERN.fullmatch(name)
        if found is None or found[2] not in _SCALED_MATRIX_ORDER or FAMILIES[config.family].has_fused_projections:
            raise CheckpointError(
                f"{path}: layerwise_scalings with {name} in a {config.family} model: the order of scalings is only known for "
                f"{', '.join(_SCALED_MATRIX_ORDER)} as separate matrices; train with layerwise_scalings=False, or adapt only these"
            )
        positions[name] = int(found[1]), _SCALED_MATRIX_ORDER.index(found[2])
    return {name: index for index, name in enumerate(sorted(positions, key=lambda name: positions[name]))}


def _scaling_indices(adapters: Sequence[Adapter], matrix: str, matrix_index: int) -> NDArray[np.int32]:
    """Return for each row of the concatenated lora_A the index, in the classifier's output, of the scaling of the row's adapter."""
    ranks = [len(adapter.low_rank_updates[matrix].lora_a) if matrix in adapter.low_rank_updates else 0 for adapter in adapters]
    return np.repeat(np.arange(len(adapters), dtype=np.int32) + np.int32(matrix_index * len(adapters)), ranks)


def _concatenate_updates(adapters: Sequence[Adapter], matrix: str, global_weight: float, path: Path) -> LowRankUpdate:
    """Return the low-rank updates that all adapters have for a matrix, concatenated along the rank and multiplied by `global_weight`."""
    updates = [adapter.low_rank_updates[matrix] for adapter in adapters if matrix in adapter.low_rank_updates]
    with np.errstate(over="ignore", invalid="ignore"):
        lora_b = np.concatenate([update.lora_b for update in updates], axis=1) * np.float32(global_weight)
    if not np.isfinite(lora_b).all():
        raise CheckpointError(
            f"{path}: with global_scaling_weight = {global_weight:g}, values of {matrix} exceed float32: use another adapter"
        )
    return LowRankUpdate(np.concatenate([update.lora_a for update in updates]), lora_b)


def _read_classifier_layers(fields: JsonFields) -> tuple[int, list[int]]:
    """Return the increase of the index in tensor names from one linear layer of the classifier to the next, and each layer's input size."""
    index_step = 3 if fields.number("xlora_dropout_p", 0.2) > 0.0 else 2  # ReLU and dropout also have an index each
    depth = fields.integer("xlora_depth", 1, maximum=_MAX_CLASSIFIER_DEPTH)
    width = fields.integer("xlora_size", 2048, maximum=_MAX_CLASSIFIER_WIDTH)
    return index_step, [fields.integer("hidden_size", 4096), *[width] * (depth - 1)]


def _read_classifier(
    directory: Path, settings_path: Path, num_adapters: int, index_step: int, widths: Sequence[int]
) -> tuple[tuple[Floats, Floats], ...]:
    """Return weight and bias of each linear layer. `widths`: the input size of each layer, then the output size of the last one."""
    path = next(iter(adapter_files(directory)), None)
    if path is None:
        raise CheckpointError(f"{directory} holds neither {' nor '.join(ADAPTER_FILES)}, where X-LoRA's classifier is: download it again")
    tensors: dict[tuple[int, str], tuple[str, FileTensor]] = {}
    for name, tensor in read_tensors(path, "adapter").items():
        found = _CLASSIFIER_TENSOR_PATTERN.fullmatch(name)
        if found is None:
            raise CheckpointError(
                f"{path} holds {name_list([name])} that no X-LoRA classifier has: the adapter may compute something else with it"
            )
        if (key := (int(found[1]), found[2])) in tensors:
            raise CheckpointError(f"{path} holds {name} and {tensors[key][0]}, which are the same tensor: export the adapter again")
        tensors[key] = name, tensor
    expected = {
        (index_step * layer, kind): shape
        for layer, (columns, rows) in enumerate(pairwise(widths))
        for kind, shape in (("weight", (rows, columns)), ("bias", (rows,)))
    }
    missing = {key: shape for key, shape in expected.items() if key not in tensors}
    wrong = [f"layers.{number}.{kind} {list(shape)} is missing" for (number, kind), shape in missing.items()]
    wrong += [f"{name} is not expected" for key, (name, _) in tensors.items() if key not in expected]
    wrong += [
        f"{tensors[key][0]} is {list(tensors[key][1].shape)} instead of {list(shape)}"
        for key, shape in expected.items()
        if key in tensors and tensors[key][1].shape != shape
    ]
    if wrong:
        wrong = wrong[:8]
        if any(number < num_adapters for number, _ in missing):
            wrong.append("PEFT 0.21.2 omits layers whose number is also an adapter's: write the whole state_dict of the classifier")
        raise CheckpointError(
            f"{path} does not hold the classifier that {settings_path} describes: {'; '.join(wrong)}; or the two files belong to different "
            "adapters"
        )
    arrays = {key: as_float32(path, *tensors[key]) for key in expected}
    numbers = sorted({number for number, _ in expected})
    return tuple((arrays[number, "weight"], arrays[number, "bias"]) for number in numbers)


def _adapter_digest(global_weight: float, adapters: Sequence[Adapter], mixture: XLoraMixture) -> bytes:
    """Return a digest of every value that can change a token."""
    scaling = (mixture.num_scaled_matrices, mixture.temperature, mixture.top_k, mixture.has_softmax_of_top_k, mixture.scaling_pass_value)
    digest = hashlib.sha256(repr(("x-lora", *scaling, global_weight)).encode())
    for adapter in adapters:
        digest.update(adapter.digest)
    for values in (array for layer in mixture.classifier for array in layer):
        digest.update(repr(values.shape).encode())
        digest.update(np.ascontiguousarray(values).data)
    return digest.digest()
