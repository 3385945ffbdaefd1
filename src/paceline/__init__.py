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
    from paceline.engine.async_engine import AsyncEngine
    from paceline.engine.inputs import RequestOptions
    from paceline.engine.request import SpeculationOptions
    from paceline.llm import LLM
    from paceline.outputs import RequestOutput, StreamChunk, Timing, Usage
    from paceline.parsing.parse_output import ParsedOutput, ParsedToolCall, parse_output
    from paceline.sampling.grammars.grammar import Grammar
    from paceline.sampling.params import SamplingParams

__version__ = "0.1.0"

__all__ = [
    "LLM",
    "AsyncEngine",
    "BackendUnavailableError",
    "CapacityError",
    "CheckpointError",
    "ConfigError",
    "Grammar",
    "IncompatibleDrafterError",
    "PacelineError",
    "ParsedOutput",
    "ParsedToolCall",
    "QuantOptions",
    "RequestError",
    "RequestOptions",
    "RequestOutput",
    "SpeculationOptions",
    "SamplingParams",
    "StreamChunk",
    "Timing",
    "Usage",
    "__version__",
    "parse_output",
]

# Loaded on first use, so that `import paceline` and `paceline --help` stay instant.
_LAZY = {
    "AsyncEngine": "paceline.engine.async_engine",
    "Grammar": "paceline.sampling.grammars.grammar",
    "LLM": "paceline.llm",
    "ParsedOutput": "paceline.parsing.parse_output",
    "ParsedToolCall": "paceline.outputs",
    "QuantOptions": "paceline.config",
    "RequestOptions": "paceline.engine.inputs",
    "RequestOutput": "paceline.outputs",
    "SpeculationOptions": "paceline.engine.request",
    "SamplingParams": "paceline.sampling.params",
    "StreamChunk": "paceline.outputs",
    "Timing": "paceline.outputs",
    "Usage": "paceline.outputs",
    "parse_output": "paceline.parsing.parse_output",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'paceline' has no attribute {name!r}")
    return getattr(import_module(_LAZY[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
