"""Cost model: the seconds of a step that verifies k draft tokens in addition to n other rows.

    step_s(k) = a * forward_s(n) + b * (forward_s(n + k) - forward_s(n)) + host_a * sequences + host_b * k

`forward_s` is the profile measured at load (`ForwardProfile`). The factors a and b are 1 at first. They are fitted to measured steps, which
corrects the profile within tens of steps if the machine becomes slower. The host's time and that of drafters are fitted in the same way.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum, auto

from paceline.runtimes.cost import PROFILED_CONTEXT_LEN, ForwardProfile
from paceline.speculation.request_rows import RequestRows

FORGETTING_FACTOR = 0.96  # each new time sample multiplies the weight of the earlier samples in a fit by this
STALL_SPEEDUP = 3.0  # a sample this many times faster than expected shows that the machine was stalled during the samples before it
STALL_FORGETTING_FACTOR = 0.1  # the first sample after a stall of the machine multiplies the weight of earlier samples by this
MAX_SLOWDOWN = 1.5  # samples are limited to this multiple of the expected time, because the machine may have stalled
MIN_Y_SHARE = 1e-6  # in the fit seconds = a * x + b * y: if sum(y * y) / sum(x * x) is below this, samples do not determine b
MIN_STEP_S = 1e-7  # lower limit of the predicted seconds of a step without drafts: noise can make a fit predict zero
PRIOR_SAMPLES = 0.25  # the expected ratio b / a counts as this many samples in a fit
RATIO_LEARNING_RATE = 0.5  # how far a sample with y > 0 moves the expected b / a to the fitted one
USUAL_DRAFT_TOKENS = 4.0  # usual number of draft tokens in a step, for the fit of the time outside of the target's pass
MIN_PROPOSALS = 8  # `propose` calls until a drafter's times are used: the first ones also allocate memory and load kernels


class LinearCost:
    """seconds = a * x + b * y with a, b >= 0, fitted by least squares with exponential forgetting.

    Args:
        ratio: expected b / a. A ridge penalty, with the weight of `PRIOR_SAMPLES` samples at `usual_y`, keeps b near ratio * a until
            samples with y > 0 arrive. These samples move the ratio, but never above its first value: if a disturbance made y look
            costly, steps with y > 0 stop, and only the expected ratio can bring them back.
        usual_y: a sample with a larger y is scaled down to this y, so that no sample determines b alone; 0 = no scaling and no penalty.
    """

    __slots__ = ("_max_ratio", "_ratio", "_ridge", "_usual_y", "_xs", "_xx", "_xy", "_ys", "_yy", "a", "b", "is_known")

    def __init__(self, *, ratio: float = 0.0, usual_y: float = 0.0) -> None:
        self._ratio, self._max_ratio, self._usual_y, self._ridge = ratio, ratio, usual_y, PRIOR_SAMPLES * usual_y**2
        self.a = self.b = self._xx = self._xy = self._yy = self._xs = self._ys = 0.0
        self.is_known = False

    def seconds_at(self, x: float, y: float) -> float:
        """Return a * x + b * y, the expected seconds; 0 before the first sample."""
        return self.a * x + self.b * y

    def observe(self, x: float, y: float, seconds: float) -> None:
        """Add a measured time, with its x and y, to the fit."""
        decay = FORGETTING_FACTOR
        if self.is_known:
            expected = self.seconds_at(x, y)
            seconds = min(seconds, MAX_SLOWDOWN * expected + 1e-5)
            if STALL_SPEEDUP * seconds < expected:
                decay = STALL_FORGETTING_FACTOR
        self.is_known = True
        if 0.0 < self._usual_y < y:
            weight = self._usual_y / y
            x, y, seconds = weight * x, weight * y, weight * seconds
        self._xx, self._xy, self._yy = decay * self._xx + x * x, decay * self._xy + x * y, decay * self._yy + y * y
        self._xs, self._ys = decay * self._xs + x * seconds, decay * self._ys + y * seconds
        self._update_fit()
        if y > 0.0 and self._ratio:
            fitted = self.b / self.a if self.a > 0.0 else self._max_ratio
            self._ratio = min(self._max_ratio, self._ratio + RATIO_LEARNING_RATE * (fitted - self._ratio))

    def _update_fit(self) -> None:
        xx, xy = self._xx + self._ridge * self._ratio**2, self._xy - self._ridge * self._ratio
        yy = self._yy + self._ridge
        determinant = xx * yy - xy * xy
        if determinant > 1e-3 * xx * yy and yy > MIN_Y_SHARE * xx:
            self.a = (yy * self._xs - xy * self._ys) / determinant
            self.b = (xx * self._ys - xy * self._xs) / determinant
            if self.a < 0.0:
                self.a, self.b = 0.0, self._ys / self._yy
            elif self.b < 0.0:
                self.a, self.b = self._xs / self._xx, 0.0
        elif (expected := self.a * self._xx + self.b * self._xy) > 0.0:  # samples of one ratio y / x do not determine b / a: keep it
            self.a, self.b = self.a * self._xs / expected, self.b * self._xs / expected
        elif self._ratio:
            self.a = (self._xs + self._ratio * self._ys) / max(1e-30, self._xx + self._ratio * (2.0 * self._xy + self._ratio * self._yy))
            self.b = self._ratio * self.a
        else:
            self.a, self.b = (0.0, self._ys / self._yy) if self._yy > 0.0 else (self._xs / max(1e-30, self._xx), 0.0)


class AdapterUse(IntEnum):
    """How a forward pass applies adapters, which changes its time."""

    NONE = auto()
    SOME_ROWS = auto()
    MIXTURE_PASS = auto()  # X-LoRA: the model runs once to compute the scalings of the adapters, and again with them


@dataclass(slots=True)
class BatchShape:
    """The shape of a forward pass without its draft tokens: the inputs of the cost model."""

    num_rows: int  # rows that are not draft tokens
    num_sequences: int
    is_decoding: bool  # whether each sequence has exactly one row that is not a draft token
    cached_len: float  # cached rows of each sequence beyond `PROFILED_CONTEXT_LEN`, summed over the sequences
    adapter_use: AdapterUse

    @classmethod
    def from_batch(cls, batch: Sequence[RequestRows]) -> "BatchShape":
        num_rows, cached_len, is_decoding, adapter_use = 0, 0.0, True, AdapterUse.NONE
        for rows in batch:
            request = rows.request
            num_rows += rows.num_new_tokens
            is_decoding = is_decoding and rows.num_new_tokens == 1 and rows.tree is not None
            cached_len += max(0, request.cached_sequence.committed_len - PROFILED_CONTEXT_LEN)
            if request.adapter_number > 0:
                adapter_use = max(adapter_use, AdapterUse.MIXTURE_PASS if request.has_mixture_pass else AdapterUse.SOME_ROWS)
        return cls(num_rows, len(batch), is_decoding, cached_len, adapter_use)


class CostModel:
    """Expected seconds of steps and of drafting, fitted to measured times."""

    def __init__(self, profile: ForwardProfile) -> None:
        self.profile = profile
        self.host_cost = LinearCost(usual_y=USUAL_DRAFT_TOKENS)
        self._corrections: dict[AdapterUse, LinearCost] = {}
        # keys: drafter, num_requests.bit_length(); similar numbers of requests share a fit
        self._draft_costs: dict[tuple[str, int], LinearCost] = {}
        self._num_proposals: dict[str, int] = {}  # for each drafter: number of its `propose` calls
        self._forward_times: list[float] = []  # seconds of a forward pass with 0, 1, … rows, as measured at load

    def step_times(self, shape: BatchShape, max_draft_tokens: int) -> list[float]:
        """Return [max_draft_tokens + 1] seconds of a step with 0, 1, … draft tokens, without the time of drafters."""
        plain_s, correction = self._uncorrected_forward_s(shape, 0), self._profile_correction(shape.adapter_use)
        fixed_s = max(MIN_STEP_S, correction.a * plain_s + self.host_cost.seconds_at(shape.num_sequences, 0.0))
        row_s = self.host_cost.b + correction.b * self.profile.cached_row_attention_s * shape.cached_len / max(1, shape.num_sequences)
        profile_s = self._forward_times_up_to(shape.num_rows + max_draft_tokens)[shape.num_rows : shape.num_rows + max_draft_tokens + 1]
        return [fixed_s + correction.b * (seconds - profile_s[0]) + row_s * count for count, seconds in enumerate(profile_s)]

    def draft_s(self, drafter: str, num_requests: int, depth: int) -> float:
        """Return the expected seconds of a `propose` call for this many requests with drafts of this depth; 0 = unknown."""
        return self._draft_cost(drafter, num_requests).seconds_at(1.0, depth)

    def draft_token_s(self, drafter: str) -> float:
        """Return the expected seconds of one more draft token for one request."""
        return self._draft_cost(drafter, 1).b

    def observe_draft_time(self, drafter: str, num_requests: int, depth: int, seconds: float) -> None:
        """Add the measured time of a `propose` call; the first call of a drafter is left out."""
        count = self._num_proposals[drafter] = self._num_proposals.get(drafter, 0) + 1
        if count > 1:
            self._draft_costs.setdefault((drafter, num_requests.bit_length()), LinearCost()).observe(1.0, depth, seconds)

    def is_draft_cost_known(self, drafter: str) -> bool:
        """Return whether a drafter was timed often enough to use its times."""
        return self._num_proposals.get(drafter, 0) >= MIN_PROPOSALS

    def observe_step_time(self, shape: BatchShape, num_draft_tokens: int, forward_s: float, host_s: float) -> None:
        """Add the measured times of a step: its forward pass, and all other work except drafting."""
        plain_s, with_drafts_s = self._uncorrected_forward_s(shape, 0), self._uncorrected_forward_s(shape, num_draft_tokens)
        self._profile_correction(shape.adapter_use).observe(plain_s, with_drafts_s - plain_s, forward_s)
        self.host_cost.observe(shape.num_sequences, num_draft_tokens, host_s)

    def _draft_cost(self, drafter: str, num_requests: int) -> LinearCost:
        """Return the cost of `propose` calls for about this many requests, or for the nearest number that was timed."""
        if not self.is_draft_cost_known(drafter):
            return LinearCost()
        timed_lengths = [bit_length for name, bit_length in self._draft_costs if name == drafter]
        nearest = min(timed_lengths, key=lambda length: abs(length - num_requests.bit_length()), default=0)
        return self._draft_costs.get((drafter, nearest), LinearCost())

    def _profile_correction(self, adapter_use: AdapterUse) -> LinearCost:
        """Return the fitted factors of profiled forward times, for passes that use adapters in this way.

        Before the first such pass, the correction is that of passes without adapters.
        """
        correction = self._corrections.get(adapter_use)
        if correction is None:
            without_adapters = self._corrections.get(AdapterUse.NONE)
            a, b = (1.0, 1.0) if without_adapters is None else (without_adapters.a, without_adapters.b)
            num_passes = 2.0 if adapter_use is AdapterUse.MIXTURE_PASS else 1.0
            one_row_s = self.profile.seconds_at(1)
            four_more_s = max(1e-6, self.profile.seconds_at(5) - one_row_s)
            correction = self._corrections[adapter_use] = LinearCost(ratio=1.0, usual_y=four_more_s)
            correction.observe(one_row_s, four_more_s, num_passes * (a * one_row_s + b * four_more_s))
        return correction

    def _uncorrected_forward_s(self, shape: BatchShape, num_draft_tokens: int) -> float:
        """Return the seconds of a forward pass according to the profile, without fitted factors."""
        num_rows = shape.num_rows + num_draft_tokens
        attention_s = self.profile.attention_s(shape.cached_len, num_rows / max(1, shape.num_sequences))
        return self._forward_times_up_to(num_rows)[num_rows] + attention_s

    def _forward_times_up_to(self, num_rows: int) -> list[float]:
        """Return the seconds of a forward pass with 0, 1, … rows, at least up to `num_rows`, as measured at load."""
        while len(self._forward_times) <= num_rows:
            self._forward_times.append(self.profile.seconds_at(len(self._forward_times)) if self._forward_times else 0.0)
        return self._forward_times
