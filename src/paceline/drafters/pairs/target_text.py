"""Short texts drawn from a target, with its activations: heads are calibrated on them."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from paceline.kv_cache.cache import CachedSequence, KVCache
from paceline.runtimes.base import FloatArray, Network, assemble
from paceline.sampling.draw import draw
from paceline.sampling.params import SamplingParams
from paceline.sampling.processors import LogitsProcessor
from paceline.tokenizer.tokenizer import Tokenizer
from paceline.tokenizer.vocabulary import SAMPLE_TEXT

NUM_SEQUENCES, LENGTH = 8, 24
"""Several short texts in a batch take no more passes than one."""

_PROMPT_LEN = 8
_LEAST_LEN, _LEAST_ROWS = 12, 48
_PIECE = 48  # characters of a prompt


@dataclass(frozen=True, slots=True)
class TargetText:
    """Texts a target drew token by token, at temperature 1.

    Attributes:
        token_ids: [B, T].
        argmaxes: [B, T] its greedy next token behind each of them.
        hidden_states: [B, T, E] behind the final norm.
        collected: [B, C, T, E] at the boundaries its runtime collects; C may be 0.
    """

    token_ids: NDArray[np.int32]
    argmaxes: NDArray[np.int64]
    hidden_states: FloatArray
    collected: FloatArray


def draw_text(target: Network, cache: KVCache, tokenizer: Tokenizer, *, vocab_size: int, max_model_len: int) -> TargetText | None:
    """Texts drawn from a target, beside whatever its cache holds; None if the cache has too little room.

    Args:
        cache: the runtime's.
        vocab_size: ids that may be drawn.
        max_model_len: positions the runtime is prepared for.
    """
    length, count = min(LENGTH, max_model_len - 1), min(NUM_SEQUENCES, cache.pool.num_free // 2)
    if length < _LEAST_LEN or length * count < _LEAST_ROWS:
        return None
    texts = _beginnings(tokenizer, count)
    sequences = [cache.new_sequence() for _ in range(count)]
    processors = [LogitsProcessor(SamplingParams(temperature=1.0), vocab_size, text) for text in texts]
    argmaxes: list[NDArray[np.int64]] = []
    hidden: list[FloatArray] = []
    collected: list[FloatArray] = []
    try:
        while (start := sequences[0].committed_len) < length:
            new_ids = [text[start:] for text in texts]
            logits, states, boundaries = _run(target, cache, sequences, new_ids)
            argmaxes.append(logits[..., :vocab_size].argmax(axis=-1))
            hidden.append(states)
            collected.append(boundaries)
            for index, text in enumerate(texts):
                text.append(draw(processors[index].process(logits[index, -1, :vocab_size]), index, 0, len(text)))
    finally:
        for sequence in sequences:
            cache.release(sequence)
    token_ids = np.array([text[:length] for text in texts], np.int32)
    return TargetText(token_ids, np.concatenate(argmaxes, 1), np.concatenate(hidden, 1), np.concatenate(collected, 2))


def _beginnings(tokenizer: Tokenizer, count: int) -> list[list[int]]:
    """The first tokens of different pieces of the sample text, equally many of each."""
    words = SAMPLE_TEXT.split(" ")
    pieces = [" ".join(words[len(words) * index // count :])[:_PIECE] for index in range(count)]
    encoded = [tokenizer.encode(piece) for piece in pieces]
    length = max(1, min(_PROMPT_LEN, *(len(ids) for ids in encoded)))
    return [ids[:length] or [0] for ids in encoded]


def _run(
    target: Network, cache: KVCache, sequences: Sequence[CachedSequence], new_ids: Sequence[list[int]]
) -> tuple[FloatArray, FloatArray, FloatArray]:
    """One pass over equally many tokens of each sequence: logits [B, T, V], hidden states [B, T, E] and boundaries [B, C, T, E], copies."""
    count = len(new_ids[0])
    plans = [cache.reserve(sequence, range(-1, count - 1), count) for sequence in sequences]
    output = target.forward(*assemble(plans, new_ids, [range(count)] * len(plans)))
    rows, first = [], 0
    for plan, sequence in zip(plans, sequences, strict=True):
        rows.append([first + row for row in plan.row_of_node])
        first += plan.num_rows
        cache.keep_path(sequence, count - 1)
    states = output.hidden_states[rows]
    collected = output.collected_hidden_states
    boundaries = np.zeros((len(plans), 0, *states.shape[1:]), np.float32) if collected is None else collected[:, rows].swapaxes(0, 1)
    return output.logits.reshape(len(plans), count, -1).copy(), states, boundaries
