"""Results of a benchmark: a cell for each mode, workload and temperature, with its speedup or the reason why there is none."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import geometric_mean
from typing import Any

import numpy as np

from paceline.benchmarking.intervals import Quartiles, Ratio, paired_ratio
from paceline.benchmarking.modes import PLAIN, Mode
from paceline.benchmarking.run import Measurements
from paceline.benchmarking.samples import Sample
from paceline.repeats import MAX_REPEAT_SHARE, repeat_share

Key = tuple[str, float]  # workload, temperature


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One mode with one workload at one temperature, over all counted rounds.

    Attributes:
        tokens_per_s: of decoding: tokens after the first one a second; a value a round, quartiles over rounds.
        request_tokens_per_s: of whole requests.
        first_token_s: quartiles over requests.
        gap_s, gap_p95_s: between moments at which tokens arrive.
        acceptance_length, acceptance_rate, host_share, bytes_per_s: None where not reported; `bytes_per_s` are weights and cached rows
            read by the target's passes.
        repeat_share: of output pieces that repeat earlier output.
        differing: outputs that differ from those of the baseline, and outputs compared; None for a baseline.
        ratio, request_ratio: to our plain mode in the same round.
        refusal: why the ratio is no speedup; empty where it is one.
    """

    workload: str
    temperature: float
    mode: str
    num_rounds: int
    tokens_per_s: Quartiles | None
    request_tokens_per_s: Quartiles | None
    first_token_s: Quartiles | None
    gap_s: Quartiles | None
    gap_p95_s: float | None
    acceptance_length: float | None
    acceptance_rate: float | None
    num_draft_tokens: int | None
    passes: int | None
    host_share: float | None
    bytes_per_s: float | None
    peak_rss_bytes: int | None
    repeat_share: float
    differing: tuple[int, int] | None
    ratio: Ratio | None
    request_ratio: Ratio | None
    refusal: str

    @property
    def is_looping(self) -> bool:
        return self.repeat_share > MAX_REPEAT_SHARE

    @property
    def speedup(self) -> Ratio | None:
        """The ratio; None where it was refused."""
        return None if self.refusal else self.ratio

    def as_dict(self) -> dict[str, Any]:
        return asdict(self) | {"is_looping": self.is_looping, "speedup": None if self.speedup is None else asdict(self.speedup)}


@dataclass(frozen=True, slots=True)
class Summary:
    """One mode at one temperature over all workloads.

    Attributes:
        speedup: geometric mean of the counted cells' speedups; None without any.
        num_counted, num_cells: cells that have a speedup, and all.
    """

    mode: str
    temperature: float
    speedup: float | None
    lowest: float | None
    highest: float | None
    num_counted: int
    num_cells: int


def make_cells(measured: Measurements, seed: int = 0) -> list[Cell]:
    """Return the cells of all modes with samples, workload by workload."""
    groups: dict[Key, dict[str, list[Sample]]] = defaultdict(lambda: defaultdict(list))
    for sample in measured.samples:
        groups[sample.workload, sample.temperature][sample.mode].append(sample)
    measured_groups = [own for own in groups.values() if any(sample.round for samples in own.values() for sample in samples)]
    return [
        _cell(mode, own, measured.facts.get(mode.name, {}), seed)
        for own in measured_groups  # groups without a counted round are left out: the time was over during the warm-up
        for mode in measured.modes
        if mode.name in own
    ]


def summaries(cells: Sequence[Cell], modes: Iterable[Mode]) -> list[Summary]:
    """Return a summary for each mode except paceline's plain one, at each temperature."""
    found = []
    for temperature in dict.fromkeys(cell.temperature for cell in cells):
        for mode in modes:
            own = [cell for cell in cells if cell.mode == mode.name and cell.temperature == temperature]
            if mode.name == PLAIN or not own:
                continue
            speedups = [cell.speedup.median for cell in own if cell.speedup is not None]
            low, high = min(speedups, default=None), max(speedups, default=None)
            found.append(
                Summary(mode.name, temperature, geometric_mean(speedups) if speedups else None, low, high, len(speedups), len(own))
            )
    return found


def _cell(mode: Mode, samples: Mapping[str, Sequence[Sample]], facts: Mapping[str, Any], seed: int) -> Cell:
    everything = samples[mode.name]
    counted = [sample for sample in everything if sample.round > 0]
    prompts = {sample.prompt for sample in everything}
    rounds = complete_rounds(counted, prompts)
    known = [sample for own in rounds.values() for sample in own]
    plain = complete_rounds([one for one in samples.get(PLAIN, ()) if one.round > 0 and one.prompt in prompts], prompts)
    ratio, request_ratio = (None if mode.name == PLAIN else _ratio(rounds, plain, kind, seed) for kind in ("decoding", "request"))
    repeats = repeat_share([output.token_ids for sample in known or everything for output in sample.outputs])
    differing = None if mode.is_plain else compare(everything, samples.get(mode.baseline, ()))
    drafted = _total(known, "num_draft_tokens")
    first = known[0] if known else everything[0]
    gaps = [gap for sample in known for gap in sample.gaps_s]
    host_s, seconds = _total(known, "host_s"), sum(sample.seconds for sample in known)
    accepted = _total(known, "num_accepted_tokens")
    return Cell(
        workload=first.workload,
        temperature=first.temperature,
        mode=mode.name,
        num_rounds=len(rounds),
        tokens_per_s=Quartiles.of([_speed(own, "decoding") for own in rounds.values()]),
        request_tokens_per_s=Quartiles.of([_speed(own, "request") for own in rounds.values()]),
        first_token_s=Quartiles.of([sample.first_token_s for sample in known]),
        gap_s=Quartiles.of(gaps),
        gap_p95_s=float(np.percentile(gaps, 95)) if gaps else None,
        acceptance_length=_acceptance_length(known),
        acceptance_rate=accepted / drafted if accepted is not None and drafted else None,
        num_draft_tokens=None if drafted is None else int(drafted),
        passes=None if (passes := _total(known, "passes")) is None else int(passes),
        host_share=None if host_s is None or not seconds else host_s / seconds,
        bytes_per_s=_bytes_per_s(known, facts),
        peak_rss_bytes=max((sample.peak_rss_bytes or 0 for sample in everything), default=0) or None,
        repeat_share=repeats,
        differing=differing,
        ratio=ratio,
        request_ratio=request_ratio,
        refusal=_refusal(mode, rounds, ratio, differing, drafted, repeats),
    )


def _refusal(
    mode: Mode, rounds: Mapping[int, object], ratio: Ratio | None, differing: tuple[int, int] | None, drafted: float | None, repeats: float
) -> str:
    """Return why the ratio is no speedup; empty where it is one, and for our plain mode."""
    if mode.name == PLAIN:
        return ""
    if not rounds:
        return "no whole round was measured"
    if differing is not None and not differing[1]:
        return f"{mode.baseline} has no outputs to compare with"
    if differing is not None and differing[0]:
        return f"{differing[0]} of {differing[1]} outputs differ from {mode.baseline}"
    if ratio is None:
        return f"{PLAIN} was not measured in the same rounds"
    if not mode.is_plain and drafted == 0:
        return "nothing was drafted"
    return f"looping: {repeats:.0%} of the output repeats itself" if repeats > MAX_REPEAT_SHARE else ""


def complete_rounds(samples: Iterable[Sample], prompts: set[int]) -> dict[int, list[Sample]]:
    """Return the samples of complete rounds, in which every prompt has a sample."""
    rounds: dict[int, list[Sample]] = defaultdict(list)
    for sample in samples:
        rounds[sample.round].append(sample)
    return {number: own for number, own in sorted(rounds.items()) if {sample.prompt for sample in own} >= prompts}


def compare(samples: Iterable[Sample], baseline: Iterable[Sample]) -> tuple[int, int]:
    """Outputs that differ from the baseline's of the same round and prompt, and outputs compared."""
    known = {(sample.round, sample.prompt): sample for sample in baseline}
    pairs = [(sample, known[sample.round, sample.prompt]) for sample in samples if (sample.round, sample.prompt) in known]
    outputs = [both for one, other in pairs for both in zip(one.outputs, other.outputs, strict=True)]
    return sum(one.token_ids != other.token_ids for one, other in outputs), len(outputs)


def _speed(samples: Sequence[Sample], kind: str) -> float:
    """Tokens a second of one round: all its tokens over all its time."""
    if kind == "request":
        return sum(sample.num_tokens for sample in samples) / sum(sample.seconds for sample in samples)
    return sum(sample.num_decoded for sample in samples) / sum(sample.decoding_s for sample in samples)


def _ratio(own: Mapping[int, Sequence[Sample]], plain: Mapping[int, Sequence[Sample]], kind: str, seed: int) -> Ratio | None:
    """Return the ratio to plain decoding, paired by round; None where no round has both."""
    both = [number for number in own if number in plain]
    if not both:
        return None
    return paired_ratio([_speed(own[number], kind) for number in both], [_speed(plain[number], kind) for number in both], seed=seed)


def _bytes_per_s(samples: Sequence[Sample], facts: Mapping[str, Any]) -> float | None:
    """Bytes read a second: weights, and the cached rows of each request halfway through its output, for each pass."""
    weights, row = facts.get("weights_bytes"), facts.get("cache_bytes_per_token")
    if weights is None or row is None or not samples or any(sample.decoding_passes is None for sample in samples):
        return None
    read = sum((sample.decoding_passes or 0) * (weights + row * (sample.num_prompt_tokens + sample.num_tokens / 2)) for sample in samples)
    return float(read / sum(sample.decoding_s for sample in samples))


def _total(samples: Iterable[Sample], name: str) -> float | None:
    values = [getattr(sample, name) for sample in samples]
    return None if not values or any(value is None for value in values) else sum(values)


def _acceptance_length(samples: Sequence[Sample]) -> float | None:
    """Return the tokens per step of all samples together."""
    steps = [sample.num_tokens / length for sample in samples if (length := sample.acceptance_length) is not None]
    return sum(sample.num_tokens for sample in samples) / sum(steps) if steps and len(steps) == len(samples) else None
