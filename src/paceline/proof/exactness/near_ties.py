"""Could a token have been chosen if logits were off by no more than the noise bound? By scores, by noisy scores, and by the borders of
top-k, top-p and min-p.
"""

import math
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from paceline.engine.input_processor import InputProcessor
from paceline.errors import PacelineError
from paceline.runtimes.base import FloatArray
from paceline.sampling.draw import draw, gumbel_scores
from paceline.sampling.noise import Purpose, noise_bits
from paceline.sampling.params import SamplingParams
from paceline.sampling.processors import LogitsProcessor

ScoreArray = NDArray[np.float64]
BoolArray = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Decision:
    """How close a token came to being chosen from a row.

    Attributes:
        margin: score that it lacks to the best of those that are surely kept; 0 where it is the best.
        bound: what a score may be off, in the same units: the noise bound of logits after penalties and temperature.
        may_be_kept: whether top-k, top-p and min-p may keep it, if scores are off by as much.
    """

    margin: float
    bound: float
    may_be_kept: bool

    @property
    def is_near(self) -> bool:
        """Whether noise may have decided."""
        return self.may_be_kept and self.margin < self.bound


@dataclass(frozen=True, slots=True)
class Place:
    """A position of an output: everything that decides its token besides the row.

    Attributes:
        text: prompt and output before it.
        num_prompt_tokens: of them.
    """

    params: SamplingParams
    text: tuple[int, ...]
    num_prompt_tokens: int

    def processor(self, input_processor: InputProcessor, params: SamplingParams) -> LogitsProcessor:
        """A processor that knows the text."""
        processor = input_processor.make(self.text[: self.num_prompt_tokens], params, is_streamed=False).processor
        for token in self.text[self.num_prompt_tokens :]:
            processor.commit(token)
        return processor

    def drawn(self, row: FloatArray, input_processor: InputProcessor) -> int | None:
        """The token that a row gives here; None where it gives none."""
        try:
            return draw(self.processor(input_processor, self.params).process(row), self.params.seed or 0, 0, len(self.text))
        except PacelineError:
            return None


def decide(row: FloatArray, token: int, place: Place, input_processor: InputProcessor, noise_bound: float) -> Decision:
    """How close `token` came to being chosen from plain decoding's row.

    Args:
        row: [V] float32 logits.
        noise_bound: of logits.
    """
    params = place.params
    penalty = params.repetition_penalty
    bound = noise_bound * max(1.0, penalty, 1.0 / penalty)
    unrestricted = replace(params, top_k=0, top_p=1.0, min_p=0.0)
    scores = place.processor(input_processor, unrestricted).process(row).scores.astype(np.float64)
    if params.is_greedy:
        return Decision(max(0.0, float(scores.max() - scores[token])), bound, may_be_kept=True)
    bound /= params.temperature
    maybe, surely = kept_sets(scores, params, bound)
    values = gumbel_scores(scores, noise_bits(params.seed or 0, 0, len(place.text), Purpose.TOKEN, len(scores)))
    best = float(values[surely].max()) if surely.any() else -math.inf
    return Decision(max(0.0, best - float(values[token])), bound, bool(maybe[token]))


def kept_sets(scores: ScoreArray, params: SamplingParams, bound: float) -> tuple[BoolArray, BoolArray]:
    """Which ids top-k, top-p and min-p may keep, and which they surely keep, if scores are off by up to `bound` against one another.

    Args:
        scores: [V] log-probabilities up to a constant, -inf = excluded.
    """
    maybe = scores > -np.inf
    surely = maybe.copy()
    if 0 < params.top_k < len(scores):
        ranked = np.sort(scores)[::-1]
        maybe &= scores >= ranked[params.top_k - 1] - bound
        surely &= scores > ranked[params.top_k] + bound
    if params.top_p < 1.0:
        low, high = _mass_before(scores, maybe, surely, bound)
        maybe &= low < params.top_p
        surely &= high < params.top_p
    if params.min_p > 0.0:
        border = scores.max() + math.log(params.min_p)
        maybe &= scores >= border - bound
        surely &= scores >= border + bound
    return maybe, surely


def _mass_before(scores: ScoreArray, maybe: BoolArray, surely: BoolArray, bound: float) -> tuple[ScoreArray, ScoreArray]:
    """Least and most of the mass of those ranked before each id."""
    weights = np.exp(scores - scores.max())
    least_total, most_total = weights[surely].sum(), weights[maybe].sum()
    order = np.argsort(-scores, kind="stable")
    falling = -scores[order]  # ascending
    of_sure = np.concatenate(([0.0], np.cumsum(np.where(surely, weights, 0.0)[order])))
    of_maybe = np.concatenate(([0.0], np.cumsum(np.where(maybe, weights, 0.0)[order])))
    with np.errstate(invalid="ignore"):
        before = np.searchsorted(falling, -(scores + bound), side="left")  # those that are better by more than the bound
        up_to = np.searchsorted(falling, -(scores - bound), side="right")  # those that are not worse by more than the bound
    low = of_sure[before] / max(most_total, 1e-300) * math.exp(-bound)
    high = (of_maybe[up_to] - np.where(maybe, weights, 0.0)) / max(least_total, 1e-300) * math.exp(bound)
    return low, high
