"""Fields that the requests of every dialect share."""

from collections.abc import Mapping
from typing import Any, ClassVar, TypeVar

from pydantic import BaseModel, ConfigDict, GetCoreSchemaHandler, ValidationError, model_validator
from pydantic_core import CoreSchema
from pydantic_core.core_schema import no_info_before_validator_function

from paceline.server.http_errors import HttpError, invalid_field
from paceline.server.wrong_fields import spelled

_READ = (
    "messages",
    "prompt",
    "input",
    "system",
    "instructions",
    "tools",
    "prediction",
    "stop",
    "stop_sequences",
    "options",
    "format",
    "text",
    "response_format",
    "output_config",
    "chat_template_kwargs",
)
"""Fields, of all dialects, whose texts the model or the grammar is made of."""


def _unchanged(value: object) -> object:
    return value


def _fail_fast(schema: Any) -> None:
    """Set `fail_fast` on the lists of objects in a schema; errors of other lists are compared to find the one that was meant."""
    for inner in schema.values() if isinstance(schema, dict) else schema if isinstance(schema, list | tuple) else ():
        _fail_fast(inner)
    if isinstance(schema, dict) and schema.get("type") == "list" and schema["items_schema"]["type"] not in ("str", "int", "list"):
        schema["fail_fast"] = True


class Fields(BaseModel):
    """A JSON object whose fields are all known."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, protected_namespaces=())

    @classmethod
    def __get_pydantic_core_schema__(cls, source: type[BaseModel], handler: GetCoreSchemaHandler) -> CoreSchema:
        """Keep validation short: stop at the first wrong item of a list, and let other threads run before each object.

        pydantic holds the interpreter lock until it returns, or calls a Python function.
        """
        schema = handler(source)
        _fail_fast(schema)
        return no_info_before_validator_function(_unchanged, schema)

    refused: ClassVar[Mapping[str, str]] = {}
    """Fields of the dialect that are not served, with the reason; "nothing" (null, false, an empty list) is let through."""

    def check_refused(self, within: str = "") -> None:
        """That nothing is asked for that is not served, and that what the model reads is text.

        Args:
            within: the place of this object in the request; empty = it is the request.

        Raises:
            HttpError: 400, by name.
        """
        if not within:
            self._check_texts()
        for field, reason in self.refused.items():
            if getattr(self, field) not in (None, False, [], {}):
                name = f"{within}.{field}".removeprefix(".")
                raise HttpError(400, f"{name} is not served: {reason}", parameter=name, code="unsupported_parameter")

    def _check_texts(self) -> None:
        """That what the model reads is text: JSON can spell half a character, which no text holds."""
        for field in _READ:
            if (place := _half_character(getattr(self, field, None))) is not None:
                name = spelled(field, place)
                text = f"{name} holds half of a surrogate pair, which is no character: send both halves, or leave it out"
                raise HttpError(400, text, parameter=name, code="invalid_value")


def _half_character(value: object) -> tuple[str | int, ...] | None:
    """Where in a value the first half of a character stands; None = nowhere."""
    left: list[tuple[tuple[str | int, ...], object]] = [((), value)]
    while left:
        place, one = left.pop()
        if isinstance(one, str) and not _is_unicode(one):
            return place
        if isinstance(one, BaseModel):
            one = one.__dict__
        if isinstance(one, Mapping) and not all(map(_is_unicode, one)):
            return place
        inner = one.items() if isinstance(one, Mapping) else enumerate(one) if isinstance(one, list) else ()
        left += [((*place, key), found) for key, found in inner if isinstance(found, str | list | Mapping | BaseModel)][::-1]
    return None


def _is_unicode(text: str) -> bool:
    if text.isascii():
        return True
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


Read = TypeVar("Read", bound=Fields)


def read_fields(kind: type[Read], place: str, given: object) -> Read:
    """The fields of an object within a request, whose kind is known only once it is looked at.

    Args:
        place: of the object, such as "messages[0]".

    Raises:
        HttpError: one is wrong.
    """
    try:
        return kind.model_validate(given)
    except ValidationError as error:
        raise invalid_field(error.errors(include_url=False), place) from None


class SpeculationFields(Fields):
    """How a request may be drafted for, and what the answer says of it; none of it changes a token. `trees` brings the origins along."""

    enabled: bool = True
    drafter: str | None = None
    max_draft_tokens: int | None = None
    origins: bool = False
    trees: bool = False

    @model_validator(mode="after")
    def _bring_origins(self) -> "SpeculationFields":
        self.origins = self.origins or self.trees
        return self


class SamplingFields(Fields):
    """How tokens are chosen, under the names of `SamplingParams`; a dialect that has other names for them translates."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = None
    logit_bias: dict[str, float] | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    speculation: SpeculationFields | None = None

    @property
    def shows_origins(self) -> bool:
        """Whether the answer says who guessed each token."""
        return self.speculation is not None and self.speculation.origins
