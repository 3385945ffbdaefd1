"""The one place that turns the fields of requests into sampling parameters and request options."""

import json
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from paceline.engine.inputs import RequestOptions
from paceline.sampling.grammar import Grammar
from paceline.sampling.params import MAX_INT, MAX_SAMPLES, SamplingParams
from paceline.server.fields import SamplingFields
from paceline.server.http_errors import HttpError
from paceline.server.settings import ServerSettings

DEFAULT_TEMPERATURE = 1.0  # OpenAI's and Anthropic's
MAX_BIASES = 1024
_SAME_NAMES = (
    "top_p",
    "top_k",
    "min_p",
    "stop_token_ids",
    "ignore_eos",
    "min_tokens",
    "frequency_penalty",
    "presence_penalty",
    "repetition_penalty",
)


def sampling_params(
    fields: SamplingFields,
    settings: ServerSettings,
    *,
    max_tokens: int | None,
    n: int | None = None,
    stop: str | Sequence[str] | None = None,
    **more: Any,
) -> SamplingParams:
    """How the tokens of a request are chosen.

    Args:
        max_tokens: None = as many as fit; see `generation.GenerationRequest.takes_the_rest`.
        n: None = one.
        more: what dialects say in fields of their own.

    Raises:
        HttpError, RequestError: a field is out of range.
    """
    _check_limits(fields, settings, n, [stop] if isinstance(stop, str) else stop or [])
    given: dict[str, Any] = {name: value for name in _SAME_NAMES if (value := getattr(fields, name)) is not None}
    if fields.seed is not None:
        check_range("seed", fields.seed, -(2**63), 2**64 - 1)
        given["seed"] = fields.seed % 2**64
    if fields.logit_bias:
        given["logit_bias"] = _biases(fields.logit_bias)
    temperature = DEFAULT_TEMPERATURE if fields.temperature is None else fields.temperature
    limit = MAX_INT if max_tokens is None else max_tokens
    return SamplingParams(**given, **more, temperature=temperature, n=1 if n is None else n, stop=stop, max_tokens=limit)


def check_range(name: str, value: int, low: int, high: int) -> None:
    """That a number is within its limits.

    Raises:
        HttpError: it is not.
    """
    if not low <= value <= high:
        _refuse(name, f"{name}: {value} is out of range; it must be in [{low}, {high}]")


def check_prediction(prediction: str | None, *, is_read: bool) -> None:
    """That a drafter reads a prediction, if there is one.

    Raises:
        HttpError: none does.
    """
    if prediction is not None and not is_read:
        text = "prediction is not served: no drafter of this server reads it; leave it out, or serve with --drafter prediction"
        raise HttpError(400, text, parameter="prediction", code="unsupported_parameter")


def request_options(fields: SamplingFields, prediction: str | None = None, *, adapter: str | None = None) -> RequestOptions:
    """What goes with the prompts of a request besides.

    Args:
        adapter: that it asks for as its model.
    """
    options = RequestOptions() if adapter is None else RequestOptions(adapter=adapter)
    if fields.speculation is not None:
        options["speculation"] = fields.speculation.model_dump(include={"enabled", "drafter", "max_draft_tokens", "trees"})
    if prediction is not None:
        options["prediction"] = prediction
    return options


def schema_grammar(name: str, schema: object, settings: ServerSettings) -> Grammar:
    """What holds an answer to the JSON schema in the field `name`.

    Raises:
        HttpError, RequestError: it is none, or too long.
    """
    if not isinstance(schema, dict):
        _refuse(name, f"the schema of {name} is no JSON object: send one")
    num_chars = len(json.dumps(schema))
    if num_chars > settings.max_grammar_chars:
        _refuse(name, f"the schema of {name} has {num_chars} characters, and may have {settings.max_grammar_chars}: send a shorter one")
    return Grammar.json_schema(schema)


def _check_limits(fields: SamplingFields, settings: ServerSettings, n: int | None, stops: Sequence[str]) -> None:
    if n is not None:
        check_range("n", n, 1, min(settings.max_n, MAX_SAMPLES))
    if len(stops) > settings.max_stop:
        _refuse("stop", f"stop has {len(stops)} texts, and a request may have {settings.max_stop}: send fewer")
    longest = max(map(len, stops), default=0)
    if longest > settings.max_stop_chars:
        _refuse("stop", f"a stop text has {longest} characters, and may have {settings.max_stop_chars}: send a shorter one")
    for name, values in (("logit_bias", fields.logit_bias), ("stop_token_ids", fields.stop_token_ids)):
        if values is not None and len(values) > MAX_BIASES:
            _refuse(name, f"{name} has {len(values)} entries, and may have {MAX_BIASES}: send fewer")


def _biases(given: Mapping[str, float]) -> dict[int, float]:
    for name in given:
        if not (name.isascii() and name.isdecimal() and len(name) < 12):
            _refuse("logit_bias", "a key of logit_bias is no token id: use whole numbers")
    return {int(name): bias for name, bias in given.items()}


def _refuse(name: str, text: str) -> NoReturn:
    raise HttpError(400, text, parameter=name, code="invalid_value")
