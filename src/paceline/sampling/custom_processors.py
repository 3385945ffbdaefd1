"""Processors that a user brings along: called with the text so far and a copy of the scores, and never trusted."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from paceline.errors import RequestError, is_interrupt
from paceline.sampling.history import TokenView
from paceline.sampling.params import CustomProcessor


class CustomProcessors:
    """Runs a request's own processors, in order.

    Args:
        processors: each gets (token ids of prompt + output + path, a copy of the scores [V] float32) and returns scores [V] float32.
            They run for guesses too, in any order and more than once for the same text, so they must depend on nothing else.
        token_ids: the prompt.
    """

    def __init__(self, processors: Sequence[CustomProcessor], token_ids: Sequence[int]) -> None:
        self._processors = processors
        self._token_ids = [int(token_id) for token_id in token_ids]

    def commit(self, token_id: int) -> None:
        """Record that a token became part of the output."""
        self._token_ids.append(token_id)

    def mask(self, scores: NDArray[np.float32], path: Sequence[int]) -> None:
        """Replace the scores after prompt + output + `path` by what the processors return, in place.

        Raises:
            RequestError: a processor raises, or returns something else than usable scores.
        """
        text = TokenView(self._token_ids, path)
        for processor in self._processors:
            scores[:] = _checked(_call(processor, text, scores.copy()), processor, len(scores))


def _call(processor: CustomProcessor, text: TokenView, scores: NDArray[np.float32]) -> object:
    try:
        return processor(text, scores)
    except BaseException as error:  # a user's code may raise anything; it ends this request only
        if is_interrupt(error):
            raise
        raise _refusal(processor, f"raised {type(error).__name__}: {error}") from error


def _checked(scores: object, processor: CustomProcessor, vocab_size: int) -> NDArray[np.float32]:
    if not isinstance(scores, np.ndarray):
        raise _refusal(processor, f"returned {type(scores).__name__}; it must return the scores, a numpy array")
    if scores.shape != (vocab_size,):
        raise _refusal(processor, f"returned scores of shape {scores.shape}; they must have the shape they came in, ({vocab_size},)")
    if scores.dtype != np.float32:
        raise _refusal(processor, f"returned {scores.dtype} scores; they must stay float32: return scores.astype(numpy.float32)")
    peak = scores.max()  # NaN if there is one
    if np.isnan(peak) or peak == np.inf:
        raise _refusal(processor, f"returned {'NaN' if np.isnan(peak) else 'inf'} scores; to force a token set all others to -inf")
    return scores


def _refusal(processor: CustomProcessor, reason: str) -> RequestError:
    name = getattr(processor, "__qualname__", type(processor).__qualname__)
    return RequestError(f"processors: {name} {reason}", parameter="processors")
