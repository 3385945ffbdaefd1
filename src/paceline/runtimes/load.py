"""A checkpoint directory becomes a runtime."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from paceline.errors import BackendUnavailableError, ConfigError
from paceline.models.config import ModelConfig, WeightType, read_config
from paceline.models.weights import Weights
from paceline.runtimes.base import Numerics, Runtime


@dataclass(frozen=True, slots=True, kw_only=True)
class RuntimeOptions:
    """How to run a network.

    Attributes:
        numerics: what is wanted; the runtime's capabilities say what holds.
        dtype: None = the type the weights are stored in.
        num_threads: CPU threads.
        max_context: positions to prepare for; None = what the model was made for.
        device: "auto", "cpu" or "cuda".
        backend: "auto", "openvino" or "torch".
        collect_layers: layer boundaries to return.
        facts_directory: where facts measured on this machine are kept; None = nowhere.
    """

    numerics: Numerics = Numerics.EXACT
    dtype: WeightType | None = None
    num_threads: int = 1
    max_context: int | None = None
    device: str = "auto"
    backend: str = "auto"
    collect_layers: Sequence[int] = ()
    facts_directory: Path | None = None


@dataclass(frozen=True, slots=True)
class Loaded:
    """A runtime and the one-line notices its user should see."""

    runtime: Runtime
    notices: tuple[str, ...]


def load_runtime(directory: Path, options: RuntimeOptions) -> Loaded:
    """Open a checkpoint and build the runtime for it.

    Raises:
        CheckpointError: the directory cannot be used.
        BackendUnavailableError: the device or its library is absent.
    """
    config = read_config(directory)
    weights = Weights.open(directory, config)
    notices: list[str] = []
    if config.sliding_window is not None and config.max_positions == config.sliding_window:
        notices.append(f"context is limited to the model's sliding window of {config.sliding_window} tokens")
    device = _device(options)
    backend = _backend(options, device, notices)
    build = _build_openvino if backend == "openvino" else _build_torch
    return Loaded(build(config, weights, options, device, notices), tuple(notices))


def _build_openvino(config: ModelConfig, weights: Weights, options: RuntimeOptions, device: str, notices: list[str]) -> Runtime:
    from paceline.runtimes.facts import MeasuredFacts
    from paceline.runtimes.numerics import settle_numerics
    from paceline.runtimes.openvino.graph import computable
    from paceline.runtimes.openvino.runtime import OpenVINORuntime

    wanted = options.dtype or config.weight_type
    computed = computable(wanted)
    if computed is not wanted:
        notices.append(
            f"this CPU has no {wanted.value} arithmetic: weights are widened to float32, with the same values in twice the memory"
        )
    max_context = min(options.max_context or config.max_positions, config.max_positions)

    def build(collect_layers: Sequence[int]) -> OpenVINORuntime:
        return OpenVINORuntime(
            config,
            weights,
            weight_type=computed,
            num_threads=options.num_threads,
            max_context=max_context,
            collect_layers=collect_layers,
            round_to=wanted,
        )

    runtime = build(options.collect_layers)
    canonical = (lambda: build(())) if options.collect_layers else None
    notice = settle_numerics(runtime, options.numerics, MeasuredFacts(options.facts_directory), canonical=canonical)
    notices.extend([notice] if notice else [])
    return runtime


def _build_torch(config: ModelConfig, weights: Weights, options: RuntimeOptions, device: str, notices: list[str]) -> Runtime:
    from paceline.runtimes.torch.runtime import TorchRuntime

    if options.numerics is Numerics.EXACT:
        notices.append("torch picks kernels by a pass's shape, so near-ties may fall otherwise than in plain decoding: numerics is fast")
    return TorchRuntime(
        config, weights, device=device, weight_type=options.dtype or config.weight_type, collect_layers=tuple(options.collect_layers)
    )


def _device(options: RuntimeOptions) -> str:
    if options.device == "cpu" or options.backend == "openvino":
        return "cpu"
    if options.device == "auto" and not _may_have_cuda():
        return "cpu"
    try:
        import torch
    except ImportError as error:
        if options.device == "cuda":
            raise BackendUnavailableError("device 'cuda' needs torch: pip install 'paceline[torch]'") from error
        return "cpu"
    if torch.cuda.is_available():
        return "cuda"
    if options.device == "cuda":
        raise BackendUnavailableError("device 'cuda' was asked for, but torch finds no CUDA device: use --device cpu")
    return "cpu"


def _may_have_cuda() -> bool:
    """Whether a driver is there at all; importing torch to find out takes seconds."""
    return not sys.platform.startswith("linux") or any(Path(device).exists() for device in ("/dev/nvidiactl", "/dev/dxg"))


def _backend(options: RuntimeOptions, device: str, notices: list[str]) -> str:
    if options.backend not in ("auto", "openvino", "torch"):
        raise ConfigError(f"backend is {options.backend!r}: use auto, openvino or torch")
    if options.backend != "auto":
        return options.backend
    if device == "cuda":
        return "torch"
    try:
        from openvino.op import _PagedAttentionExtension  # noqa: F401
    except ImportError:
        notices.append("OpenVINO with PagedAttention is not available here: the torch runtime takes over")
        return "torch"
    return "openvino"
