"""Sampling parameters of a request: validated once, then immutable."""

import math
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from numbers import Integral, Real
from typing import Any

from paceline.errors import RequestError
from paceline.sampling.grammars.grammar import Grammar
from paceline.spelling import suggest_arguments

MAX_TEMPERATURE = 100.0
MIN_TEMPERATURE = 1e-4  # with lower temperatures float32 scores overflow for large logits; 0 is greedy
MAX_LOGIT_CHANGE = 1e6  # limit of penalties and biases: far above any logit, far below the largest float32
MAX_INT = 2**31 - 1  # limit of integer parameters
MAX_SAMPLES = 64
MAX_LOGPROBS = 20
LOGPROBS_MODES = ("raw", "processed")

# (token ids, scores [V] float32) -> scores [V] float32. Without NumPy's types, so that `paceline --help` does not import NumPy.
CustomProcessor = Callable[[Sequence[int], Any], Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How the tokens of one request are chosen and when its output ends.

    Attributes:
        max_tokens: maximum number of output tokens, >= 1.
        min_tokens: EOS and `stop_token_ids` are banned while the output has fewer tokens.
        temperature: 0 = greedy, else in [1e-4, 100].
        top_k: keep the k most probable tokens and ties with the k-th; 0 or -1 = off.
        top_p: keep the most probable tokens until their mass reaches p, in (0, 1]; 1 = off.
        min_p: keep tokens at least min_p times as probable as the most probable one, in [0, 1]; 0 = off.
        seed: in [0, 2**64); None = a random one, which is reported with the output.
        stop: one or more strings that end the output; None = none.
        stop_token_ids: tokens that end the output, in addition to EOS.
        include_stop: whether the stop string or token is part of the output.
        ignore_eos: whether generation continues after EOS.
        repetition_penalty: > 0; divides positive and multiplies negative logits of tokens in prompt or output; 1 = off.
        frequency_penalty: subtracted from a token's logit for each occurrence in the output.
        presence_penalty: subtracted once from the logits of tokens that occur in the output.
        logit_bias: token id -> number that is added to its logit, before everything else.
        banned_token_ids: tokens that are never generated.
        n: number of samples, in [1, 64]; more than 1 requires a temperature above 0.
        logprobs: number of most probable tokens to report with each output token's log-probability, in [0, 20]; None = no report.
        prompt_logprobs: like `logprobs` for the prompt's tokens, always in the mode "raw".
        logprobs_mode: "raw" = log-probabilities of the target's logits, "processed" = those after all processors, temperature, top-k, top-p
            and min-p.
        bad_words: texts or token sequences; the last token of each is banned after the tokens before it.
        no_repeat_ngram_size: no n-gram of this size may occur twice in prompt and output; 0 = off.
        processors: functions of (token ids of prompt and output, a copy of the scores [V] float32) that return new scores. They run after
            penalties and bans and before temperature. They also run for draft tokens, so the result must depend on the arguments only.
        grammar: grammar that the output must match.

    Raises:
        RequestError: a value has the wrong type or is out of range, or a name is unknown; the error's `parameter` is the name.
    """

    max_tokens: int = 256
    min_tokens: int = 0
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    stop: str | Sequence[str] | None = ()
    stop_token_ids: Sequence[int] = ()
    include_stop: bool = False
    ignore_eos: bool = False
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict, hash=False)
    banned_token_ids: Sequence[int] = ()
    n: int = 1
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logprobs_mode: str = "raw"
    bad_words: str | Sequence[str | Sequence[int]] = ()
    no_repeat_ngram_size: int = 0
    processors: Sequence[CustomProcessor] = field(default=(), hash=False)
    grammar: Grammar | None = None

    def __post_init__(self) -> None:
        self._assign_fields(max_tokens=_checked_integer("max_tokens", self.max_tokens, 1, MAX_INT))
        self._assign_fields(min_tokens=_checked_integer("min_tokens", self.min_tokens, 0, self.max_tokens))
        limits = f"0 (greedy decoding) or in [{MIN_TEMPERATURE:g}, {MAX_TEMPERATURE:g}]"
        temperature = _checked_number("temperature", self.temperature, 0.0, MAX_TEMPERATURE, limits)
        if 0.0 < temperature < MIN_TEMPERATURE:
            _raise_error("temperature", temperature, f"is out of range; it must be {limits}")
        self._assign_fields(
            temperature=temperature,
            top_p=_checked_number("top_p", self.top_p, math.ulp(0.0), 1.0, "in (0, 1]; temperature=0 is greedy decoding"),
            repetition_penalty=_checked_number("repetition_penalty", self.repetition_penalty, 1.0 / MAX_LOGIT_CHANGE, MAX_LOGIT_CHANGE),
            top_k=max(0, _checked_integer("top_k", self.top_k, -1, MAX_INT)),
            min_p=_checked_number("min_p", self.min_p, 0.0, 1.0),
            frequency_penalty=_checked_number("frequency_penalty", self.frequency_penalty, -MAX_LOGIT_CHANGE, MAX_LOGIT_CHANGE),
            presence_penalty=_checked_number("presence_penalty", self.presence_penalty, -MAX_LOGIT_CHANGE, MAX_LOGIT_CHANGE),
            seed=None if self.seed is None else _checked_integer("seed", self.seed, 0, 2**64 - 1),
            stop=_checked_stop(() if self.stop is None else self.stop),
            stop_token_ids=_checked_ids("stop_token_ids", self.stop_token_ids),
            banned_token_ids=_checked_ids("banned_token_ids", self.banned_token_ids),
            logit_bias=_checked_bias(self.logit_bias),
        )
        for name in ("include_stop", "ignore_eos"):
            if not isinstance(getattr(self, name), bool):
                _raise_error(name, getattr(self, name), "must be true or false")
        self._check_output_options()

    def _check_output_options(self) -> None:
        self._assign_fields(
            n=_checked_integer("n", self.n, 1, MAX_SAMPLES),
            logprobs=None if self.logprobs is None else _checked_integer("logprobs", self.logprobs, 0, MAX_LOGPROBS),
            prompt_logprobs=None
            if self.prompt_logprobs is None
            else _checked_integer("prompt_logprobs", self.prompt_logprobs, 0, MAX_LOGPROBS),
            bad_words=_checked_bad_words(self.bad_words),
            no_repeat_ngram_size=_checked_integer("no_repeat_ngram_size", self.no_repeat_ngram_size, 0, MAX_INT),
            processors=_checked_processors(self.processors),
        )
        if self.n > 1 and self.is_greedy:
            _raise_error("n", self.n, "samples of a greedy request are all equal; set a temperature above 0, or n=1")
        if self.logprobs_mode not in LOGPROBS_MODES:
            _raise_error("logprobs_mode", self.logprobs_mode, f"must be one of {', '.join(LOGPROBS_MODES)}")
        grammar: object = self.grammar
        if not isinstance(grammar, Grammar | None):
            _raise_error("grammar", grammar, "is not a Grammar; make one, such as Grammar.regex(...)")

    def _assign_fields(self, **values: object) -> None:
        for name, value in values.items():
            object.__setattr__(self, name, value)

    @property
    def is_greedy(self) -> bool:
        """Whether the most probable token is always taken."""
        return self.temperature == 0.0

    @property
    def has_truncation(self) -> bool:
        """Whether top-k, top-p or min-p can exclude tokens."""
        return not self.is_greedy and (self.top_k > 0 or self.top_p < 1.0 or self.min_p > 0.0)

    def check_vocabulary(self, vocab_size: int) -> None:
        """Check that all token ids are in the target's vocabulary.

        Raises:
            RequestError: an id is not below `vocab_size`; the error's `parameter` is the sampling parameter that contains the id.
        """
        names = ("logit_bias", "banned_token_ids", "stop_token_ids")
        ids_by_parameter: dict[str, Iterable[int]] = {name: getattr(self, name) for name in names}
        ids_by_parameter["bad_words"] = [token_id for word in self.bad_words if not isinstance(word, str) for token_id in word]
        for name, token_ids in ids_by_parameter.items():
            largest = max(token_ids, default=-1)
            if largest >= vocab_size:
                _raise_error(name, largest, f"is not a token id of this model; ids are in [0, {vocab_size - 1}]")


SAMPLING_PARAM_NAMES = tuple(one.name for one in fields(SamplingParams))
SamplingParams.__init__ = suggest_arguments("SamplingParams")(SamplingParams.__init__)  # type: ignore[method-assign]


def resolve_seed(params: SamplingParams) -> int:
    """Return the request's seed, or a random one of 63 bits, which is reported so that the output can be reproduced."""
    return secrets.randbits(63) if params.seed is None else params.seed


def _raise_error(name: str, value: object, reason: str) -> None:
    raise RequestError(f"{name}: {value!r} {reason}", parameter=name)


def _checked_integer(name: str, value: object, low: int, high: int) -> int:
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise RequestError(f"{name}: {value!r} is not an integer", parameter=name)
    if not low <= int(value) <= high:
        _raise_error(name, value, f"is out of range; it must be in [{low}, {high}]")
    return int(value)


def _checked_number(name: str, value: object, low: float, high: float, limits_text: str | None = None) -> float:
    if isinstance(value, bool) or not isinstance(value, Real):
        raise RequestError(f"{name}: {value!r} is not a number", parameter=name)
    try:
        number = float(value)
    except OverflowError:  # the integer is larger than every float
        number = math.inf
    if not low <= number <= high:  # also refuses NaN
        _raise_error(name, value, f"is out of range; it must be {limits_text or f'in [{low:.16g}, {high:.16g}]'}")
    return number


def _checked_ids(name: str, value: object) -> tuple[int, ...]:
    if isinstance(value, (str, bytes, Mapping)) or not hasattr(value, "__iter__"):
        raise RequestError(f"{name}: {value!r} is not a list of token ids", parameter=name)
    return tuple(_checked_id(name, item) for item in value)


def _checked_id(name: str, value: object) -> int:
    if not isinstance(value, bool) and isinstance(value, Integral) and not 0 <= int(value) <= MAX_INT:
        _raise_error(name, value, "is not a token id of any model")
    return _checked_integer(name, value, 0, MAX_INT)


def _checked_bias(value: object) -> dict[int, float]:
    if not isinstance(value, Mapping):
        raise RequestError(f"logit_bias: {value!r} is not a mapping of token id to bias", parameter="logit_bias")
    return {
        _checked_id("logit_bias", token_id): _checked_number("logit_bias", bias, -MAX_LOGIT_CHANGE, MAX_LOGIT_CHANGE)
        for token_id, bias in value.items()
    }


def _checked_stop(value: object) -> tuple[str, ...]:
    texts = (value,) if isinstance(value, str) else value
    if isinstance(texts, (bytes, Mapping)) or not isinstance(texts, Sequence):
        raise RequestError(f"stop: {value!r} is neither a string nor a list of strings", parameter="stop")
    for text in texts:
        if not isinstance(text, str) or not text:
            _raise_error("stop", text, "cannot end the output; every stop must be a non-empty string")
    return tuple(texts)


def _checked_bad_words(value: object) -> tuple[str | tuple[int, ...], ...]:
    words = (value,) if isinstance(value, str) else value
    if isinstance(words, (bytes, Mapping)) or not isinstance(words, Sequence):
        raise RequestError(f"bad_words: {value!r} is not a list of texts or token sequences", parameter="bad_words")
    for word in words:
        if isinstance(word, Integral) or not hasattr(word, "__len__") or len(word) == 0:
            _raise_error("bad_words", word, "is not a bad word; give non-empty texts or lists of token ids")
    return tuple(word if isinstance(word, str) else _checked_ids("bad_words", word) for word in words)


def _checked_processors(value: object) -> tuple[CustomProcessor, ...]:
    if isinstance(value, (str, Mapping)) or not isinstance(value, Sequence):
        raise RequestError(f"processors: {value!r} is not a list of callables", parameter="processors")
    for processor in value:
        if not callable(processor):
            _raise_error("processors", processor, "is not callable; give functions of (token_ids, scores) that return scores")
    return tuple(value)
