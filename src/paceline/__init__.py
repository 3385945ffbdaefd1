"""paceline: faster generation with local language models by speculative decoding, without changing a token."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from paceline.errors import (
    BackendUnavailableError,
    CapacityError,
    CheckpointError,
    ConfigError,
    IncompatibleDrafterError,
    PacelineError,
    RequestError,
)

if TYPE_CHECKING:
    from paceline.config import QuantOptions
    from paceline.llm import LLM
    from paceline.outputs import RequestOutput, StreamChunk, Timing, Usage
    from paceline.sampling.params import SamplingParams

__version__ = "0.1.0"

__all__ = [
    "LLM",
    "BackendUnavailableError",
    "CapacityError",
    "CheckpointError",
    "ConfigError",
    "IncompatibleDrafterError",
    "PacelineError",
    "QuantOptions",
    "RequestError",
    "RequestOutput",
    "SamplingParams",
    "StreamChunk",
    "Timing",
    "Usage",
    "__version__",
]

# Loaded on first use, so that `import paceline` and `paceline --help` stay instant.
_LAZY = {
    "LLM": "paceline.llm",
    "QuantOptions": "paceline.config",
    "RequestOutput": "paceline.outputs",
    "SamplingParams": "paceline.sampling.params",
    "StreamChunk": "paceline.outputs",
    "Timing": "paceline.outputs",
    "Usage": "paceline.outputs",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'paceline' has no attribute {name!r}")
    return getattr(import_module(_LAZY[name]), name)
