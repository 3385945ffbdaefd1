"""Read the facts of a checkpoint from headers and tokenizer files; no weights are read, no heavy library is imported."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as Backend

from paceline.errors import CheckpointError, convert_library_errors, convert_memory_errors
from paceline.models.checkpoint import is_gguf, open_weights, read_model_config, stored_bytes, stored_type
from paceline.models.config import ModelConfig
from paceline.models.gguf.file import open_gguf
from paceline.models.tensor_names import num_parameters
from paceline.models.weights import Weights
from paceline.small_files import TOKENIZER_BYTES, read_small
from paceline.tokenizer.backend import TokenizerBackend
from paceline.tokenizer.vocabulary import SAMPLE_TEXT


@dataclass(frozen=True, slots=True)
class TokenizerFacts:
    """The tokenizer facts that a pairing check needs.

    Attributes:
        pieces: vocabulary pieces by id.
        sample_ids: token ids of `vocabulary.SAMPLE_TEXT`.
    """

    pieces: list[str]
    sample_ids: list[int]


@dataclass(frozen=True, slots=True)
class CheckpointFacts:
    """A checkpoint whose headers are whole and hold what its config calls for.

    Attributes:
        path: the directory or file.
        stored_bytes: size of its weight files.
        num_parameters: values of all tensors.
        stored_as: quantisation or float type of the weights.
        tokenizer: None where it cannot be read without converting it.
    """

    path: Path
    config: ModelConfig
    weights: Weights
    stored_bytes: int
    num_parameters: int
    stored_as: str
    tokenizer: TokenizerFacts | None

    def as_dict(self) -> dict[str, Any]:
        config = self.config
        return {
            "path": str(self.path),
            "family": config.family,
            "stored_as": self.stored_as,
            "parameters": self.num_parameters,
            "stored_bytes": self.stored_bytes,
            "layers": config.num_layers,
            "hidden_size": config.hidden_size,
            "heads": config.attention.num_heads,
            "kv_heads": config.attention.num_kv_heads,
            "head_size": config.attention.head_size,
            "max_model_len": config.max_positions,
            "sliding_window": config.sliding_window,
            "vocabulary_rows": config.vocab_size,
            "vocabulary_ids": None if self.tokenizer is None else len(self.tokenizer.pieces),
            "eos_token_ids": list(config.eos_token_ids),
        }


@convert_memory_errors("the checkpoint's metadata")
def read_checkpoint_facts(path: Path, max_model_len: int | None = None) -> CheckpointFacts:
    """Read the facts of a checkpoint, and check its headers against its config.

    Args:
        max_model_len: what it is to be run with; some models compute differently for long texts.

    Raises:
        CheckpointError: a file is missing, damaged or not one we run.
    """
    config = read_model_config(path).for_context(max_model_len)
    weights = open_weights(path, config)
    return CheckpointFacts(
        path,
        config,
        weights,
        stored_bytes(path),
        num_parameters(config),
        f"{'gguf' if is_gguf(path) else 'safetensors'}, {stored_type(path, weights, config)}",
        read_tokenizer(path),
    )


def read_tokenizer(path: Path) -> TokenizerFacts | None:
    """Return the tokenizer of a checkpoint, None where it cannot be read without being converted.

    Raises:
        CheckpointError: it is damaged.
    """
    backend: Backend | None
    if is_gguf(path):
        from paceline.tokenizer.gguf import read_gguf_tokenizer

        backend = read_gguf_tokenizer(open_gguf(path).metadata, path).backend_tokenizer
    else:
        backend = _backend(path / "tokenizer.json")
    if backend is None:
        return None
    vocabulary = TokenizerBackend(backend).vocabulary
    pieces = [""] * (max(vocabulary.values()) + 1)
    for piece, token_id in vocabulary.items():
        pieces[token_id] = piece
    with convert_library_errors(f"{path}: its tokenizer cannot encode a text; download it again", CheckpointError):
        return TokenizerFacts(pieces, backend.encode(SAMPLE_TEXT, add_special_tokens=False).ids)


def _backend(path: Path) -> Backend | None:
    content = read_small(path, TOKENIZER_BYTES)
    if content is None:
        return None
    with convert_library_errors(f"{path} cannot be read as a tokenizer; download the file again", CheckpointError):
        backend = Backend.from_str(content.decode("utf-8"))
        backend.no_padding()  # padding that the file asks for may have any length
        backend.no_truncation()
        return backend
