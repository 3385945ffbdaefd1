"""What is compared: cases, each one run of the engine in one setting, chosen from a seed alone."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np

from paceline.errors import CheckpointError, ConfigError, RequestError
from paceline.proof.exactness.covering import Factors, covering_rows
from paceline.proof.exactness.prompts import PromptSource
from paceline.sampling.params import SamplingParams
from paceline.small_files import read_small

Item = TypeVar("Item")

DRAFT_LENGTHS = ("1", "2", "4", "7", "12", "auto")
"""Tokens drafted a step; auto = as users have it: as many as pay, by measured times."""
SHAPES = ("chain", "tree")
BATCHES = ("1", "4", "8")
EVENTS = ("cold", "prefix hit", "near hit", "next turn", "preempted", "chunked", "full passes")
"""near hit: others ran before whose prompts differ in one token; next turn: the prompt is an earlier one with its answer."""
TOGETHER = "together"
"""Name of all drafters at once."""

SAMPLINGS: Mapping[str, Mapping[str, Any]] = {
    "T=0": {"logprobs": 2},
    "T=0, penalties": {"repetition_penalty": 1.3, "presence_penalty": 0.4, "logprobs": 0},
    "T=0, no repeats": {"no_repeat_ngram_size": 3, "logprobs": 1},
    "T=0, stop": {"logprobs": 0},
    "T=0.7": {"temperature": 0.7, "logprobs": 1},
    "T=0.7, top-k 20": {"temperature": 0.7, "top_k": 20, "logprobs": 0},
    "T=0.7, top-p 0.9": {"temperature": 0.7, "top_p": 0.9, "logprobs": 0},
    "T=1": {"temperature": 1.0, "logprobs": 1},
    "T=1, min-p 0.05": {"temperature": 1.0, "min_p": 0.05, "logprobs": 0},
    "T=1, top-k, top-p, penalties": {
        "temperature": 1.0,
        "top_k": 40,
        "top_p": 0.95,
        "frequency_penalty": 0.5,
        "repetition_penalty": 1.1,
        "logprobs": 0,
    },
    "T=1, processed logprobs": {"temperature": 1.0, "top_p": 0.95, "presence_penalty": 0.3, "logprobs": 2, "logprobs_mode": "processed"},
    "T=1, stop, prompt logprobs": {"temperature": 1.0, "logprobs": 0, "prompt_logprobs": 1},
}
"""Ways of sampling, with restrictions, penalties, log-probabilities and ends; by name, what differs from the defaults."""

WITH_STOP = frozenset(name for name in SAMPLINGS if "stop" in name)
"""Those that end at a token of the text itself."""

_NOT_DATA = ("processors", "grammar")

_FILE_BYTES = 64 << 20
_DIGITS = 6
_LEAST_KNOWN = 12  # different requests of a round, before batches repeat some
LEAST_TOKENS, MOST_TOKENS = 12, 32
"""Output tokens of a request."""


@dataclass(frozen=True, slots=True)
class Setting:
    """How a case runs. None of it may change a token.

    Attributes:
        drafter: who guesses for its first request.
        num_speculative_tokens: one of `DRAFT_LENGTHS`.
        shape: "chain", or "tree": rows for branches too.
        batch: requests at a time.
        event: what happens to cached rows.
    """

    drafter: str
    num_speculative_tokens: str
    shape: str
    batch: int
    event: str


@dataclass(frozen=True, slots=True)
class CaseRequest:
    """One request of a case.

    Attributes:
        prompt: name of its kind.
        sampling: name in `SAMPLINGS`.
        drafter: who guesses for it; `TOGETHER` = all.
        num_speculative_tokens: its own limit; None = that of the case.
        stop_index: it ends at the token that plain decoding has there; None = by length.
    """

    prompt: str
    prompt_token_ids: tuple[int, ...]
    sampling: str
    params: SamplingParams
    drafter: str
    num_speculative_tokens: int | None = None
    stop_index: int | None = None

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        own = {name: getattr(self, name) for name in ("prompt", "sampling", "drafter", "num_speculative_tokens", "stop_index")}
        return {**own, "prompt_token_ids": list(self.prompt_token_ids), "params": params_as_dict(self.params)}

    @classmethod
    def from_dict(cls, given: Mapping[str, Any]) -> "CaseRequest":
        """The request that `as_dict` wrote."""
        params, ids = SamplingParams(**given["params"]), tuple(given["prompt_token_ids"])
        return cls(**{**given, "prompt_token_ids": ids, "params": params})


@dataclass(frozen=True, slots=True)
class Case:
    """One run of the engine.

    Attributes:
        number: of this seed.
        round: of the covering array; references are kept for one round.
        seed: of everything random within the case: adversaries, preemptions, limits.
        requests: as many as the setting's batch.
    """

    number: int
    round: int
    seed: int
    setting: Setting
    requests: tuple[CaseRequest, ...] = field(default=())

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        own = {name: getattr(self, name) for name in ("number", "round", "seed")}
        return {**own, "setting": asdict(self.setting), "requests": [one.as_dict() for one in self.requests]}

    @classmethod
    def from_dict(cls, given: Mapping[str, Any]) -> "Case":
        """The case that `as_dict` wrote.

        Raises:
            RequestError: it is no such case.
        """
        try:
            requests = tuple(CaseRequest.from_dict(one) for one in given["requests"])
            case = cls(given["number"], given["round"], given["seed"], Setting(**given["setting"]), requests)
            whole: list[object] = [case.number, case.round, case.seed, case.setting.batch]
            known = case.setting.event in EVENTS and case.setting.num_speculative_tokens in DRAFT_LENGTHS and case.setting.shape in SHAPES
            if not requests or not known or not all(isinstance(number, int) and number >= 0 for number in whole):
                raise ValueError("a setting that does not exist")
        except (KeyError, TypeError, ValueError) as error:
            raise RequestError(f"this is no case of `paceline prove` ({error!r}): give a file that its --json wrote") from error
        return case


def sampling(name: str, *, seed: int, max_tokens: int) -> SamplingParams:
    """The parameters of a request. End tokens are ignored, so that short answers leave enough tokens to compare."""
    return SamplingParams(**SAMPLINGS[name], seed=seed, max_tokens=max_tokens, ignore_eos=True)


def params_as_dict(params: SamplingParams) -> dict[str, Any]:
    """What differs from the defaults, for JSON."""
    plain = SamplingParams()
    given = {one.name: getattr(params, one.name) for one in fields(params) if one.name not in _NOT_DATA}
    return {name: value for name, value in given.items() if value != getattr(plain, name)}


class CaseMaker:
    """Chooses cases. They depend on nothing but the arguments, so a case has the same number in every run.

    Args:
        prompts: where prompts come from.
        drafters: names of those to compare; several are also asked together.
        seed: of all choices.
        batches: requests at a time, the levels of it.
    """

    def __init__(self, prompts: PromptSource, drafters: Sequence[str], seed: int, batches: Sequence[str] = BATCHES) -> None:
        self._prompts = prompts
        self._batches = batches
        self._drafters = [*drafters, TOGETHER] if len(drafters) > 1 else list(drafters)
        self._seed = seed

    def factors(self) -> Factors:
        """What is combined."""
        return {
            "drafter": self._drafters,
            "num_speculative_tokens": DRAFT_LENGTHS,
            "shape": SHAPES,
            "batch": self._batches,
            "event": EVENTS,
            "sampling": list(SAMPLINGS),
            "prompt": self._prompts.kinds,
        }

    def cases(self) -> Iterator[Case]:
        """All of them, without end."""
        random = np.random.default_rng(self._seed)
        known: list[CaseRequest] = []
        this_round = 0
        for number, (round_number, row) in enumerate(covering_rows(self.factors(), random)):
            if round_number != this_round:
                this_round = round_number
                known.clear()
            batch = int(row["batch"])
            setting = Setting(row["drafter"], row["num_speculative_tokens"], row["shape"], batch, row["event"])
            own = np.random.default_rng([self._seed, number])
            first = self._request(row, round_number, own)
            known.append(first)
            others = tuple(self._companion(known, round_number, own) for _ in range(batch - 1))
            yield Case(number, round_number, int(own.integers(2**31)), setting, (first, *others))

    def _request(self, row: Mapping[str, str], round_number: int, random: np.random.Generator) -> CaseRequest:
        prompt, name = row["prompt"], row["sampling"]
        max_tokens = int(random.integers(LEAST_TOKENS, MOST_TOKENS + 1))
        params = sampling(name, seed=int(random.integers(2**31)), max_tokens=max_tokens)
        stop_index = int(random.integers(3, max_tokens)) if name in WITH_STOP else None
        ids = self._prompts.prompt(prompt, round_number)
        return CaseRequest(prompt, ids, name, params, row["drafter"], None, stop_index)

    def _companion(self, known: list[CaseRequest], round_number: int, random: np.random.Generator) -> CaseRequest:
        """Another request that runs beside the first: one that an earlier case of the round has, so that its reference is known.

        The first few of a round are new ones.
        """
        drafter = self._drafters[int(random.integers(len(self._drafters)))]
        if len(known) < _LEAST_KNOWN:
            levels = {name: _one_of(list(self.factors()[name]), random) for name in ("sampling", "prompt")}
            known.append(self._request({**levels, "drafter": drafter}, round_number, random))
            return known[-1]
        limit = int(random.integers(1, 5)) if random.random() < 0.3 else None
        return replace(_one_of(known, random), drafter=drafter, num_speculative_tokens=limit)


def _one_of(items: Sequence[Item], random: np.random.Generator) -> Item:
    return items[int(random.integers(len(items)))]


class CasesToRun(NamedTuple):
    """What `--case` names.

    Attributes:
        only: number of a case of the seed; None = not said so.
        cases: read from a file.
        seed: of the file they stood in.
    """

    only: int | None = None
    cases: tuple[Case, ...] = ()
    seed: int | None = None


def read_cases(name: str | None) -> CasesToRun:
    """The cases that a number or a file stands for: one case, or a report whose differing cases are meant.

    Raises:
        ConfigError: there is no such file, or no case in it.
        RequestError: it is no such case.
    """
    if name is None:
        return CasesToRun()
    if name.isdecimal():
        if len(name) > _DIGITS:
            raise ConfigError(f"--case {name} is no number of a case: they have at most {_DIGITS} digits")
        return CasesToRun(int(name))
    try:
        content = read_small(Path(name), _FILE_BYTES)
    except CheckpointError as error:
        raise ConfigError(f"--case {name} cannot be read ({error}): give the number of a case, or a file that --json wrote") from error
    if content is None:
        raise ConfigError(f"--case {name}: there is no such file; give the number of a case, or a file that --json wrote")
    try:
        found = json.loads(content)
    except ValueError as error:
        raise ConfigError(f"--case {name} is no JSON ({error}): give the number of a case, or a file that --json wrote") from error
    if not isinstance(found, dict):
        raise ConfigError(f"--case {name} holds no case: give the number of a case, or a file that --json wrote")
    if "requests" in found:
        return CasesToRun(None, (Case.from_dict(found),), None)
    findings = found.get("findings")
    if not isinstance(findings, list) or not all(isinstance(one, dict) and _is_repeatable(one.get("replay")) for one in findings):
        raise ConfigError(f"--case {name} is no report of paceline prove: give the number of a case, or a file that --json wrote")
    cases = {one["replay"]["number"]: Case.from_dict(one["replay"]) for one in findings if one.get("replay") is not None}
    if not cases:
        raise ConfigError(f"--case {name} holds no case that differs: there is nothing to repeat")
    return CasesToRun(None, tuple(cases.values()), found.get("seed"))


def _is_repeatable(case: object) -> bool:
    """Whether this may stand with a difference that was found: a case with a number, or none."""
    return case is None or (isinstance(case, dict) and isinstance(case.get("number"), int))
