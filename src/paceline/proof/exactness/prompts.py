"""Prompts: a user's own, or cuts of a sample text around the borders of cache blocks."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import numpy as np

from paceline.engine.input_processor import InputProcessor
from paceline.errors import CheckpointError, ConfigError, RequestError
from paceline.kv_cache.cache import BLOCK_SIZE
from paceline.small_files import read_small
from paceline.tokenizer.vocabulary import SAMPLE_TEXT

MOST_OF_A_ROUND = 8
"""Prompts of a file that one round of cases combines with everything else; the next round takes others."""
_FILE_BYTES = 64 << 20
_LENGTHS = {
    "a few tokens": (1, 6),
    "below a block": (BLOCK_SIZE - 8, BLOCK_SIZE - 1),
    "a block's border": (BLOCK_SIZE, BLOCK_SIZE + 1),
    "some blocks": (2 * BLOCK_SIZE, 3 * BLOCK_SIZE + 2),
    "many blocks": (4 * BLOCK_SIZE, 6 * BLOCK_SIZE),
}
_NO_TEXT = "no text"


class PromptSource(Protocol):
    """Where prompts come from."""

    @property
    def kinds(self) -> Sequence[str]:
        """Names of the kinds of prompts; each round has one of each."""
        ...

    def prompt(self, kind: str, round_number: int) -> tuple[int, ...]:
        """The ids of a round's prompt of one kind."""
        ...


class SamplePrompts:
    """Cuts of the sample text, other ones in each round, and ids that make no text.

    Args:
        input_processor: encodes.
        seed: of the cuts.
        longest: tokens a prompt may have.
    """

    def __init__(self, input_processor: InputProcessor, seed: int, *, longest: int) -> None:
        self._vocab_size, self._seed, self._longest = input_processor.vocab_size, seed, longest
        ids = [
            token for token in input_processor.tokenizer.encode(SAMPLE_TEXT, add_special_tokens=False) if token < input_processor.vocab_size
        ]
        self._text = ids * (1 + 2 * _LENGTHS["many blocks"][1] // max(1, len(ids)))

    @property
    def kinds(self) -> Sequence[str]:
        return [*(kind for kind, (least, _) in _LENGTHS.items() if least <= self._longest), _NO_TEXT]

    def prompt(self, kind: str, round_number: int) -> tuple[int, ...]:
        random = np.random.default_rng([self._seed, round_number, self.kinds.index(kind)])
        if kind == _NO_TEXT:
            length = min(int(random.integers(4, 2 * BLOCK_SIZE)), self._longest)
            return tuple(random.integers(0, self._vocab_size, length).tolist())
        least, most = _LENGTHS[kind]
        length = int(random.integers(least, min(most, self._longest) + 1))
        start = int(random.integers(0, len(self._text) - length))
        return tuple(self._text[start : start + length])


class GivenPrompts:
    """A user's prompts, some of them in each round.

    Args:
        prompts: ids of each; at least one.
    """

    def __init__(self, prompts: Sequence[Sequence[int]]) -> None:
        self._prompts = [tuple(prompt) for prompt in prompts]

    @property
    def kinds(self) -> Sequence[str]:
        return [f"prompt {index + 1}" for index in range(min(len(self._prompts), MOST_OF_A_ROUND))]

    def prompt(self, kind: str, round_number: int) -> tuple[int, ...]:
        index = self.kinds.index(kind) + round_number * MOST_OF_A_ROUND
        return self._prompts[index % len(self._prompts)]


def read_prompts(path: Path, input_processor: InputProcessor, *, longest: int) -> GivenPrompts:
    """A file with a prompt a line: a text, or a JSON object with "prompt" or "prompt_token_ids".

    Args:
        longest: tokens a prompt may have.

    Raises:
        ConfigError: there is no such file, or no prompt in it.
        RequestError: a line is no prompt that the model takes.
    """
    try:
        content = read_small(path, _FILE_BYTES)
    except CheckpointError as error:
        raise ConfigError(f"--prompts {path} cannot be read ({error}): give a text file with a prompt a line") from error
    if content is None:
        raise ConfigError(f"--prompts {path}: there is no such file; give a text file with a prompt a line")
    try:
        lines = content.decode("utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise ConfigError(f"--prompts {path} is not UTF-8 text at byte {error.start}: convert it first") from None
    prompts = [_ids_of(line, f"{path} line {number}", input_processor) for number, line in enumerate(lines, 1) if line.strip()]
    if not prompts:
        raise ConfigError(f"--prompts {path} holds no prompt: give a text file with a prompt a line")
    for number, prompt in enumerate(prompts, 1):
        if len(prompt) > longest:
            raise RequestError(
                f"prompt {number} of {path} has {len(prompt)} tokens, there is room for {longest}: raise --max-model-len or shorten it",
                parameter="prompt",
            )
    return GivenPrompts(prompts)


def _ids_of(line: str, where: str, input_processor: InputProcessor) -> list[int]:
    given: object = line
    if line.lstrip().startswith("{"):
        try:
            given = json.loads(line)
        except ValueError as error:
            raise RequestError(f"{where} begins as a JSON object and is none ({error}): mend it", parameter="prompt") from None
    try:
        return input_processor.prompt_ids(given)  # type: ignore[arg-type]  # checked there
    except RequestError as error:
        raise RequestError(f"{where}: {error}", parameter="prompt") from None
