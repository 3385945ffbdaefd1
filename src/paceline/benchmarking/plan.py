"""Validated options of a benchmark."""

import math
from dataclasses import dataclass
from pathlib import Path

from paceline.config import MAX_NUM_SEQS, MAX_SPECULATIVE_TOKENS, quant_options
from paceline.errors import ConfigError

DEFAULT_ROUNDS, DEFAULT_TOKENS, DEFAULT_PROMPTS = 5, 96, 4
DEFAULT_MINUTES = 5.0
MIN_TOKENS = 16
"""Minimum: shorter outputs do not measure decoding."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchPlan:
    """Settings of a benchmark; None = the default, made smaller where the time does not suffice.

    Attributes:
        model, gguf_file, quantization, threads, offline: as for `paceline.LLM`.
        draft_model: directory, file or id, for our own mode draft_model and for peers; None = the one in the model's directory.
        drafters: one mode each; a+b is one mode with both. Empty = all available ones.
        workloads: of the table; none of them = all, or none where files are given.
        prompts, spec_bench: files of further prompts.
        temperatures: each makes a cell with each workload.
        peers: names of other programs.
        rounds: counted rounds, after one of warm-up.
        max_tokens: tokens of each output.
        num_prompts: of each workload.
        batch_size: requests at once.
        minutes: time limit; what was measured by then is reported.
        seed: of random prompts, edits, sampled texts and the bootstrap.
        timeout_s, load_timeout_s: of one answer, and of opening a model.
    """

    model: str = "mini"
    gguf_file: str | None = None
    quantization: str = "none"
    threads: int | None = None
    offline: bool = False
    draft_model: str | None = None
    drafters: tuple[str, ...] = ()
    num_speculative_tokens: int | None = None
    workloads: tuple[str, ...] = ()
    prompts: Path | None = None
    spec_bench: Path | None = None
    temperatures: tuple[float, ...] = (0.0,)
    peers: tuple[str, ...] = ()
    rounds: int | None = None
    max_tokens: int | None = None
    num_prompts: int | None = None
    batch_size: int = 1
    minutes: float = DEFAULT_MINUTES
    seed: int = 7
    timeout_s: float = 600.0
    load_timeout_s: float = 1800.0

    def __post_init__(self) -> None:
        quant_options("quantization", self.quantization)
        for name, least, most in (("rounds", 1, 1000), ("max_tokens", MIN_TOKENS, 100_000), ("num_prompts", 1, 10_000)):
            _check_count(name, getattr(self, name), least, most)
        _check_count("batch_size", self.batch_size, 1, MAX_NUM_SEQS)
        _check_count("num_speculative_tokens", self.num_speculative_tokens, 1, MAX_SPECULATIVE_TOKENS)
        if not 0 < self.minutes <= 10_000:
            raise ConfigError(f"minutes is {self.minutes}: use a number above 0 and at most 10000, such as 5 or 0.5")
        for temperature in self.temperatures:
            if not math.isfinite(temperature) or not 0 <= temperature <= 100:
                raise ConfigError(f"temperature is {temperature}: use numbers from 0 to 100, such as 0,0.7,1")
        if not self.temperatures:
            raise ConfigError("there is no temperature: give one or several, such as 0,0.7,1")
        if self.batch_size > 1 and self.peers:
            raise ConfigError(
                f"batch_size is {self.batch_size} and peers are named: peers run one request at a time; leave out one of them"
            )


def _check_count(name: str, value: int | None, least: int, most: int) -> None:
    if value is not None and not least <= value <= most:
        raise ConfigError(f"{name} is {value}: use a whole number from {least} to {most}")
