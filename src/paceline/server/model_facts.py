"""What lists of models show of a checkpoint, read from its headers: a model need not be loaded to be listed."""

import hashlib
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from paceline import __version__
from paceline.config import EngineConfig, quant_options
from paceline.engine.loader import LoadedEngine
from paceline.errors import ConfigError, PacelineError, convert_memory_errors
from paceline.hub import resolve_model
from paceline.models.checkpoint import is_gguf, open_weights, read_model_config, stored_bytes, stored_type
from paceline.models.config import ModelConfig
from paceline.models.tensor_names import num_parameters
from paceline.tokenizer.tokenizer import Tokenizer


def template_facts(tokenizer: Tokenizer) -> tuple[str, tuple[str, ...]]:
    """Return the source of a chat template, empty if there is none, and which of "tools" and "enable_thinking" are its variables."""
    names = ("tools", "enable_thinking") if tokenizer.has_chat_template else ()
    return tokenizer.template_source() if names else "", tuple(filter(tokenizer.template_uses, names))


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """A checkpoint as it is listed.

    Attributes:
        path: its directory or GGUF file.
        num_bytes: size of its weight files.
        quantization: "Q4_K_M", "bf16" or the name of a quantised format; what `--quantization` makes of it, if that is given.
        max_model_len: longest text that is served.
    """

    path: Path
    config: ModelConfig = field(repr=False)
    num_bytes: int
    num_parameters: int
    quantization: str
    max_model_len: int

    @classmethod
    @convert_memory_errors("the checkpoint's metadata")
    def read(cls, engine: EngineConfig) -> "ModelFacts":
        """Read the headers of a model's files; it is downloaded if it is not on this machine.

        Raises:
            CheckpointError: a file is missing, damaged or not one we run.
            ConfigError: `max_model_len` exceeds the model's maximum.
        """
        path = resolve_model(
            engine.model, gguf_file=engine.gguf_file, revision=engine.revision, token=engine.hf_token, offline=engine.offline
        )
        config = read_model_config(path).for_context(engine.max_model_len)
        if engine.max_model_len is not None and engine.max_model_len > config.max_positions:
            text = f"max_model_len is {engine.max_model_len}, and {engine.model} was made for {config.max_positions} tokens"
            raise ConfigError(f"{text}: lower max_model_len")
        stored = stored_type(path, open_weights(path, config), config)
        options = quant_options("quantization", engine.quantization)
        quantization = stored if options is None else f"int{options.bits}"
        return cls(path, config, stored_bytes(path), num_parameters(config), quantization, engine.max_model_len or config.max_positions)

    @classmethod
    def of_loaded(cls, loaded: LoadedEngine) -> "ModelFacts":
        """Read the same of a loaded model; what its files had, if they are gone, is unknown, and its size 0."""
        config, longest = loaded.engine.runtime.config, loaded.input_processor.max_model_len
        try:
            return replace(cls.read(replace(loaded.config, offline=True)), max_model_len=longest)
        except PacelineError:
            return cls(Path(loaded.config.model), config, 0, num_parameters(config), config.weight_type.value, longest)

    def digest_of(self, name: str) -> str:
        """A hash by which clients distinguish models; files are not read for it."""
        return hashlib.sha256(f"{name} {self.num_bytes} {self.quantization} {__version__}".encode()).hexdigest()

    def as_meta(self) -> dict[str, Any]:
        """The object `meta` of llama.cpp's list of models, and the quantisation."""
        return {
            "n_params": self.num_parameters,
            "size": self.num_bytes,
            "n_ctx_train": self.config.max_positions,
            "n_embd": self.config.hidden_size,
            "n_vocab": self.config.vocab_size,
            "quantization": self.quantization,
        }

    def as_details(self, parent: str = "") -> dict[str, Any]:
        """The object `details` of Ollama's lists of models.

        Args:
            parent: name of the model that an adapter belongs to.
        """
        return {
            "parent_model": parent,
            "format": "gguf" if is_gguf(self.path) else "safetensors",
            "family": self.config.family,
            "families": [self.config.family],
            "parameter_size": _rounded(self.num_parameters),
            "quantization_level": self.quantization,
        }


def _rounded(count: int) -> str:
    """A number of parameters as Ollama writes it: 134.52M, 8.0B."""
    return f"{count / 1e9:.1f}B" if count >= 1e9 else f"{count / 1e6:.2f}M" if count >= 1e6 else f"{count / 1e3:.2f}K"
