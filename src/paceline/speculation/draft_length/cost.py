"""Cost model: the seconds of a step by the number of draft tokens that it verifies.

    step_s(k) = a * forward(n) + b * (forward(n + k) - forward(n)) + host_a * sequences + host_b * k        n rows without drafts

`forward` is the profile measured at load (`ForwardProfile`). The factors a and b, 1 at first, correct it while steps run, so that a slower
machine or a wrong profile is followed within some tens of steps. The host's time, and that of drafters, is fitted in the same way.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum, auto

from paceline.runtimes.cost import PROFILED_CONTEXT_LEN, ForwardProfile
from paceline.speculation.request_rows import RequestRows

MEMORY = 0.96  # factor by which a new sample reduces the weight of the earlier ones
STALL_MEMORY = 0.1  # the same factor if a much faster sample shows that earlier ones were machine stalls
MAX_SLOWDOWN = 1.5  # a sample counts as at most this multiple of its expected time, because a longer one is probably a stall
STALL = 3.0  # if a sample is this many times faster than expected, the earlier ones were stalls, because nothing runs faster by chance
MIN_INFORMATION = 1e-6  # minimum of sum(y * y) relative to sum(x * x) of recent samples; below it, a and b cannot be told apart
MIN_STEP_S = 1e-7  # minimum time of a plain step: noise can lead to a fit of zero
PRIOR_SAMPLES = 0.25  # number of samples that the measured profile counts for in a fit
HOST_DRAFTS = 4.0  # usual number of draft tokens of a step, for the fit of the host's time
FIRST_PROPOSALS = 8  # first proposals of a drafter that are not timed: they also prepare memory and kernels


class LinearCost:
    """seconds = a * x + b * y with a, b >= 0, fitted by least squares with exponential forgetting.

    Args:
        ratio: expected b / a. A ridge penalty, with the weight of `PRIOR_SAMPLES` samples at `usual_y`, keeps b near ratio * a until
            samples with y > 0 arrive.
        usual_y: samples with a larger y are scaled down to it, so that no single sample determines b; 0 = no scaling and no penalty.
    """

    __slots__ = ("_ratio", "_ridge", "_usual_y", "_xs", "_xx", "_xy", "_ys", "_yy", "a", "b", "is_known")

    def __init__(self, *, ratio: float = 0.0, usual_y: float = 0.0) -> None:
        self._ratio, self._usual_y, self._ridge = ratio, usual_y, PRIOR_SAMPLES * usual_y**2
        self.a = self.b = self._xx = self._xy = self._yy = self._xs = self._ys = 0.0
        self.is_known = False

    def seconds_at(self, x: float, y: float) -> float:
        """Return the expected seconds for (x, y); 0 before the first sample."""
        return self.a * x + self.b * y

    def observe(self, x: float, y: float, seconds: float) -> None:
        """Add a measured time for (x, y) to the fit."""
        keep = MEMORY
        if self.is_known:
            expected = self.seconds_at(x, y)
            seconds = min(seconds, MAX_SLOWDOWN * expected + 1e-5)
            if STALL * seconds < expected:
                keep = STALL_MEMORY
        self.is_known = True
        if 0.0 < self._usual_y < y:
            weight = self._usual_y / y
            x, y, seconds = weight * x, weight * y, weight * seconds
        self._xx, self._xy, self._yy = keep * self._xx + x * x, keep * self._xy + x * y, keep * self._yy + y * y
        self._xs, self._ys = keep * self._xs + x * seconds, keep * self._ys + y * seconds
        self._fit()

    def _fit(self) -> None:
        xx, xy = self._xx + self._ridge * self._ratio**2, self._xy - self._ridge * self._ratio
        yy = self._yy + self._ridge
        determinant = xx * yy - xy * xy
        if determinant > 1e-3 * xx * yy and yy > MIN_INFORMATION * xx:
            self.a = (yy * self._xs - xy * self._ys) / determinant
            self.b = (xx * self._ys - xy * self._xs) / determinant
            if self.a < 0.0:
                self.a, self.b = 0.0, self._ys / self._yy
            elif self.b < 0.0:
                self.a, self.b = self._xs / self._xx, 0.0
        elif (expected := self.a * self._xx + self.b * self._xy) > 0.0:  # x and y always in the same ratio: a and b change in proportion
            self.a, self.b = self.a * self._xs / expected, self.b * self._xs / expected
        else:
            self.a, self.b = (0.0, self._ys / self._yy) if self._yy > 0.0 else (self._xs / max(1e-30, self._xx), 0.0)


class AdapterUse(IntEnum):
    """How a forward pass applies adapters, which changes its time."""

    NONE = auto()
    SOME_ROWS = auto()
    MIXTURE_PASS = auto()  # the adapter is X-LoRA: each row runs twice


@dataclass(slots=True)
class BatchShape:
    """What the time of a forward pass depends on, drafts aside.

    Attributes:
        num_rows: rows without drafts.
        is_decoding: whether each sequence has one of them.
        cached_len: sum over the sequences of their cached rows beyond `PROFILED_CONTEXT_LEN`.
    """

    num_rows: int
    num_sequences: int
    is_decoding: bool
    cached_len: float
    adapters: AdapterUse

    @classmethod
    def from_batch(cls, batch: Sequence[RequestRows]) -> "BatchShape":
        """Return the shape of a batch."""
        num_rows, cached_len, is_decoding, adapters = 0, 0.0, True, AdapterUse.NONE
        for rows in batch:
            request = rows.request
            num_rows += rows.num_new_tokens
            is_decoding = is_decoding and rows.num_new_tokens == 1 and rows.tree is not None
            cached_len += max(0, request.sequence.committed_len - PROFILED_CONTEXT_LEN)
            if request.adapter_number > 0:
                adapters = max(adapters, AdapterUse.MIXTURE_PASS if request.has_mixture_pass else AdapterUse.SOME_ROWS)
        return cls(num_rows, len(batch), is_decoding, cached_len, adapters)


class CostModel:
    """Expected seconds of steps and of drafting, fitted while they run."""

    def __init__(self, profile: ForwardProfile) -> None:
        self.profile = profile
        self.host = LinearCost(usual_y=HOST_DRAFTS)
        self._speed: dict[AdapterUse, LinearCost] = {}
        self._drafting: dict[tuple[str, int], LinearCost] = {}  # drafting cost by drafter and number of requests, rounded to powers of two
        self._num_proposals: dict[str, int] = {}  # by drafter
        self._seconds: list[float] = []  # of the profile, by rows

    def step_times(self, shape: BatchShape, max_drafts: int) -> list[float]:
        """Return [max_drafts + 1] seconds of a step with 0, 1, … draft tokens, the time of drafters aside."""
        base_s, speed = self._profiled_s(shape, 0), self._profile_correction(shape.adapters)
        host_s, draft_row_s = self.host.seconds_at(shape.num_sequences, 0.0), self.host.b
        fixed_s = max(MIN_STEP_S, speed.a * base_s + host_s)
        row_s = draft_row_s + speed.b * self.profile.cached_row_attention_s * shape.cached_len / max(1, shape.num_sequences)
        rows = self._seconds_by_rows(shape.num_rows + max_drafts)[shape.num_rows : shape.num_rows + max_drafts + 1]
        return [fixed_s + speed.b * (seconds - rows[0]) + row_s * count for count, seconds in enumerate(rows)]

    def draft_s(self, drafter: str, num_requests: int, depth: int) -> float:
        """Return the seconds that a drafter takes for drafts of this depth for so many requests at once; 0 while they are unknown."""
        return self._draft_cost(drafter, num_requests).seconds_at(1.0, depth)

    def draft_token_s(self, drafter: str) -> float:
        """Return the expected seconds of one more draft token for one request."""
        return self._draft_cost(drafter, 1).b

    def observe_draft_time(self, drafter: str, num_requests: int, depth: int, seconds: float) -> None:
        """Add the time of a `propose` call; the first one of a drafter is left out."""
        count = self._num_proposals[drafter] = self._num_proposals.get(drafter, 0) + 1
        if count > 1:
            self._drafting.setdefault((drafter, num_requests.bit_length()), LinearCost()).observe(1.0, depth, seconds)

    def is_draft_cost_known(self, drafter: str) -> bool:
        """Return whether a drafter was timed often enough to use its times."""
        return self._num_proposals.get(drafter, 0) >= FIRST_PROPOSALS

    def observe_step_time(self, shape: BatchShape, num_drafts: int, forward_s: float, host_s: float) -> None:
        """Add the measured times of a step: its forward pass, and all other work except drafting."""
        base_s = self._profiled_s(shape, 0)
        self._profile_correction(shape.adapters).observe(base_s, self._profiled_s(shape, num_drafts) - base_s, forward_s)
        self.host.observe(shape.num_sequences, num_drafts, host_s)

    def _draft_cost(self, drafter: str, num_requests: int) -> LinearCost:
        """Return the cost model for about this number of requests, or for the nearest number that was timed."""
        if not self.is_draft_cost_known(drafter):
            return LinearCost()
        size = num_requests.bit_length()
        sizes = [own_size for name, own_size in self._drafting if name == drafter]
        return self._drafting[drafter, min(sizes, key=lambda one: abs(one - size))] if sizes else LinearCost()

    def _profile_correction(self, adapters: AdapterUse) -> LinearCost:
        """Return the correction of the profile for passes with such adapters; that without adapters before the first sample."""
        speed = self._speed.get(adapters)
        if speed is None:
            plain = self._speed.get(AdapterUse.NONE)
            a, b = (1.0, 1.0) if plain is None else (plain.a, plain.b)
            factor = 2.0 if adapters is AdapterUse.MIXTURE_PASS else 1.0
            first, more = self.profile.seconds_at(1), max(1e-6, self.profile.seconds_at(5) - self.profile.seconds_at(1))
            speed = self._speed[adapters] = LinearCost(ratio=1.0, usual_y=more)
            speed.observe(first, more, factor * (a * first + b * more))
        return speed

    def _profiled_s(self, shape: BatchShape, num_drafts: int) -> float:
        """Return the seconds of a pass by the profile alone."""
        num_rows = shape.num_rows + num_drafts
        return self._seconds_by_rows(num_rows)[num_rows] + self.profile.cache_read_s(
            shape.cached_len, num_rows / max(1, shape.num_sequences)
        )

    def _seconds_by_rows(self, num_rows: int) -> list[float]:
        """Return the profile's seconds by number of rows, [at least num_rows + 1]."""
        while len(self._seconds) <= num_rows:
            self._seconds.append(self.profile.seconds_at(len(self._seconds)) if self._seconds else 0.0)
        return self._seconds
