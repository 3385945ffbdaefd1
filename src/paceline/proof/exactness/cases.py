"""Cases of an exactness proof, chosen from a seed alone: a setting of the engine, requests, prompts and samplings.

A covering array of strength 2 chooses them row by row: each row has as many pairs of levels as possible that no earlier row had. After all
pairs have occurred a new round begins. A run that is stopped early has therefore tried every level of every factor.

Source: Cohen, Dalal, Fredman, Patton 1997, "The AETG system", section 4, with one candidate a row and rounds without end.
"""

import json
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from itertools import combinations
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias, TypeVar

import numpy as np

from paceline.engine.input_processor import InputProcessor
from paceline.errors import CheckpointError, ConfigError, PacelineError, RequestError
from paceline.kv_cache.cache import BLOCK_SIZE
from paceline.prompt_file import read_prompts
from paceline.sampling.params import SamplingParams
from paceline.small_files import read_small
from paceline.tokenizer.vocabulary import SAMPLE_TEXT

Item = TypeVar("Item")

DRAFT_LENGTHS = ("1", "2", "4", "7", "12", "auto")
"""Tokens drafted a step; auto = chosen by the draft-length policy."""
SHAPES = ("chain", "tree")
BATCHES = ("1", "4", "8")
EVENTS = ("cold", "prefix hit", "near hit", "next turn", "preempted", "chunked", "full passes")
"""near hit: prompts that differ in one token ran before; next turn: the prompt is an earlier prompt with its output."""
ALL_DRAFTERS = "together"
"""Drafter name: all drafters of the engine."""

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
"""Samplings that end at a stop token."""

_FILE_BYTES = 64 << 20
_DIGITS = 6
_LEAST_KNOWN = 12  # distinct requests of a round; later batches reuse them
LEAST_TOKENS, MOST_TOKENS = 12, 32
"""Output tokens of a request."""
Factors: TypeAlias = Mapping[str, Sequence[str]]
"""The levels of each factor."""

Level: TypeAlias = tuple[str, str]  # factor, level
Pair: TypeAlias = frozenset[Level]
MAX_PROMPTS_PER_ROUND = 8
"""Prompts of a file that one round of cases combines with everything else; the next round takes others."""
_LENGTHS = {
    "a few tokens": (1, 6),
    "below a block": (BLOCK_SIZE - 8, BLOCK_SIZE - 1),
    "a block's border": (BLOCK_SIZE, BLOCK_SIZE + 1),
    "some blocks": (2 * BLOCK_SIZE, 3 * BLOCK_SIZE + 2),
    "many blocks": (4 * BLOCK_SIZE, 6 * BLOCK_SIZE),
}
_NO_TEXT = "no text"


class SamplePrompts:
    """Prompts for each round: different excerpts of the sample text, and random ids that are no text.

    Args:
        input_processor: encodes.
        seed: of the cuts.
        longest: tokens a prompt may have.
    """

    def __init__(self, input_processor: InputProcessor, seed: int, *, longest: int) -> None:
        self._vocab_size, self._seed, self._longest = input_processor.vocab_size, seed, longest
        ids = [
            token for token in input_processor.tokenizer.encode(SAMPLE_TEXT, add_special_tokens=False) if token < input_processor.vocab_size
        ]
        self._text = ids * (1 + 2 * _LENGTHS["many blocks"][1] // max(1, len(ids)))

    @property
    def kinds(self) -> Sequence[str]:
        """Names of the kinds of prompts; each round has one of each."""
        return [*(kind for kind, (least, _) in _LENGTHS.items() if least <= self._longest), _NO_TEXT]

    def prompt(self, kind: str, round_number: int) -> tuple[int, ...]:
        """Return the token ids of a round's prompt of one kind."""
        random = np.random.default_rng([self._seed, round_number, self.kinds.index(kind)])
        if kind == _NO_TEXT:
            length = min(int(random.integers(4, 2 * BLOCK_SIZE)), self._longest)
            return tuple(random.integers(0, self._vocab_size, length).tolist())
        least, most = _LENGTHS[kind]
        length = int(random.integers(least, min(most, self._longest) + 1))
        start = int(random.integers(0, len(self._text) - length))
        return tuple(self._text[start : start + length])


class GivenPrompts:
    """The user's prompts. Each round uses some of them.

    Args:
        prompts: ids of each; at least one.
    """

    def __init__(self, prompts: Sequence[Sequence[int]]) -> None:
        self._prompts = [tuple(prompt) for prompt in prompts]

    @property
    def kinds(self) -> Sequence[str]:
        return [f"prompt {index + 1}" for index in range(min(len(self._prompts), MAX_PROMPTS_PER_ROUND))]

    def prompt(self, kind: str, round_number: int) -> tuple[int, ...]:
        index = self.kinds.index(kind) + round_number * MAX_PROMPTS_PER_ROUND
        return self._prompts[index % len(self._prompts)]


PromptSource: TypeAlias = SamplePrompts | GivenPrompts


def given_prompts(path: Path, input_processor: InputProcessor, *, longest: int) -> GivenPrompts:
    """Read and encode a user's file of prompts.

    Args:
        longest: tokens a prompt may have.

    Raises:
        ConfigError: as `read_prompts`.
        RequestError: the model does not take a prompt.
    """
    found = []
    for number, line in enumerate(read_prompts(path), 1):
        try:
            given = input_processor.chat_token_ids(line.messages) if line.messages else line.text or list(line.token_ids)
            found.append(input_processor.prompt_ids(given))
        except RequestError as error:
            raise RequestError(f"prompt {number} of {path}: {error}", parameter="prompt") from None
        if len(found[-1]) > longest:
            raise RequestError(
                f"prompt {number} of {path} has {len(found[-1])} tokens, there is room for {longest}: raise --max-model-len or shorten it",
                parameter="prompt",
            )
    return GivenPrompts(found)


@dataclass(frozen=True, slots=True)
class Setting:
    """How a case runs. None of it may change a token.

    Attributes:
        drafter: name of the drafter of its first request.
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
        drafter: name of its drafter; `ALL_DRAFTERS` = all.
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
        """Return the JSON object; of the parameters those that differ from the defaults."""
        default = SamplingParams()
        given = {one.name: getattr(self.params, one.name) for one in fields(default)}
        params = {name: value for name, value in given.items() if value != getattr(default, name)}
        return asdict(self) | {"prompt_token_ids": list(self.prompt_token_ids), "params": params}

    @classmethod
    def from_dict(cls, given: Mapping[str, Any]) -> "CaseRequest":
        """Make a request of the object that `as_dict` returned."""
        params, ids = SamplingParams(**given["params"]), tuple(given["prompt_token_ids"])
        return cls(**{**given, "prompt_token_ids": ids, "params": params})


@dataclass(frozen=True, slots=True)
class Case:
    """One run of the engine.

    Attributes:
        number: of this seed.
        round: of the covering array; reference outputs are kept for one round.
        seed: of everything random within the case: adversaries, preemptions, limits.
        requests: as many as the setting's batch.
    """

    number: int
    round: int
    seed: int
    setting: Setting
    requests: tuple[CaseRequest, ...] = field(default=())

    def as_dict(self) -> dict[str, Any]:
        return asdict(self) | {"requests": [one.as_dict() for one in self.requests]}

    @classmethod
    def from_dict(cls, given: Mapping[str, Any]) -> "Case":
        """Make a case of the object that `as_dict` returned.

        Raises:
            KeyError, TypeError, ValueError, RequestError: the object is not a valid case.
        """
        requests = tuple(CaseRequest.from_dict(one) for one in given["requests"])
        case = cls(given["number"], given["round"], given["seed"], Setting(**given["setting"]), requests)
        whole: list[object] = [case.number, case.round, case.seed, case.setting.batch]
        known = case.setting.event in EVENTS and case.setting.num_speculative_tokens in DRAFT_LENGTHS and case.setting.shape in SHAPES
        if not requests or not known or not all(isinstance(number, int) and number >= 0 for number in whole):
            raise ValueError("a setting that does not exist")
        return case


def sampling(name: str, *, seed: int, max_tokens: int) -> SamplingParams:
    """Return the parameters of a request. End tokens are ignored, so that outputs have enough tokens to compare."""
    return SamplingParams(**SAMPLINGS[name], seed=seed, max_tokens=max_tokens, ignore_eos=True)


class CaseMaker:
    """Chooses cases. They depend on nothing but the arguments, so a case has the same number in every run.

    Args:
        prompts: where prompts come from.
        drafters: names of those to compare; several also run together.
        seed: of all choices.
        batches: requests at a time, the levels of it.

    Attributes:
        factors: of the covering array.
    """

    def __init__(self, prompts: PromptSource, drafters: Sequence[str], seed: int, batches: Sequence[str] = BATCHES) -> None:
        self._prompts, self._seed = prompts, seed
        self.factors: Factors = {
            "drafter": [*drafters, ALL_DRAFTERS] if len(drafters) > 1 else drafters,
            "num_speculative_tokens": DRAFT_LENGTHS,
            "shape": SHAPES,
            "batch": batches,
            "event": EVENTS,
            "sampling": list(SAMPLINGS),
            "prompt": prompts.kinds,
        }

    def cases(self) -> Iterator[Case]:
        """Yield cases without end."""
        random = np.random.default_rng(self._seed)
        known_by_round = defaultdict[int, list[CaseRequest]](list)
        for number, (round_number, row) in enumerate(covering_rows(self.factors, random)):
            known = known_by_round[round_number]
            batch = int(row["batch"])
            setting = Setting(row["drafter"], row["num_speculative_tokens"], row["shape"], batch, row["event"])
            own = np.random.default_rng([self._seed, number])
            first = self._request(row, round_number, own)
            known.append(first)
            others = tuple(self._other_request(known, round_number, own) for _ in range(batch - 1))
            yield Case(number, round_number, int(own.integers(2**31)), setting, (first, *others))

    def _request(self, row: Mapping[str, str], round_number: int, random: np.random.Generator) -> CaseRequest:
        prompt, name = row["prompt"], row["sampling"]
        max_tokens = int(random.integers(LEAST_TOKENS, MOST_TOKENS + 1))
        params = sampling(name, seed=int(random.integers(2**31)), max_tokens=max_tokens)
        stop_index = int(random.integers(3, max_tokens)) if name in WITH_STOP else None
        ids = self._prompts.prompt(prompt, round_number)
        return CaseRequest(prompt, ids, name, params, row["drafter"], None, stop_index)

    def _other_request(self, known: list[CaseRequest], round_number: int, random: np.random.Generator) -> CaseRequest:
        """Return another request of the batch, from an earlier case of the round, so that its reference output is reused.

        The first few of a round are new.
        """
        drafter = _one_of(self.factors["drafter"], random)
        if len(known) < _LEAST_KNOWN:
            levels = {name: _one_of(self.factors[name], random) for name in ("sampling", "prompt")}
            known.append(self._request({**levels, "drafter": drafter}, round_number, random))
            return known[-1]
        limit = int(random.integers(1, 5)) if random.random() < 0.3 else None
        return replace(_one_of(known, random), drafter=drafter, num_speculative_tokens=limit)


def _one_of(items: Sequence[Item], random: np.random.Generator) -> Item:
    return items[int(random.integers(len(items)))]


class CasesToRun(NamedTuple):
    """The cases that `--case` selects.

    Attributes:
        only: number of a case of the seed; None = not given.
        cases: cases read from a file.
        seed: seed of that file.
    """

    only: int | None = None
    cases: tuple[Case, ...] = ()
    seed: int | None = None


def read_cases(name: str | None) -> CasesToRun:
    """Return the cases named by a number or a file: one case, or the differing cases of a report.

    Raises:
        ConfigError: there is no such file, or no valid case in it.
    """
    if name is None:
        return CasesToRun()
    if name.isdecimal():
        if len(name) > _DIGITS:
            raise ConfigError(f"--case {name} is no number of a case: they have at most {_DIGITS} digits")
        return CasesToRun(int(name))
    advice = "give the number of a case, or a file that --json-file wrote"
    try:
        content = read_small(Path(name), _FILE_BYTES)
        if content is None:
            raise ConfigError(f"--case {name}: there is no such file; {advice}")
        found = json.loads(content)
        replays = [found] if "requests" in found else [one["replay"] for one in found["findings"] if one["replay"] is not None]
        cases = {case.number: case for case in map(Case.from_dict, replays)}
        seed = None if "requests" in found else found["seed"]
    except (CheckpointError, RequestError, KeyError, TypeError, ValueError) as error:
        reason = error if isinstance(error, PacelineError) else "it has not the JSON of one"
        raise ConfigError(f"--case {name} is no case or report of paceline prove ({reason}): {advice}") from error
    if not cases:
        raise ConfigError(f"--case {name} holds no case that differs: there is nothing to repeat")
    return CasesToRun(None, tuple(cases.values()), seed)


def all_pairs(factors: Factors) -> list[Pair]:
    """Return every pair of levels of two factors, in a fixed order."""
    return [
        frozenset(((first, one), (second, other)))
        for first, second in combinations(factors, 2)
        for one in factors[first]
        for other in factors[second]
    ]


def pairs_of(row: Mapping[str, str]) -> set[Pair]:
    """Return the pairs of levels that a test row covers."""
    return {frozenset(pair) for pair in combinations(row.items(), 2)}


def covering_rows(factors: Factors, random: np.random.Generator) -> Iterator[tuple[int, dict[str, str]]]:
    """Yield, without end, the number of the round and a level of each factor.

    Args:
        factors: at least two, each with at least one level.
        random: decides between levels that meet as many new pairs.
    """
    round_number = 0
    while True:
        wanted = dict.fromkeys(all_pairs(factors))
        while wanted:
            row = _next_row(factors, wanted, random)
            for pair in pairs_of(row):
                wanted.pop(pair, None)
            yield round_number, row
        round_number += 1


def _next_row(factors: Factors, wanted: Mapping[Pair, None], random: np.random.Generator) -> dict[str, str]:
    """Choose greedily the levels with the most pairs that have not occurred, starting with the level in most of them."""
    remaining = Counter(level for pair in wanted for level in sorted(pair))
    levels = list(remaining)
    random.shuffle(levels)
    row = dict([max(levels, key=remaining.__getitem__)])
    others = [name for name in factors if name not in row]
    random.shuffle(others)
    for name in others:
        choices = list(factors[name])
        random.shuffle(choices)
        row[name] = max(choices, key=lambda level: sum(frozenset(((name, level), known)) in wanted for known in row.items()))
    return {name: row[name] for name in factors}
