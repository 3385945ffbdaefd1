"""Load a checkpoint as a network of the native or the torch runtime, and choose the runtime and the device."""

import importlib.util
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Required, TypedDict

from paceline.config import BACKENDS, QuantOptions
from paceline.errors import BackendUnavailableError, CapacityError, ConfigError, convert_memory_errors
from paceline.installation import install_command
from paceline.models.adapters.adapter import Adapter
from paceline.models.adapters.adapter_file import adapter_files
from paceline.models.adapters.merge import MergedWeights, merged_config
from paceline.models.adapters.read import read_adapter
from paceline.models.checkpoint import open_weights, read_model_config, weight_files
from paceline.models.config import ModelConfig, WeightType
from paceline.models.kv_cache_dtype import KVCacheDtype
from paceline.models.quantize import mean_weight_bits
from paceline.models.storage.checkpoint_weights import dequantized_bytes
from paceline.models.storage.quantized_cache import quantized_weights
from paceline.models.weights import Weights
from paceline.runtimes.base import Network, Numerics, assemble_pass
from paceline.runtimes.decoder import NetworkDefinition, decoder
from paceline.runtimes.native.library import kernels_path
from paceline.runtimes.numerics import measure_numerics
from paceline.runtimes.profile_cache import ProfileCache


@dataclass(frozen=True, slots=True, kw_only=True)
class RuntimeOptions:
    """How to run a network.

    Attributes:
        numerics: EXACT = test at load whether the network is exact; FAST = no test. The result is in `Network.capabilities`.
        kv_cache_dtype: type of cached keys and values; None = `default_kv_cache_dtype`.
        dtype: compute type; None = the type of the stored weights. F32 also turns off the rounding of rows to 8 bits in products with
            quantised matrices.
        num_threads: CPU threads.
        max_model_len: maximum length of a sequence; None = that of the model.
        device: "auto", "cpu" or "cuda".
        backend: "auto", "native" or "torch".
        collect_layers: layer boundaries at which hidden states are returned, see `decoder.decoder`.
        cache_directory: directory of the `ProfileCache` and of quantised matrices; None = nothing is cached.
        quantization: how to quantise matrices; None = not at all.
        regroup: quantise the matrices of a GGUF file again with larger groups: faster passes, but other weights.
        memory_bytes: free memory. Loading fails if matrices that must be converted to floats exceed it. None = no limit.
        merge_adapter: directory of a LoRA adapter to merge into the weights; None = no adapter.
    """

    numerics: Numerics = Numerics.EXACT
    dtype: WeightType | None = None
    kv_cache_dtype: KVCacheDtype | None = None
    num_threads: int = 1
    max_model_len: int | None = None
    device: str = "auto"
    backend: str = "auto"
    collect_layers: Sequence[int] = ()
    cache_directory: Path | None = None
    quantization: QuantOptions | None = None
    regroup: bool = False
    memory_bytes: int | None = None
    merge_adapter: Path | None = None


@dataclass(frozen=True, slots=True)
class LoadedNetwork:
    """A loaded network and properties of its checkpoint.

    Attributes:
        notices: lines to show to the user.
        bundled_head: drafting head in the same checkpoint, "medusa" or "mtp"; None = the checkpoint has none.
        weight_bits: mean number of bits of a weight.
    """

    network: Network
    notices: tuple[str, ...]
    bundled_head: str | None
    weight_bits: float


@convert_memory_errors("the model")
def load_network(path: Path, options: RuntimeOptions) -> LoadedNetwork:
    """Load a checkpoint.

    Raises:
        CheckpointError: the checkpoint is damaged or not supported.
        CapacityError: the weights do not fit in memory.
        ConfigError: the runtime does not support `kv_cache_dtype`.
        BackendUnavailableError: the device or its library is missing.
    """
    stored = read_model_config(path)
    config = stored.for_context(options.max_model_len)
    weights = open_weights(path, config, regroup=options.regroup, num_threads=options.num_threads)
    if options.merge_adapter is not None:
        name, free = merged_adapter_name(options.merge_adapter), options.memory_bytes
        adapter = read_adapter(options.merge_adapter, name=name, config=config, weights=weights, memory_bytes=free)
        config, weights = merge_adapter(adapter, config, weights, options)
    bundled_head, notices = weights.bundled_head, list(weights.notices)
    if options.quantization is None:
        _check_dequantized_size(weights, config, options.memory_bytes)
    if isinstance(weights, MergedWeights):
        _check_merged_size(weights, options.memory_bytes)
    if weights.has_encoders:
        notices.append("the checkpoint's image and audio encoders are not loaded: only text is supported")
    if config.max_positions < stored.max_positions and options.max_model_len is None:
        notices.append(
            f"the context is {config.max_positions} tokens, the model's original length: set max_model_len, up to {stored.max_positions}, "
            "to use its frequencies for long texts"
        )
    if options.quantization is not None:
        weights = quantized_weights(
            weights,
            options.quantization,
            options.cache_directory,
            files=(*weight_files(path), *(() if options.merge_adapter is None else adapter_files(options.merge_adapter))),
            num_threads=options.num_threads,
            notices=notices,
        )
    network = _build_network(config, weights, options, notices)
    return LoadedNetwork(network, tuple(notices), bundled_head, mean_weight_bits(weights))


def merged_adapter_name(directory: Path) -> str:
    """Return the name of a merged adapter in error messages."""
    return directory.name or "merged"


def merge_adapter(adapter: Adapter, config: ModelConfig, weights: Weights, options: RuntimeOptions) -> tuple[ModelConfig, MergedWeights]:
    """Return config and weights with a LoRA adapter merged into the matrices that it changes.

    They have the compute type; float32 if the weights will be quantised; float16 if they are GGUF blocks, which are less precise than that.
    """
    is_quantized = options.quantization is not None
    weight_type = WeightType.F32 if is_quantized else options.dtype or config.weight_type
    is_f16 = weight_type is WeightType.F32 and not is_quantized and options.dtype is None
    merged = MergedWeights(
        weights,
        config,
        adapter,
        weight_type=weight_type,
        type_if_quantized=WeightType.F16 if is_f16 else None,
        caller_quantizes=is_quantized,
    )
    return merged_config(config, adapter), merged


def _check_merged_size(weights: MergedWeights, memory_bytes: int | None) -> None:
    """Raise CapacityError if merged matrices do not fit in memory. Without this check, the operating system may kill the process."""
    size = weights.changed_bytes
    if memory_bytes is not None and size > memory_bytes:
        raise CapacityError(
            f"matrices with the adapter merged take {size / 1e9:.3g} GB, {memory_bytes / 1e9:.3g} GB are free: use quantization='int8' or "
            "'int4' (draft_quantization for a draft model), or adapters, which leaves the weights as they are stored"
        )


def _check_dequantized_size(weights: Weights, config: ModelConfig, memory_bytes: int | None) -> None:
    """Raise CapacityError if matrices of a quantised checkpoint that must be converted to floats do not fit in memory."""
    size = dequantized_bytes(weights.packed_matrices.values(), config.weight_type)
    if memory_bytes is not None and size > memory_bytes:
        raise CapacityError(
            f"matrices packed as {weights.quantized_format} take {size / 1e9:.3g} GB as {config.weight_type.value}, "
            f"{memory_bytes / 1e9:.3g} GB are free: use quantization='int8' or 'int4', or a GGUF file of the model"
        )


def _build_network(config: ModelConfig, weights: Weights, options: RuntimeOptions, notices: list[str]) -> Network:
    device = choose_device(options.device, options.backend)
    if choose_backend(options.backend, device, notices=notices) == "torch":
        return _build_torch_network(config, weights, options, device, notices)
    return _build_native_network(config, weights, options, notices)


def _build_native_network(config: ModelConfig, weights: Weights, options: RuntimeOptions, notices: list[str]) -> Network:
    """Return the network. If EXACT numerics are requested, test whether it is exact; if not, append a notice."""
    from paceline.runtimes.native.network import NativeNetwork

    compute_type = options.dtype or config.weight_type
    if options.kv_cache_dtype is KVCacheDtype.INT8 and any(group.arrays_per_layer == 1 for group in config.kv_groups()):
        raise ConfigError(
            "kv_cache_dtype is 'int8', which latent attention (MLA) does not support: leave kv_cache_dtype out, or use 'bf16' or 'f16'"
        )
    network = NativeNetwork(
        decoder(config, options.collect_layers),
        config,
        weights,
        num_threads=options.num_threads,
        max_model_len=min(options.max_model_len or config.max_positions, config.max_positions),
        compute_type=compute_type,
        kv_cache_dtype=options.kv_cache_dtype or default_kv_cache_dtype(config, weights, options.dtype),
        packed=None if options.dtype is WeightType.F32 else {},
        supports_adapters=True,
    )
    _warm_up(network)
    numerics = options.numerics
    if numerics is Numerics.EXACT:
        numerics = measure_numerics(network, ProfileCache(options.cache_directory), options.collect_layers)
        if numerics is Numerics.FAST:
            notices.append("on this machine a row's bits depend on the other rows of its pass: numerics is fast")
    network.capabilities = replace(network.capabilities, numerics=numerics)
    return network


def default_kv_cache_dtype(config: ModelConfig, weights: Weights, dtype: WeightType | None = None) -> KVCacheDtype:
    """Return float16 for quantised checkpoints whose other tensors are float32, else the compute type.

    Such a checkpoint does not record the type of the original model. float16 is also llama.cpp's default, and more precise than bfloat16.

    Args:
        dtype: compute type; None = that of the stored weights.
    """
    if dtype is None and config.weight_type is WeightType.F32 and any(weights.tensor_info(name).bits is not None for name in weights):
        return KVCacheDtype.F16
    return KVCacheDtype((dtype or config.weight_type).value)


def _build_torch_network(config: ModelConfig, weights: Weights, options: RuntimeOptions, device: str, notices: list[str]) -> Network:
    from paceline.runtimes.torch.network import TorchNetwork

    if options.numerics is Numerics.EXACT:
        notices.append(
            "torch picks kernels by a pass's shape, so near-ties may be decided differently than in plain decoding: numerics is fast"
        )
    weight_type = options.dtype or config.weight_type
    if options.kv_cache_dtype not in (None, KVCacheDtype(weight_type.value)):
        raise ConfigError(
            f"kv_cache_dtype is {options.kv_cache_dtype.value!r}, torch keeps keys and values in its compute type, {weight_type.value!r}: "
            "leave kv_cache_dtype out, or use backend='native'"
        )
    network = TorchNetwork(decoder(config, options.collect_layers), config, weights, device=device, weight_type=weight_type)
    _warm_up(network)
    return network


def _warm_up(network: Network) -> None:
    """Run one pass, which reads the weights from disk, so that the first request need not wait for the disk."""
    cache = network.new_cache(1)
    network.forward(*assemble_pass([cache.reserve_rows(cache.new_sequence(), [-1])], [[0]], [[0]]))
    network.num_passes = 0


class HeadPlacement(TypedDict, total=False):
    """Keyword arguments of `load_head` that do not depend on the head: drafters receive them and pass them on."""

    num_threads: Required[int]
    max_model_len: Required[int]
    backend: str
    device: str
    lm_head_source: Network | None


def load_head(
    definition: NetworkDefinition,
    config: ModelConfig,
    weights: Weights,
    *,
    num_threads: int,
    max_model_len: int,
    backend: str = "auto",
    device: str = "cpu",
    lm_head_source: Network | None = None,
    kv_cache_dtype: KVCacheDtype = KVCacheDtype.F32,
) -> Network:
    """Load a drafting head, a network that drafts from the target's hidden states.

    The head computes in float32; its weights keep their stored type. For products with quantised matrices, the native backend rounds rows
    to 8 bits, even if the target does not. If the head has the target's `lm_head` and the target has packed it, it is not packed again.

    Args:
        definition: function that defines what the head computes.
        config: config of its layers.
        weights: weights by the names that `definition` uses, with `.weight` or `.bias`.
        max_model_len: maximum length of a sequence.
        backend: "native", "torch" or "auto": native if there are kernels for this machine and the device is not a GPU.
        device: device of the torch backend, "cpu" or "cuda".
        lm_head_source: network with whose `lm_head` (or its first rows) the head computes logits; None = the head has its own.
        kv_cache_dtype: type of cached keys and values. The torch backend ignores it.

    Raises:
        ConfigError, BackendUnavailableError: the backend does not exist, or cannot run here.
    """
    if choose_backend(backend, device, notices=[]) == "native":
        from paceline.runtimes.native.network import NativeNetwork

        shared = None
        if isinstance(lm_head_source, NativeNetwork):
            shared = lm_head_source.packed_lm_head_rows(weights.tensor_info("lm_head.weight").shape[0])
        packed = {"lm_head": shared} if shared is not None else {}
        return NativeNetwork(
            definition, config, weights, num_threads=num_threads, max_model_len=max_model_len, packed=packed, kv_cache_dtype=kv_cache_dtype
        )
    from paceline.runtimes.torch.network import TorchNetwork

    return TorchNetwork(definition, config, weights, device=device)


def choose_device(device: str, backend: str) -> str:
    """Return the device to run on, "cpu" or "cuda". "auto" selects "cuda" if torch finds a CUDA device.

    Raises:
        BackendUnavailableError: device is "cuda", and torch or the device is missing.
    """
    if device == "cpu" or backend == "native":
        return "cpu"
    if device == "auto" and not _may_have_cuda():
        return "cpu"
    try:
        import torch
    except ImportError as error:
        if device == "cuda":
            raise BackendUnavailableError(f"device 'cuda' needs torch: {install_command('torch')}") from error
        return "cpu"
    if torch.cuda.is_available():
        return "cuda"
    if device == "cuda":
        raise BackendUnavailableError("device is 'cuda', but torch finds no CUDA device: use --device cpu")
    return "cpu"


def choose_backend(backend: str, device: str, *, notices: list[str]) -> str:
    """Return the backend to use, "native" or "torch". "auto" selects "native" on CPUs for which kernels were built.

    Args:
        backend: "auto", "native" or "torch".
        notices: lines for the user; one is appended if "auto" falls back to torch.

    Raises:
        ConfigError: the backend does not exist.
        BackendUnavailableError: its library is not installed.
    """
    if backend not in BACKENDS:
        raise ConfigError(f"backend is {backend!r}: use {', '.join(BACKENDS)}")
    chosen = _best_backend(device, notices) if backend == "auto" else backend
    if chosen == "torch" and not _has_torch():
        raise BackendUnavailableError(f"backend 'torch' needs torch: {install_command('torch')}, or use --backend native")
    return chosen


def _best_backend(device: str, notices: list[str]) -> str:
    if device == "cuda":
        return "torch"
    if kernels_path() is not None:
        return "native"
    if not _has_torch():
        raise BackendUnavailableError(f"there are no native kernels for this machine: {install_command('torch')}")
    notices.append("there are no native kernels for this machine: using torch")
    return "torch"


def _may_have_cuda() -> bool:
    """Return whether a CUDA driver may be installed. This avoids importing torch, which takes seconds."""
    return not sys.platform.startswith("linux") or any(Path(device).exists() for device in ("/dev/nvidiactl", "/dev/dxg"))


def _has_torch() -> bool:
    """Return whether torch is installed, without importing it, which takes seconds."""
    return importlib.util.find_spec("torch") is not None
