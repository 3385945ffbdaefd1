"""Compare one output with plain decoding: token ids, rows of logits, log-probabilities, text and end.

With fast numerics a differing token is a near-tie if rounding errors up to the noise bound can have decided it, else a bug."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.engine.input_processor import InputProcessor
from paceline.errors import PacelineError
from paceline.outputs import RequestOutput
from paceline.proof.exactness.engine_under_test import ReferenceOutput, ReferenceOutputs, RowRecorder, max_abs_difference
from paceline.runtimes.base import FloatArray
from paceline.sampling.draw import draw, gumbel_scores
from paceline.sampling.logprobs import TokenLogprobs
from paceline.sampling.noise import Purpose, noise_bits
from paceline.sampling.params import SamplingParams
from paceline.sampling.processors import LogitsProcessor

ScoreArray = NDArray[np.float64]
BoolArray = NDArray[np.bool_]


class Status(StrEnum):
    """Classification of a difference between two outputs. Its members are strings, which JSON can hold."""

    BUG = "bug"
    NEAR_TIE = "near-tie"


class Kind(StrEnum):
    """The first kind of difference that was found."""

    TOKENS = "tokens"
    ROWS = "rows"  # logits differ, tokens are equal
    LOGPROBS = "logprobs"
    PROMPT_LOGPROBS = "prompt logprobs"
    TEXT = "text"
    END = "end"  # length or finish reason differs
    ERROR = "error"  # an exception, where plain decoding returned an output
    CACHE = "cache"  # the cache is inconsistent after the case
    LOAD = "load"  # numerics are reported as exact, but passes of 1 and 8 rows differ


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One difference between an output and its reference.

    Attributes:
        case: number of the case; None = found when the model was loaded.
        request: index of the request in the case; None = of no single one.
        run: 0, or 1 for the second run, which reuses cached rows of run 0.
        position: output index of the first place that differs; None = no single one.
        plain_token, token: what plain decoding and the case have there.
        plain_piece, piece: these tokens as the tokenizer spells them; a model's text, not to be trusted.
        plain_logprob, logprob: log-probability of each token there, if requested.
        rows_differ_by: largest |difference| of the two rows of logits there; None = not known.
        margin: score that the token lacks in plain decoding's row; None where no token differs.
        bound: what margin and rows may differ by; 0 where numerics are exact.
        step: the draft of the step that chose the token; None = not known.
        details: explanation for people.
    """

    kind: Kind
    status: Status
    details: str
    case: int | None = None
    request: int | None = None
    run: int = 0
    position: int | None = None
    plain_token: int | None = None
    token: int | None = None
    plain_piece: str | None = None
    piece: str | None = None
    plain_logprob: float | None = None
    logprob: float | None = None
    rows_differ_by: float | None = None
    margin: float | None = None
    bound: float = 0.0
    step: Mapping[str, Any] | None = None

    def as_dict(self) -> dict[str, Any]:
        """Return the JSON object, which has no infinite numbers: they are null, such as the margin of a token that cannot be drawn."""
        return {name: finite(getattr(self, name)) for name in self.__dataclass_fields__}


def finite(value: Any) -> Any:
    """Return the value, or None for a number that is not finite."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


@dataclass(frozen=True, slots=True)
class NearTieCheck:
    """How close a token was to being chosen from a row of logits.

    Attributes:
        margin: score that it lacks to the best of those that are surely kept; 0 where it is the best.
        bound: what a score may be off, in the same units: the noise bound of logits after penalties and temperature.
        may_be_kept: whether top-k, top-p and min-p may keep it if scores are off by `bound`.
    """

    margin: float
    bound: float
    may_be_kept: bool

    @property
    def is_near(self) -> bool:
        """Whether rounding alone may have changed the token."""
        return self.may_be_kept and self.margin < self.bound


@dataclass(frozen=True, slots=True)
class OutputPosition:
    """A position of an output: everything but the row of logits that its token depends on.

    Attributes:
        text: prompt and output before it.
        num_prompt_tokens: of them.
    """

    params: SamplingParams
    text: tuple[int, ...]
    num_prompt_tokens: int

    def processor(self, input_processor: InputProcessor, params: SamplingParams) -> LogitsProcessor:
        processor = input_processor.make_request(self.text[: self.num_prompt_tokens], params, is_streamed=False).processor
        for token in self.text[self.num_prompt_tokens :]:
            processor.commit(token)
        return processor

    def drawn(self, row: FloatArray, input_processor: InputProcessor) -> int | None:
        """Return the token drawn from a row at this position; None where none can be drawn."""
        try:
            return draw(self.processor(input_processor, self.params).process(row), self.params.seed or 0, 0, len(self.text))
        except PacelineError:
            return None


def decide(row: FloatArray, token: int, place: OutputPosition, input_processor: InputProcessor, noise_bound: float) -> NearTieCheck:
    """Return how close `token` was to being chosen from plain decoding's row of logits.

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
        return NearTieCheck(max(0.0, float(scores.max() - scores[token])), bound, may_be_kept=True)
    bound /= params.temperature
    maybe, surely = kept_sets(scores, params, bound)
    values = gumbel_scores(scores, noise_bits(params.seed or 0, 0, len(place.text), Purpose.TOKEN, len(scores)))
    best = float(values[surely].max()) if surely.any() else -math.inf
    return NearTieCheck(max(0.0, best - float(values[token])), bound, bool(maybe[token]))


def kept_sets(scores: ScoreArray, params: SamplingParams, bound: float) -> tuple[BoolArray, BoolArray]:
    """Return the ids that top-k, top-p and min-p may keep, and those they surely keep, if scores are off by up to `bound`.

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
    """Return bounds of the probability mass ranked before each id."""
    weights = np.exp(scores - scores.max())
    least_total, most_total = weights[surely].sum(), weights[maybe].sum()
    order = np.argsort(-scores, kind="stable")
    falling = -scores[order]  # ascending
    of_sure = np.concatenate(([0.0], np.cumsum(np.where(surely, weights, 0.0)[order])))
    of_maybe = np.concatenate(([0.0], np.cumsum(np.where(maybe, weights, 0.0)[order])))
    with np.errstate(invalid="ignore"):
        before = np.searchsorted(falling, -(scores + bound), side="left")  # number of tokens with a score higher by more than the bound
        up_to = np.searchsorted(falling, -(scores - bound), side="right")  # number of tokens with a score not lower by more than the bound
    low = of_sure[before] / max(most_total, 1e-300) * math.exp(-bound)
    high = (of_maybe[up_to] - np.where(maybe, weights, 0.0)) / max(least_total, 1e-300) * math.exp(bound)
    return low, high


class OutputComparer:
    """Compares outputs with reference outputs.

    Args:
        noise_bound: of logits; 0 where numerics are exact, and then every difference is a bug.
    """

    def __init__(self, input_processor: InputProcessor, references: ReferenceOutputs, noise_bound: float, *, is_exact: bool) -> None:
        self._input_processor, self._references = input_processor, references
        self._bound, self._is_exact = noise_bound, is_exact

    def compare(
        self, output: RequestOutput, recorder: RowRecorder, reference: ReferenceOutput, *, case: int, request: int, run: int
    ) -> tuple[int, int, Finding | None]:
        """Compare an output with plain decoding.

        Args:
            recorder: its rows.
            case, request, run: location for the finding.

        Returns:
            the number of output tokens compared, the first one that differs included; of rows of logits compared; and the first
            difference, None = all is equal.
        """
        place = partial(Finding, case=case, request=request, run=run, bound=self._bound)
        plain = reference.output
        same = _num_equal(output.token_ids, plain.token_ids)
        has_ended = same == min(len(output.token_ids), len(plain.token_ids))
        num_tokens = same if has_ended else same + 1
        num_rows, row_at, difference = self._compare_rows(recorder, reference, num_tokens)
        finding: Finding | None = None
        if not has_ended:
            finding = self._of_tokens(output, recorder, reference, same, row_at, place)
        elif len(output.token_ids) != len(plain.token_ids) or output.finish_reason != plain.finish_reason:
            finding = place(
                kind=Kind.END, status=Status.BUG, position=same,
                details=f"{_end(output)}; plain: {_end(plain)}",
            )  # fmt: skip
        elif row_at is not None:
            token = plain.token_ids[row_at]
            finding = place(
                kind=Kind.ROWS, status=Status.BUG, position=row_at, plain_token=token, token=token, rows_differ_by=difference,
                details="the tokens agree, the target's logits do not",
            )  # fmt: skip
        else:
            is_processed = reference.params.logprobs_mode == "processed"
            finding = self._of_logprobs(output, plain, place, is_processed=is_processed) or _of_text(output, plain, place)
        return num_tokens, num_rows, finding

    def _compare_rows(self, recorder: RowRecorder, reference: ReferenceOutput, length: int) -> tuple[int, int | None, float | None]:
        """Return the number of compared rows, the first position where rows differ, and the difference if known."""
        if self._is_exact:
            both = [index for index in range(length) if index in recorder.checksums and index in reference.checksums]
            return len(both), next((index for index in both if recorder.checksums[index] != reference.checksums[index]), None), None
        both = [index for index in sorted(reference.rows) if index in recorder.rows and index < length and index != recorder.diverged_at]
        for index in both:
            difference = max_abs_difference(recorder.rows[index], reference.rows[index])
            if not difference < self._bound:
                return len(both), index, difference
        return len(both), None, None

    def _of_tokens(
        self,
        output: RequestOutput,
        recorder: RowRecorder,
        reference: ReferenceOutput,
        at: int,
        row_at: int | None,
        place: "partial[Finding]",
    ) -> Finding:
        plain = reference.output
        token, plain_token = output.token_ids[at], plain.token_ids[at]
        own_row, plain_row = recorder.rows.get(at), self._references.row(reference, at)
        here = partial(
            place, kind=Kind.TOKENS, position=at, plain_token=plain_token, token=token,
            plain_logprob=_logprob(plain.logprobs, at), logprob=_logprob(output.logprobs, at), step=_step(output, at),
            plain_piece=self._input_processor.tokenizer.piece(plain_token), piece=self._input_processor.tokenizer.piece(token),
        )  # fmt: skip
        if own_row is None or plain_row is None:
            return here(status=Status.BUG, details="no row of the target was seen where this token was chosen")
        apart = max_abs_difference(own_row, plain_row)
        prefix = (*reference.prompt_token_ids, *plain.token_ids[:at])
        where = OutputPosition(reference.params, prefix, len(reference.prompt_token_ids))
        drawn = where.drawn(own_row, self._input_processor)
        decision = decide(plain_row, token, where, self._input_processor, self._bound)
        here = partial(here, rows_differ_by=apart, margin=decision.margin)
        if self._is_exact:
            rows = f"rows differ from position {row_at} on" if row_at is not None else "the rows are the same, the choice is not"
            return here(status=Status.BUG, details=f"numerics are exact: any difference is a bug; {rows}")
        if row_at is not None:
            return here(status=Status.BUG, details=f"rows differ by more than the noise bound already at position {row_at}")
        if not apart < self._bound:
            return here(status=Status.BUG, details="the rows differ by more than the noise bound")
        if drawn != token:
            return here(status=Status.BUG, details=f"its own row gives token {drawn}")
        if not decision.is_near:
            return here(status=Status.BUG, details="rows differ by noise only, and this is no near-tie")
        return here(status=Status.NEAR_TIE, bound=decision.bound, details="rows differ by noise only, and noise decided")

    def _of_logprobs(self, output: RequestOutput, plain: RequestOutput, place: "partial[Finding]", *, is_processed: bool) -> Finding | None:
        """Return the first difference of log-probabilities of equal tokens."""
        pairs = [(Kind.LOGPROBS, output.logprobs, plain.logprobs), (Kind.PROMPT_LOGPROBS, output.prompt_logprobs, plain.prompt_logprobs)]
        if is_processed and not self._is_exact:  # rounding may change which tokens top-k and top-p keep, and so every probability
            del pairs[0]
        for kind, own, other in pairs:
            if (own is None) != (other is None) or len(own or ()) != len(other or ()):
                return place(kind=kind, status=Status.BUG, details=f"{len(own or ())} log-probabilities, plain {len(other or ())}")
            for index, (one, reference) in enumerate(zip(own or (), other or (), strict=True)):
                if not self._agree(one, reference):
                    return place(
                        kind=kind, status=Status.BUG, position=index,
                        plain_token=reference and reference.token_id, token=one and one.token_id,
                        plain_logprob=reference and reference.logprob, logprob=one and one.logprob,
                        details="log-probability, rank or the best tokens differ",
                    )  # fmt: skip
        return None

    def _agree(self, one: TokenLogprobs | None, other: TokenLogprobs | None) -> bool:
        """Whether two are the same: to the bit, or where numerics are fast as far as noise goes."""
        if self._is_exact or one is None or other is None:
            return one == other
        return one.token_id == other.token_id and (one.logprob == other.logprob or abs(one.logprob - other.logprob) < 2.0 * self._bound)


def _num_equal(one: Sequence[int], other: Sequence[int]) -> int:
    return next((index for index, (left, right) in enumerate(zip(one, other, strict=False)) if left != right), min(len(one), len(other)))


def _logprob(logprobs: Sequence[TokenLogprobs] | None, index: int) -> float | None:
    """Return a log-probability; None where there is none or it is not finite."""
    if logprobs is None or index >= len(logprobs) or not math.isfinite(logprobs[index].logprob):
        return None
    return logprobs[index].logprob


def _of_text(output: RequestOutput, plain: RequestOutput, place: "partial[Finding]") -> Finding | None:
    if output.text == plain.text:
        return None
    at = _num_equal([*map(ord, output.text)], [*map(ord, plain.text)])
    return place(kind=Kind.TEXT, status=Status.BUG, details=f"the same tokens, but the texts differ from character {at} on")


def _step(output: RequestOutput, index: int) -> dict[str, Any] | None:
    found = next((one for one in output.steps or () if one.start <= index < one.start + len(one.token_ids)), None)
    return None if found is None else found.as_dict()


def _end(output: RequestOutput) -> str:
    return f"{len(output.token_ids)} tokens, then {output.finish_reason}"
