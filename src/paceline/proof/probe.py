"""What speculation will bring here, from measured pass times: the one part of the doctor that loads the models."""

import time
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

ACCEPTANCES = (0.5, 0.7, 0.9)
DRAFT_LENGTHS = (1, 2, 3, 4, 6, 8, 12)


@dataclass(frozen=True, slots=True)
class Prediction:
    """The best draft length for one acceptance rate; 0 with a speedup of 1 where drafting does not pay."""

    acceptance_rate: float
    num_draft_tokens: int
    speedup: float


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """What was measured.

    Attributes:
        load_s: seconds to load everything.
        numerics: "exact" or "fast", as tested on the real graph.
        pass_s: seconds of a target pass by its number of rows.
        draft_s: seconds to draft one token; 0 for a drafter without a network.
        peak_bytes: most memory this process ever held.
        predictions: one for each of `ACCEPTANCES`.
        notices: what loading had to say.
    """

    load_s: float
    numerics: str
    pass_s: Mapping[int, float]
    draft_s: float
    peak_bytes: int
    predictions: tuple[Prediction, ...]
    notices: tuple[str, ...]

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "load_s": self.load_s,
            "numerics": self.numerics,
            "pass_ms_by_rows": {str(rows): 1000 * seconds for rows, seconds in self.pass_s.items()},
            "draft_ms_per_token": 1000 * self.draft_s,
            "peak_bytes": self.peak_bytes,
            "predictions": [
                {"acceptance_rate": one.acceptance_rate, "num_draft_tokens": one.num_draft_tokens, "speedup": one.speedup}
                for one in self.predictions
            ],
            "notices": list(self.notices),
        }


def expected_speedup(acceptance_rate: float, num_draft_tokens: int, plain_s: float, verify_s: float, draft_s: float) -> float:
    """Tokens per second of steps with a chain of drafts over those of plain steps.

    Args:
        acceptance_rate: probability that a draft token is accepted, given those before it were.
        plain_s: seconds of a plain pass.
        verify_s: seconds of the pass with root and drafts.
        draft_s: seconds to draft one token.

    Source: Leviathan et al. 2023, arXiv:2211.17192, section 3.3, equation 1, with measured pass times instead of equal ones.
    """
    emitted = sum(acceptance_rate**depth for depth in range(num_draft_tokens + 1))
    return emitted * plain_s / (verify_s + num_draft_tokens * draft_s)


def predict(pass_s: Mapping[int, float], draft_s: float) -> tuple[Prediction, ...]:
    """The best of the timed draft lengths for each of `ACCEPTANCES`.

    Args:
        pass_s: seconds by rows; 1 row and those of each draft length (drafts + 1).
    """
    rows_in_order = sorted(pass_s)
    # more rows never cost less: where they seem to, something else was running
    pass_s = dict(zip(rows_in_order, accumulate((pass_s[rows] for rows in rows_in_order), max), strict=True))
    predictions = []
    for rate in ACCEPTANCES:
        speedups = {rows - 1: expected_speedup(rate, rows - 1, pass_s[1], seconds, draft_s) for rows, seconds in pass_s.items() if rows > 1}
        best = max(speedups, key=speedups.__getitem__)
        predictions.append(Prediction(rate, best, speedups[best]) if speedups[best] > 1 else Prediction(rate, 0, 1.0))
    return tuple(predictions)


def probe(**arguments: Any) -> ProbeResult:
    """Load a model with its drafter and time its passes.

    Args:
        arguments: of `paceline.LLM`.

    Raises:
        PacelineError: it cannot be loaded.
    """
    from paceline.llm import LLM
    from paceline.runtimes.cost import time_passes

    start = time.perf_counter()
    llm = LLM(**arguments)
    load_s = time.perf_counter() - start
    rows = (1, *(count + 1 for count in DRAFT_LENGTHS))
    pass_s = time_passes(llm.runtime, llm.engine.cache, rows, max_context=llm.max_context)
    writer = getattr(llm.drafter, "writer", llm.drafter)  # a drafter that translates text has its network in there
    runtime, cache = getattr(writer, "runtime", None), getattr(writer, "cache", None)
    draft_s = 0.0 if runtime is None or cache is None else time_passes(runtime, cache, (1,), max_context=llm.max_context)[1]
    return ProbeResult(load_s, llm.numerics, pass_s, draft_s, _peak_bytes(), predict(pass_s, draft_s), tuple(llm.notices))


def _peak_bytes() -> int:
    try:
        import resource
    except ImportError:  # not on every system
        return 0
    import sys

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
