"""The one place that turns OpenAI's fields into sampling parameters and request options."""

import json
from collections.abc import Mapping
from typing import Any, NoReturn

from paceline.engine.inputs import RequestOptions
from paceline.sampling.grammar import Grammar
from paceline.sampling.params import MAX_INT, SamplingParams
from paceline.server.http_errors import HttpError
from paceline.server.openai.fields import ResponseFormat, TextFields
from paceline.server.settings import ServerSettings

DEFAULT_TEMPERATURE = 1.0  # OpenAI's
MAX_BIASES = 1024
_SAME_NAMES = (
    "top_p",
    "top_k",
    "min_p",
    "stop",
    "stop_token_ids",
    "ignore_eos",
    "min_tokens",
    "frequency_penalty",
    "presence_penalty",
    "repetition_penalty",
)


def sampling_params(fields: TextFields, settings: ServerSettings, *, max_tokens: int | None, **more: Any) -> SamplingParams:
    """How the tokens of a request are chosen.

    Args:
        max_tokens: None = as many as fit; see `generation.Job.takes_the_rest`.
        more: what dialects say in fields of their own.

    Raises:
        HttpError, RequestError: a field is out of range.
    """
    _check_limits(fields, settings)
    given: dict[str, Any] = {name: value for name in _SAME_NAMES if (value := getattr(fields, name)) is not None}
    if fields.seed is not None:
        if not -(2**63) <= fields.seed < 2**64:
            raise HttpError(400, "seed is out of range: send a whole number of 64 bits", parameter="seed", code="invalid_value")
        given["seed"] = fields.seed % 2**64
    if fields.logit_bias:
        given["logit_bias"] = _biases(fields.logit_bias)
    if (grammar := _grammar(fields.response_format, settings)) is not None:
        given["grammar"] = grammar
    temperature = DEFAULT_TEMPERATURE if fields.temperature is None else fields.temperature
    n = 1 if fields.n is None else fields.n
    return SamplingParams(**given, **more, temperature=temperature, n=n, max_tokens=MAX_INT if max_tokens is None else max_tokens)


def request_options(fields: TextFields, prediction: str | None = None) -> RequestOptions:
    """What goes with the prompts of a request besides."""
    options = RequestOptions()
    if fields.speculation is not None:
        options["speculation"] = fields.speculation.model_dump(include={"enabled", "drafter", "max_draft_tokens", "trees"})
    if prediction is not None:
        options["prediction"] = prediction
    return options


def _check_limits(fields: TextFields, settings: ServerSettings) -> None:
    if fields.n is not None and fields.n > settings.max_n:
        _refuse("n", f"n is {fields.n}, and a request may have {settings.max_n} samples: ask for fewer")
    stops = [fields.stop] if isinstance(fields.stop, str) else fields.stop or []
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


def _grammar(wanted: ResponseFormat | None, settings: ServerSettings) -> Grammar | None:
    if wanted is None or wanted.type == "text":
        return None
    if wanted.type == "json_object":
        return Grammar.json_object()
    described = wanted.json_schema or {}
    schema = described.get("schema")
    if not isinstance(schema, dict):
        _refuse("response_format", "response_format.json_schema.schema is no JSON object: send a schema")
    num_chars = len(json.dumps(schema))
    if num_chars > settings.max_grammar_chars:
        text = f"the schema of response_format has {num_chars} characters, and may have {settings.max_grammar_chars}: send a shorter one"
        _refuse("response_format", text)
    return Grammar.json_schema(schema)


def _refuse(name: str, text: str) -> NoReturn:
    raise HttpError(400, text, parameter=name, code="invalid_value")
