"""Read X-LoRA adapters in PEFT's format: a directory with settings, a classifier and the LoRA adapters that it weights.

Source: PEFT 0.21, `XLoraConfig`, `XLoraModel`, `XLoraClassifier` and `XLoraLinearLayer`.
"""

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from paceline.errors import CheckpointError, name_list, shortened
from paceline.models.adapters.adapter import Adapter, LowRank, XLoraMixture
from paceline.models.adapters.adapter_file import FILES, adapter_files, as_float32
from paceline.models.adapters.modules import EMBEDDING, LM_HEAD
from paceline.models.adapters.read import check_name, read_adapter
from paceline.models.adapters.settings import CONFIG, read_settings
from paceline.models.config import ModelConfig
from paceline.models.families.table import FAMILIES
from paceline.models.json_fields import JsonFields
from paceline.models.storage.tensor_file import FileTensor, read_tensors
from paceline.models.weights import Weights
from paceline.small_files import is_file, read_json

_CLASSIFIER_TENSOR = re.compile(r"(?:base_model\.)?(?:model\.)?internal_xlora_classifier\.layers\.(\d{1,4})\.(weight|bias)")
_MODULES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
"""Matrices of a layer in module order, which is the order of layerwise scalings."""
_LAYER_MATRIX = re.compile(r"layers\.(\d+)\.[a-z_]+\.([a-z_]+)")
_EXPERTS = ".experts."
_NUM_FLOAT32_COPIES = 2  # float32 copies of an adapter in memory: as read, and as the runtime stores it
Floats = NDArray[np.float32]


MAX_DEPTH, MAX_SIZE, MAX_ADAPTERS = 64, 2**20, 256
MIN_TEMPERATURE = 2.0**-126
"""Smaller temperatures are no normal float32 numbers, in which scalings are computed."""
_READ_KEYS = (
    "peft_type", "hidden_size", "adapters", "enable_softmax", "enable_softmax_topk", "layerwise_scalings", "xlora_depth", "xlora_size",
    "xlora_dropout_p", "softmax_temperature", "top_k_lora", "scaling_pass_value", "global_scaling_weight", "use_bias",
)  # fmt: skip
_IGNORED_KEYS = (
    "auto_mapping", "base_model_name_or_path", "base_model_class", "parent_library", "revision", "task_type", "inference_mode",
    "peft_version", "use_trainable_adapters",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class XLoraSettings:
    """The settings of an X-LoRA adapter.

    Attributes:
        path: the adapter_config.json.
        hidden_size: width of the hidden states that the classifier reads.
        adapters: path of each adapter, in the order of the classifier's outputs.
        depth, size: number of linear layers of the classifier, and the width between them.
        has_dropout: layer numbers of the classifier count a dropout between linear layers.
        has_layerwise_scalings: every adapted matrix has scalings of its own.
        temperature: temperature of the softmax over scalings; None = no softmax.
        top_k: number of scalings that are kept; None = all.
        has_softmax_of_top_k: the kept scalings are normalised by a second softmax.
        pass_scaling: every scaling of the scaling pass, after top-k and its softmax.
        global_weight: factor of all products.
    """

    path: Path
    hidden_size: int
    adapters: tuple[str, ...]
    depth: int
    size: int
    has_dropout: bool
    has_layerwise_scalings: bool
    temperature: float | None
    top_k: int | None
    has_softmax_of_top_k: bool
    pass_scaling: float
    global_weight: float


def is_xlora(directory: Path) -> bool:
    """Return whether a directory holds an X-LoRA adapter; False if it holds no adapter.

    Raises:
        CheckpointError: Its adapter_config.json cannot be read.
    """
    values = read_json(directory / CONFIG)
    return values is not None and values.get("peft_type") == "XLORA"


def read_xlora_settings(directory: Path) -> XLoraSettings:
    """Read the settings of the X-LoRA adapter in a directory.

    Raises:
        CheckpointError: A value is out of range, or a setting is not supported.
    """
    path = directory / CONFIG
    values = read_json(path) or {}
    fields = JsonFields(values, path)
    unknown = [name for name, value in values.items() if value and name not in (*_READ_KEYS, *_IGNORED_KEYS)]
    if unknown:
        raise CheckpointError(
            f"{path}: {', '.join(map(shortened, unknown[:20]))} are set, which no known X-LoRA adapter has: they may change what it "
            "computes; remove what does not"
        )
    if not fields.flag("use_bias", default=True):
        raise CheckpointError(f"{path}: use_bias is false, and PEFT's classifier has biases: save the adapter again with PEFT 0.21")
    adapters = _read_adapter_paths(fields)
    top_k = None if values.get("top_k_lora") is None else fields.integer("top_k_lora", most=len(adapters))
    has_softmax_of_top_k = fields.flag("enable_softmax_topk", default=False)
    return XLoraSettings(
        path=path,
        hidden_size=fields.integer("hidden_size", 4096),
        adapters=adapters,
        depth=fields.integer("xlora_depth", 1, most=MAX_DEPTH),
        size=fields.integer("xlora_size", 2048, most=MAX_SIZE),
        has_dropout=fields.number("xlora_dropout_p", 0.2) > 0.0,
        has_layerwise_scalings=fields.flag("layerwise_scalings", default=False),
        temperature=_read_temperature(fields) if fields.flag("enable_softmax", default=True) else None,
        top_k=top_k,
        has_softmax_of_top_k=has_softmax_of_top_k,
        pass_scaling=_scaling_of_scaling_pass(fields, len(adapters), top_k, has_softmax_of_top_k=has_softmax_of_top_k),
        global_weight=fields.number("global_scaling_weight", 1.0),
    )


def _read_adapter_paths(fields: JsonFields) -> tuple[str, ...]:
    """Return the paths of the adapters. PEFT loads adapters by number but looks them up by these names, so both must be equal."""
    found = fields.values.get("adapters")
    if not isinstance(found, Mapping) or not found or len(found) > MAX_ADAPTERS or not all(isinstance(one, str) for one in found.values()):
        raise CheckpointError(
            f"{fields.path}: adapters = {shortened(found)}, expected an object of 1 to {MAX_ADAPTERS} names with a directory each"
        )
    if list(found) != [str(number) for number in range(len(found))]:
        raise CheckpointError(
            f"{fields.path}: adapters are called {', '.join(map(shortened, list(found)[:20]))}, and PEFT finds those alone that are called "
            f'by their numbers: call them "0" to "{len(found) - 1}", in the order of the classifier\'s outputs'
        )
    return tuple(found.values())


def _read_temperature(fields: JsonFields) -> float:
    temperature = fields.number("softmax_temperature", 1.0)
    if temperature < MIN_TEMPERATURE:
        raise CheckpointError(f"{fields.path}: softmax_temperature = {temperature:g}, expected a number of at least {MIN_TEMPERATURE:.3g}")
    return temperature


def _scaling_of_scaling_pass(fields: JsonFields, num_adapters: int, top_k: int | None, *, has_softmax_of_top_k: bool) -> float:
    """Return the scaling of the scaling pass, after top-k and its softmax."""
    if "scaling_pass_value" in fields.values and fields.values["scaling_pass_value"] is None:
        raise CheckpointError(
            f"{fields.path}: scaling_pass_value is null, with which PEFT computes nothing: write the number, such as {1 / num_adapters:g} "
            "(1 / number of adapters) or 0"
        )
    value = fields.number("scaling_pass_value", 0.0)
    if value == 0.0:
        return 0.0
    if top_k is not None and top_k < num_adapters:
        raise CheckpointError(
            f"{fields.path}: scaling_pass_value = {value:g} with top_k_lora = {top_k} of {num_adapters}: all scalings of that pass are "
            "equal, and which of them are the largest is not defined; set one of the two to what the other was trained with, 0 or null"
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

    Its LoRA adapters are at the paths of the settings, or in numbered folders of the directory.
    """
    check_name(name)
    settings = read_xlora_settings(directory)
    if settings.hidden_size != config.hidden_size:
        raise CheckpointError(
            f"{settings.path}: hidden_size = {settings.hidden_size}, the model's is {config.hidden_size}: use the adapter with the model "
            "it was made for"
        )
    adapters = []
    for number, given in enumerate(settings.adapters):
        own = _adapter_directory(directory, number, given)
        adapters.append(read_adapter(own, name=f"{name} {number}", config=config, weights=weights, memory_bytes=memory_bytes))
        _check_scalable(own, adapters[-1])
        if memory_bytes is not None:
            memory_bytes = max(0, memory_bytes - _NUM_FLOAT32_COPIES * _num_bytes(adapters[-1]))
    products = {module: None for adapter in adapters for module in adapter.products}
    order = _matrix_numbers(settings, config, list(products)) if settings.has_layerwise_scalings else dict.fromkeys(products, 0)
    num_layers = len(order) if settings.has_layerwise_scalings else 1
    classifier = _read_classifier(directory, settings, num_layers * len(adapters))
    columns = {module: _scaling_columns(adapters, module, order[module]) for module in products}
    mixture = XLoraMixture(
        num_adapters=len(adapters),
        num_layers=num_layers,
        classifier=classifier,
        temperature=settings.temperature,
        top_k=settings.top_k,
        has_softmax_of_top_k=settings.has_softmax_of_top_k,
        pass_scaling=settings.pass_scaling,
        columns=columns,
    )
    joined = {module: _concatenate_products(adapters, module, settings) for module in products}
    return Adapter(name, _value_digest(settings, adapters, mixture), joined, {}, {}, mixture)


def _adapter_directory(directory: Path, number: int, given: str) -> Path:
    """Return the directory of an adapter: the path in the settings, or the numbered folder."""
    folders = [directory / given] if given else []
    for folder in (*folders, directory / str(number)):
        if is_file(folder / CONFIG):
            return folder
    raise CheckpointError(
        f"{directory} is an X-LoRA adapter of several LoRA adapters, and number {number} ({shortened(given)}) is missing: put its "
        f"directory there as {directory / str(number)}"
    )


def _check_scalable(directory: Path, adapter: Adapter) -> None:
    """Refuse an X-LoRA adapter with parts that cannot be scaled, or that only merging can apply."""
    whole = [f"the bias of {name}" for name in adapter.biases] + [f"the whole of {name}" for name in adapter.saved]
    if whole:
        raise CheckpointError(
            f"{directory} changes {name_list(whole, 'part')}, which X-LoRA does not scale: use an adapter of products alone"
        )
    others = [name for name in adapter.products if name in (EMBEDDING, LM_HEAD) or _EXPERTS in name]
    if others or read_settings(directory).target_parameters:
        raise CheckpointError(
            f"{directory} changes {name_list(others, 'product') if others else 'parameters (target_parameters)'}, where X-LoRA is not "
            "computed: attention and dense MLPs are; use an adapter of these"
        )


def _matrix_numbers(settings: XLoraSettings, config: ModelConfig, products: Sequence[str]) -> dict[str, int]:
    """Return for each product the index of its scalings: the adapted matrices are counted in module order."""
    places = {}
    for name in products:
        found = _LAYER_MATRIX.fullmatch(name)
        if found is None or found[2] not in _MODULES or FAMILIES[config.family].has_fused_projections:
            raise CheckpointError(
                f"{settings.path}: layerwise_scalings with {name} in a {config.family} model: which scalings are whose is known for "
                f"{', '.join(_MODULES)} as matrices of their own; train with layerwise_scalings=False, or adapt these alone"
            )
        places[name] = int(found[1]), _MODULES.index(found[2])
    return {name: place for place, name in enumerate(sorted(places, key=lambda name: places[name]))}


def _scaling_columns(adapters: Sequence[Adapter], module: str, layer: int) -> NDArray[np.int32]:
    ranks = [len(adapter.products[module].down) if module in adapter.products else 0 for adapter in adapters]
    return np.repeat(np.arange(len(adapters), dtype=np.int32) + np.int32(layer * len(adapters)), ranks)


def _concatenate_products(adapters: Sequence[Adapter], module: str, settings: XLoraSettings) -> LowRank:
    """Return the products of all adapters with one matrix, concatenated along the rank."""
    own = [adapter.products[module] for adapter in adapters if module in adapter.products]
    with np.errstate(over="ignore", invalid="ignore"):
        up = np.concatenate([low.up for low in own], axis=1) * np.float32(settings.global_weight)
    if not np.isfinite(up).all():
        raise CheckpointError(
            f"{settings.path}: global_scaling_weight = {settings.global_weight:g} makes values of {module} that are beyond float32: "
            "use another adapter"
        )
    return LowRank(np.concatenate([low.down for low in own]), up)


def _read_classifier(directory: Path, settings: XLoraSettings, num_scalings: int) -> tuple[tuple[Floats, Floats], ...]:
    path = next(iter(adapter_files(directory)), None)
    if path is None:
        raise CheckpointError(f"{directory} holds neither {' nor '.join(FILES)}, where X-LoRA's classifier is: download it again")
    tensors = read_tensors(path, "adapter")
    named: dict[tuple[int, str], tuple[str, FileTensor]] = {}
    for name, tensor in tensors.items():
        found = _CLASSIFIER_TENSOR.fullmatch(name)
        if found is None:
            raise CheckpointError(
                f"{path} holds {name_list([name])} that is none of X-LoRA's classifier: it may compute something else with it"
            )
        if (key := (int(found[1]), found[2])) in named:
            raise CheckpointError(f"{path} holds {name} and {named[key][0]}, which are the same: export the adapter again")
        named[key] = name, tensor
    step = 3 if settings.has_dropout else 2  # ReLU and dropout modules count in the layer numbers too
    sizes = [settings.hidden_size, *[settings.size] * (settings.depth - 1), num_scalings]
    expected = {
        (step * layer, kind): shape
        for layer, (columns, rows) in enumerate(pairwise(sizes))
        for kind, shape in (("weight", (rows, columns)), ("bias", (rows,)))
    }
    missing = {key: shape for key, shape in expected.items() if key not in named}
    wrong = [f"layers.{number}.{kind} {list(shape)} is missing" for (number, kind), shape in missing.items()]
    wrong += [f"{name} is one too many" for key, (name, _) in named.items() if key not in expected]
    wrong += [
        f"{named[key][0]} is {list(named[key][1].shape)} instead of {list(shape)}"
        for key, shape in expected.items()
        if key in named and named[key][1].shape != shape
    ]
    if wrong:
        wrong = wrong[:8]
        if any(number < len(settings.adapters) for number, _ in missing):
            wrong.append("PEFT 0.21.2 leaves such layers out, whose number is also an adapter's: write the classifier's whole state there")
        raise CheckpointError(
            f"{path} does not hold the classifier that {settings.path} describes: {'; '.join(wrong)}; or one of the two files is another "
            "adapter's"
        )
    arrays = {key: as_float32(path, *named[key]) for key in expected}
    numbers = sorted({number for number, _ in expected})
    return tuple((arrays[number, "weight"], arrays[number, "bias"]) for number in numbers)


def _num_bytes(adapter: Adapter) -> int:
    return sum(low.down.nbytes + low.up.nbytes for low in adapter.products.values())


def _value_digest(settings: XLoraSettings, adapters: Sequence[Adapter], mixture: XLoraMixture) -> bytes:
    """Return a digest of every value that can change a token."""
    computed = (mixture.num_layers, mixture.temperature, mixture.top_k, mixture.has_softmax_of_top_k, mixture.pass_scaling)
    digest = hashlib.sha256(repr(("x-lora", *computed, settings.global_weight)).encode())
    for adapter in adapters:
        digest.update(adapter.key)
    for values in (array for layer in mixture.classifier for array in layer):
        digest.update(repr(values.shape).encode())
        digest.update(np.ascontiguousarray(values).data)
    return digest.digest()
