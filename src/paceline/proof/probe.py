"""Load a target with its drafter, time passes, try a few drafts, and measure the speedup. Also the formula that predicts speedups."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from paceline.errors import PacelineError
from paceline.machine import peak_memory_bytes
from paceline.prompt_file import PromptLine
from paceline.proof.measured_speedup import MeasuredSpeedup, measure_speedups
from paceline.tokenizer.vocabulary import SAMPLE_TEXT

if TYPE_CHECKING:
    from paceline.llm import LLM
    from paceline.speculation.drafter import Drafter

DRAFT_LENGTHS = (1, 2, 3, 4, 6, 8, 12)
_PASS_REPEATS = 9
_NUM_TEXTS, _PROMPT_WORDS, _TEXT_TOKENS = 4, 8, 24
_LEAST_CONTEXT = 64  # for the trial's texts
_NUM_DRAFT_TOKENS = 4
_LAYOUT_TEXTS, _LAYOUT_TOKENS = 8, 48
_MIN_LAYOUT_GAIN = 0.05  # share of all tokens; less is chance in as many tokens
_LEAST_STEPS = 16  # for a notice about acceptance
_LEAST_KEPT = 0.15  # heads trained for a model have their first token accepted in half of the steps and more
_HEADS = ("medusa", "eagle", "eagle3", "peagle", "mtp")  # drafters trained for one model


@dataclass(frozen=True, slots=True)
class Prediction:
    """The best draft length for one acceptance rate; 0 with a speedup of 1 where drafting does not pay."""

    acceptance_rate: float
    num_draft_tokens: int
    speedup: float


@dataclass(frozen=True, slots=True)
class Trial:
    """How often drafts were accepted for a few of the target's own outputs.

    Attributes:
        num_steps: steps with a draft.
        num_kept: steps in which at least one draft token was accepted.
        num_accepted: draft tokens that were accepted.
    """

    num_steps: int
    num_kept: int
    num_accepted: int


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """The measurements of one probe.

    Attributes:
        load_s: seconds to load everything.
        numerics: "exact" or "fast", as tested at load.
        pass_s: seconds of a target pass by its number of rows.
        peak_bytes: most memory this process ever held.
        trial: None without a drafter, or if the context is too short.
        measured: speedups on the user's prompts, or on new prose and on copying; none without a drafter.
        notices: of loading, and whether a head seems to be trained for another model.
    """

    load_s: float
    numerics: str
    pass_s: Mapping[int, float]
    peak_bytes: int
    trial: Trial | None
    notices: tuple[str, ...]
    measured: tuple[MeasuredSpeedup, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        return {
            "load_s": self.load_s,
            "numerics": self.numerics,
            "pass_ms_by_rows": {str(rows): 1000 * seconds for rows, seconds in self.pass_s.items()},
            "peak_bytes": self.peak_bytes,
            "drafting_steps": 0 if self.trial is None else self.trial.num_steps,
            "drafting_steps_with_accepted": 0 if self.trial is None else self.trial.num_kept,
            "measured": [asdict(one) for one in self.measured],
            "notices": list(self.notices),
        }


def expected_speedup(
    acceptance_rate: float, num_draft_tokens: int, plain_s: float, verify_s: float, draft_s: float, proposal_s: float = 0.0
) -> float:
    """Return tokens per second of steps that verify a chain of drafts over those of plain steps.

    Args:
        acceptance_rate: probability that a draft token is accepted, given those before it were.
        plain_s: seconds of a plain pass.
        verify_s: seconds of the pass with root and drafts.
        draft_s: seconds to draft one token.
        proposal_s: seconds that a proposal takes whatever its length.

    Source: Leviathan et al. 2023, arXiv:2211.17192, section 3.3, equation 1, with measured pass times instead of equal ones.
    """
    emitted = sum(acceptance_rate**depth for depth in range(num_draft_tokens + 1))
    return emitted * plain_s / (verify_s + proposal_s + num_draft_tokens * draft_s)


def best_draft_length(acceptance_rate: float, pass_s: Mapping[int, float], draft_s: float, proposal_s: float = 0.0) -> Prediction:
    """Return the timed draft length with the largest expected speedup; 0 draft tokens where none is faster than a plain step.

    Args:
        pass_s: seconds by rows; 1 row and those of each draft length (drafts + 1).
        acceptance_rate, draft_s, proposal_s: as in `expected_speedup`.
    """
    pass_s = _rising(pass_s)
    best = Prediction(acceptance_rate, 0, 1.0)
    for rows in sorted(pass_s)[1:]:
        speedup = expected_speedup(acceptance_rate, rows - 1, pass_s[1], pass_s[rows], draft_s, proposal_s)
        if speedup > best.speedup:
            best = Prediction(acceptance_rate, rows - 1, speedup)
    return best


def probe(prompts: Sequence[PromptLine] = (), **arguments: Any) -> ProbeResult:
    """Load a model with its drafter and time its passes.

    Args:
        prompts: as of `measure_speedups`.
        arguments: of `paceline.LLM`.

    Raises:
        PacelineError: it cannot be loaded, or does not take one of the prompts.
    """
    from paceline.llm import LLM
    from paceline.runtimes.cost import time_passes

    start = time.perf_counter()
    llm = LLM(**arguments)
    load_s = time.perf_counter() - start
    rows = (1, *(count + 1 for count in DRAFT_LENGTHS))
    pass_s = _rising(time_passes(llm.runtime, llm.engine.cache, rows, max_model_len=llm.max_model_len, num_rounds=_PASS_REPEATS))
    measured = measure_speedups(llm, prompts)
    trial = None if llm.drafter is None or llm.max_model_len < _LEAST_CONTEXT else _try_drafts(llm)
    notices = (*llm.notices, *_match_notice(llm.drafter, trial), *_unmeasured_notice(llm, prompts, measured))
    return ProbeResult(load_s, llm.numerics, pass_s, peak_memory_bytes(), trial, notices, measured)


def _rising(pass_s: Mapping[int, float]) -> dict[int, float]:
    """Return times that never fall: more rows never cost less, and where they seem to, another program was running."""
    rows = sorted(pass_s)
    return dict(zip(rows, accumulate((pass_s[one] for one in rows), max), strict=True))


def _try_drafts(llm: "LLM", num_texts: int = _NUM_TEXTS, num_tokens: int = _TEXT_TOKENS, temperature: float = 0.0) -> Trial:
    """Draft for continuations of pieces of the sample text, even where drafting is unprofitable."""
    from paceline.sampling.params import SamplingParams
    from paceline.speculation.draft_length.policy import FixedDraftLength

    llm.engine.speculator.policy = FixedDraftLength(_NUM_DRAFT_TOKENS)
    words = SAMPLE_TEXT.split(" ")
    prompts = [" ".join(words[len(words) * index // num_texts :][:_PROMPT_WORDS]) for index in range(num_texts)]
    max_tokens = max(1, min(num_tokens, llm.max_model_len // 2))
    params = SamplingParams(max_tokens=max_tokens, temperature=temperature, seed=0, ignore_eos=True)
    stats = [output.speculation for output in llm.generate(prompts, params)]
    num_steps = sum(one.steps - one.plain_steps for one in stats)
    num_kept = sum(sum(one.num_accepted_tokens_by_position[:1]) for one in stats)
    return Trial(num_steps, num_kept, sum(one.num_accepted_tokens for one in stats))


def _unmeasured_notice(llm: "LLM", prompts: Sequence[PromptLine], measured: Sequence[MeasuredSpeedup]) -> tuple[str, ...]:
    """Why no speedup was measured."""
    if measured or (llm.drafter is None and not prompts):
        return ()
    if llm.drafter is None:
        return ("no speedup was measured: there is no drafter",)
    return (f"no speedup was measured: {'each answer has one token' if prompts else 'the context is too short for the sample texts'}",)


def _match_notice(drafter: "Drafter | None", trial: Trial | None) -> tuple[str, ...]:
    """Whether a head seems to be another model's."""
    if drafter is None or trial is None or drafter.name not in _HEADS or trial.num_steps < _LEAST_STEPS:
        return ()
    if trial.num_kept >= _LEAST_KEPT * trial.num_steps:
        return ()
    return (
        f"in {trial.num_steps - trial.num_kept} of {trial.num_steps} steps no token of the {drafter.name} drafter was accepted: it was "
        "made for another model, or for other weights of this one, and will seldom help",
    )


def search_layout(switches: Sequence[tuple[str, Sequence[object]]], **arguments: Any) -> dict[str, object]:
    """Try other values of the drafter options that a head's files leave open, one option after another.

    Args:
        switches: options with the values to try, as of `ambiguous_options`.
        arguments: of `paceline.LLM`, with the head as the only drafter. The model is loaded once for each value.

    Returns:
        the options whose values clearly raise the number of accepted tokens; empty if the defaults are best.
    """
    given = dict(arguments.pop("drafter_options", None) or {})
    found: dict[str, object] = {}
    best = _num_accepted(given, arguments)
    for name, values in switches:
        for value in values:
            count = _num_accepted({**given, **found, name: value}, arguments)
            if count - best > _MIN_LAYOUT_GAIN * _LAYOUT_TEXTS * _LAYOUT_TOKENS:
                found[name], best = value, count
    return found


def _num_accepted(options: Mapping[str, object], arguments: Mapping[str, Any]) -> int:
    """Load the model with drafter options and count the accepted draft tokens of a few short texts; 0 if they do not fit the head."""
    from paceline.llm import LLM

    try:
        llm = LLM(**arguments, drafter_options=options)
    except PacelineError:
        return 0
    if llm.drafter is None:
        return 0
    # sampled texts: greedy ones of small models repeat themselves, which any layout drafts
    return _try_drafts(llm, _LAYOUT_TEXTS, _LAYOUT_TOKENS, temperature=1.0).num_accepted
