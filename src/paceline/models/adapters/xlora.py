"""Reads X-LoRA adapters as PEFT writes them: a directory with settings, a classifier and the LoRA adapters that it weighs.

Source: PEFT 0.21, `XLoraModel`, `XLoraClassifier` and `XLoraLinearLayer`.
"""

import hashlib
import re
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from paceline.errors import CheckpointError, shortened
from paceline.models.adapters.adapter import Adapter, LowRank, Mixture
from paceline.models.adapters.entries import FILES, adapter_files, as_float32, listed
from paceline.models.adapters.modules import EMBEDDING, LM_HEAD
from paceline.models.adapters.read import check_name, read_adapter
from paceline.models.adapters.settings import CONFIG, read_settings
from paceline.models.adapters.xlora_settings import XLoraSettings, is_xlora, read_xlora_settings
from paceline.models.config import ModelConfig
from paceline.models.families.table import FAMILIES
from paceline.models.tensor_file import FileTensor, read_tensors
from paceline.models.weights import Weights
from paceline.small_files import is_file

_TENSOR = re.compile(r"(?:base_model\.)?(?:model\.)?internal_xlora_classifier\.layers\.(\d{1,4})\.(weight|bias)")
_MODULES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
"""Matrices of a layer in the order in which models hold them, which is that of scalings layer by layer."""
_OF_LAYER = re.compile(r"layers\.(\d+)\.[a-z_]+\.([a-z_]+)")
_EXPERTS = ".experts."
_COPIES = 2  # in float32: as it is read, and as a runtime lays it out
Floats = NDArray[np.float32]


def read_any_adapter(
    directory: Path, *, name: str, config: ModelConfig, weights: Weights | None = None, memory_bytes: int | None = None
) -> Adapter:
    """The adapter in a directory, LoRA or X-LoRA; arguments and errors as `read_adapter`."""
    read = read_xlora if is_xlora(directory) else read_adapter
    return read(directory, name=name, config=config, weights=weights, memory_bytes=memory_bytes)


def read_xlora(
    directory: Path, *, name: str, config: ModelConfig, weights: Weights | None = None, memory_bytes: int | None = None
) -> Adapter:
    """The X-LoRA adapter in a directory; arguments and errors as `read_adapter`.

    Its adapters lie where the settings say, or in folders of the directory called by their numbers.
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
        own = _directory(directory, number, given)
        adapters.append(read_adapter(own, name=f"{name} {number}", config=config, weights=weights, memory_bytes=memory_bytes))
        _check_weighed(own, adapters[-1])
        if memory_bytes is not None:
            memory_bytes = max(0, memory_bytes - _COPIES * _nbytes(adapters[-1]))
    products = {module: None for adapter in adapters for module in adapter.products}
    order = _layers(settings, config, list(products)) if settings.has_layerwise_scalings else dict.fromkeys(products, 0)
    num_layers = len(order) if settings.has_layerwise_scalings else 1
    classifier = _read_classifier(directory, settings, num_layers * len(adapters))
    columns = {module: _columns(adapters, module, order[module]) for module in products}
    mixture = Mixture(
        num_adapters=len(adapters),
        num_layers=num_layers,
        classifier=classifier,
        temperature=settings.temperature,
        top_k=settings.top_k,
        has_softmax_of_top_k=settings.has_softmax_of_top_k,
        pass_scaling=settings.pass_scaling,
        columns=columns,
    )
    joined = {module: _joined(adapters, module, settings) for module in products}
    return Adapter(name, _digest(settings, adapters, mixture), joined, {}, {}, mixture)


def _directory(directory: Path, number: int, given: str) -> Path:
    """Where an adapter lies: where the settings say, from the directory on, or in its folder called by its number."""
    places = [directory / given] if given else []
    for place in (*places, directory / str(number)):
        if is_file(place / CONFIG):
            return place
    raise CheckpointError(
        f"{directory} is an X-LoRA adapter of several LoRA adapters, and number {number} ({shortened(given)}) is missing: put its "
        f"directory there as {directory / str(number)}"
    )


def _check_weighed(directory: Path, adapter: Adapter) -> None:
    """Refuse what no scaling is applied to, or what an adapter cannot change beside the weights."""
    whole = [f"the bias of {name}" for name in adapter.biases] + [f"the whole of {name}" for name in adapter.saved]
    if whole:
        raise CheckpointError(f"{directory} changes {listed(whole, 'part')}, which X-LoRA does not scale: use an adapter of products alone")
    others = [name for name in adapter.products if name in (EMBEDDING, LM_HEAD) or _EXPERTS in name]
    if others or read_settings(directory).target_parameters:
        raise CheckpointError(
            f"{directory} changes {listed(others, 'product') if others else 'parameters (target_parameters)'}, where X-LoRA is not "
            "computed: attention and dense MLPs are; use an adapter of these"
        )


def _layers(settings: XLoraSettings, config: ModelConfig, products: Sequence[str]) -> dict[str, int]:
    """The place of each product among the adapted matrices in the order in which the model holds them."""
    places = {}
    for name in products:
        found = _OF_LAYER.fullmatch(name)
        if found is None or found[2] not in _MODULES or FAMILIES[config.family].fuses_projections:
            raise CheckpointError(
                f"{settings.path}: layerwise_scalings with {name} in a {config.family} model: which scalings are whose is known for "
                f"{', '.join(_MODULES)} as matrices of their own; train with layerwise_scalings=False, or adapt these alone"
            )
        places[name] = int(found[1]), _MODULES.index(found[2])
    return {name: place for place, name in enumerate(sorted(places, key=lambda name: places[name]))}


def _columns(adapters: Sequence[Adapter], module: str, layer: int) -> NDArray[np.int32]:
    ranks = [len(adapter.products[module].down) if module in adapter.products else 0 for adapter in adapters]
    return np.repeat(np.arange(len(adapters), dtype=np.int32) + np.int32(layer * len(adapters)), ranks)


def _joined(adapters: Sequence[Adapter], module: str, settings: XLoraSettings) -> LowRank:
    """The products of all adapters with one matrix, side by side."""
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
        found = _TENSOR.fullmatch(name)
        if found is None:
            raise CheckpointError(
                f"{path} holds {listed([name])} that is none of X-LoRA's classifier: it may compute something else with it"
            )
        if (key := (int(found[1]), found[2])) in named:
            raise CheckpointError(f"{path} holds {name} and {named[key][0]}, which are the same: export the adapter again")
        named[key] = name, tensor
    step = 3 if settings.has_dropout else 2  # ReLU and dropout are numbered too
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


def _nbytes(adapter: Adapter) -> int:
    return sum(low.down.nbytes + low.up.nbytes for low in adapter.products.values())


def _digest(settings: XLoraSettings, adapters: Sequence[Adapter], mixture: Mixture) -> bytes:
    """Of every value that changes a token."""
    computed = (mixture.num_layers, mixture.temperature, mixture.top_k, mixture.has_softmax_of_top_k, mixture.pass_scaling)
    digest = hashlib.sha256(repr(("x-lora", *computed, settings.global_weight)).encode())
    for adapter in adapters:
        digest.update(adapter.key)
    for values in (array for layer in mixture.classifier for array in layer):
        digest.update(repr(values.shape).encode())
        digest.update(np.ascontiguousarray(values).data)
    return digest.digest()
