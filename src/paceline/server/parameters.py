"""From the fields of requests to sampling parameters and request options."""

from collections.abc import Mapping, Sequence
from typing import Any

from paceline.engine.inputs import RequestOptions
from paceline.sampling.params import MAX_INT, MAX_SAMPLES, SamplingParams
from paceline.server.errors import HttpError, invalid, unsupported
from paceline.server.fields import SamplingFields
from paceline.server.settings import ServerSettings

MAX_BIASES = 1024
_SAME_NAMES = (
    "temperature", "top_p", "top_k", "min_p", "stop_token_ids", "ignore_eos", "min_tokens", "frequency_penalty", "presence_penalty",
    "repetition_penalty", "bad_words",
)  # fmt: skip


def sampling_params(
    fields: SamplingFields,
    settings: ServerSettings,
    defaults: Mapping[str, Any],
    *,
    max_tokens: int | None,
    n: int | None = None,
    stop: str | Sequence[str] | None = None,
    **more: Any,
) -> SamplingParams:
    """How the tokens of a request are chosen.

    Args:
        defaults: of parameters that the request leaves open.
        max_tokens: None = as many as fit; see `generation.GenerationRequest.fills_context`.
        n: None = one.
        stop: empty texts are left out.
        more: parameters that APIs have in fields of their own.

    Raises:
        HttpError, RequestError: a field is out of range.
    """
    stops = [text for text in ([stop] if isinstance(stop, str) else stop or []) if text]
    _check_limits(fields, settings, n, stops)
    given: dict[str, Any] = dict(defaults) | {name: value for name in _SAME_NAMES if (value := getattr(fields, name)) is not None}
    if fields.seed is not None:
        check_range("seed", fields.seed, -(2**63), 2**64 - 1)
        given["seed"] = fields.seed % 2**64
    if fields.logit_bias:
        given["logit_bias"] = _biases(fields.logit_bias)
    limit = MAX_INT if max_tokens is None else max_tokens
    return SamplingParams(**given, **more, n=1 if n is None else n, stop=stops, max_tokens=limit)


def token_limit(name: str, *limits: int | None, low: int = 1, unlimited: Sequence[int] = (-1,)) -> int | None:
    """Return the first limit that is given; None = as many tokens as fit in the context.

    Args:
        name: the field, for errors.
        low: the least number that is a limit.
        unlimited: numbers that mean what the context holds.

    Raises:
        HttpError: it is out of range.
    """
    limit = next((one for one in limits if one is not None), None)
    if limit is None or limit in unlimited:
        return None
    if not low <= limit <= MAX_INT:
        rest = " or ".join(map(str, unlimited))
        raise invalid(name, f"is {limit}: it must be in [{low}, {MAX_INT}], or {rest} for what the context holds")
    return limit


def num_top_logprobs(*, logprobs: bool | None, top_logprobs: int | None) -> int | None:
    """Return how many tokens are listed next to each token, None = no log-probabilities; HttpError if only the number is given."""
    if top_logprobs and not logprobs:
        raise invalid("top_logprobs", "needs logprobs=true: send both, or none")
    return (top_logprobs or 0) if logprobs else None


def check_range(name: str, value: int, low: int, high: int) -> None:
    """Raise HttpError if a number is out of range."""
    if not low <= value <= high:
        raise HttpError(400, f"{name}: {value} is out of range; it must be in [{low}, {high}]", parameter=name, code="invalid_value")


def check_prediction(prediction: str | None, *, is_read: bool) -> None:
    """Raise HttpError if there is a prediction and no drafter reads it."""
    if prediction is not None and not is_read:
        raise unsupported("prediction", "no drafter of this server reads it; leave it out, or serve with --drafter prediction")


def request_options(fields: SamplingFields, prediction: str | None = None, *, adapter: str | None = None) -> RequestOptions:
    """The options that go with the prompts of a request.

    Args:
        adapter: that it names as its model.
    """
    options = RequestOptions() if adapter is None else RequestOptions(adapter=adapter)
    if fields.speculation is not None:
        options["speculation"] = fields.speculation.model_dump(include={"enabled", "drafter", "num_speculative_tokens", "trees"})
    if prediction is not None:
        options["prediction"] = prediction
    if fields.cache_salt:
        options["cache_salt"] = fields.cache_salt
    return options


def _check_limits(fields: SamplingFields, settings: ServerSettings, n: int | None, stops: Sequence[str]) -> None:
    if n is not None:
        check_range("n", n, 1, min(settings.max_n, MAX_SAMPLES))
    if len(stops) > settings.max_stop:
        raise invalid("stop", f"has {len(stops)} texts, and may have {settings.max_stop}: send fewer")
    longest = max(map(len, stops), default=0)
    if longest > settings.max_stop_chars:
        raise invalid("stop", f"has a text of {longest} characters, which may have {settings.max_stop_chars}: send a shorter one")
    for name, values in (("logit_bias", fields.logit_bias), ("stop_token_ids", fields.stop_token_ids), ("bad_words", fields.bad_words)):
        if values is not None and len(values) > MAX_BIASES:
            raise invalid(name, f"has {len(values)} entries, and may have {MAX_BIASES}: send fewer")


def _biases(given: Mapping[str, float]) -> dict[int, float]:
    for name in given:
        if not (name.isascii() and name.isdecimal() and len(name) < 12):
            raise invalid("logit_bias", "has a key that is no token id: use whole numbers")
    return {int(name): bias for name, bias in given.items()}
