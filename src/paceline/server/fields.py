"""Objects of a request: their JSON, pydantic models whose fields are served, and what becomes of all other fields."""

import json
import logging
import re
import sys
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import cache
from json.decoder import JSONArray, JSONObject  # type: ignore[attr-defined]  # not in typeshed
from json.scanner import py_make_scanner  # type: ignore[attr-defined]
from typing import Annotated, Any, ClassVar, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PrivateAttr, ValidationError, ValidationInfo, model_validator
from pydantic_core import PydanticCustomError

from paceline.errors import is_unicode
from paceline.server.errors import FIELD_ERROR, HttpError, check_count, field_error, field_name, invalid
from paceline.server.field_table import TABLE, FieldRules
from paceline.server.settings import ServerSettings

log = logging.getLogger("paceline.server")

IGNORED_HEADER = "X-Paceline-Ignored-Fields"
_MAX_NAMED = 20  # ignored fields that one answer names
_MAX_NAME = 60  # characters of an ignored field's name
_MAX_LOGGED = 1000  # names that one process logs
_MAX_CHECKED = 200  # unknown names of one request that are compared with known ones
_MIN_TYPO = 5  # characters of a name that one edit may change: shorter ones are too close to other words, as model is to mode
MAX_INLINE_BYTES = 16_384
"""Of a body that is parsed in the event loop: at most 5 ms."""
MAX_CONTAINERS = 50_000
"""Objects and lists of a body. 100 tools of a coding agent have about 5,000."""
MAX_MEMBERS = 10_000
"""Members of an object."""
MAX_ITEMS = 500_000
"""Items of a list; a prompt of token ids is the longest. Validating so many takes 30 ms, which no other thread interrupts."""
_HALF_CHARACTER = re.compile(rb"\\u[dD][89a-fA-F]")
_ECHOED = ("metadata", "user", "safety_identifier", "prompt_cache_key")  # an answer may repeat them, nothing else reads them
_COUNTED = {"messages": "max_messages", "input": "max_messages", "tools": "max_tools"}
"""Lists, and the setting that limits each; counted before any of their items is read."""


WholeNumber = Annotated[int, BeforeValidator(lambda value: int(value) if isinstance(value, float) and value.is_integer() else value)]
"""A whole number, which may be written 8.0: languages with one type of number write it so."""


class UnservedFields:
    """The fields of one request that are not served.

    Attributes:
        ignored: their names, in order, without indices: "messages[].name".
    """

    def __init__(self, *, refuses_unknown: bool = False) -> None:
        self.ignored: dict[str, None] = {}
        self._refuses_unknown = refuses_unknown
        self._num_checked = 0

    def check_unserved(self, kind: "type[Fields]", given: Mapping[str, Any]) -> None:
        """Check each field of `given` that `kind` does not serve, and record those that are ignored.

        Raises:
            PydanticCustomError: one is refused, misspelled, or unknown where those are refused.
        """
        rules = kind.rules()
        for name in given:
            if name in kind.served or given[name] is None:
                continue
            refusal = rules.refused.get(name)
            if refusal is not None and refusal.applies(given[name], given):
                raise _field_error(name, f"is not served: {refusal.reason}", "unsupported_parameter")
            if refusal is None and name not in rules.ignored:
                self._check_unknown(name, (*kind.served, *rules.refused))
            if len(self.ignored) <= _MAX_NAMED:
                place = kind.at[1]
                self.ignored.setdefault(_printable(f"{place}.{name}" if place else name))

    def _check_unknown(self, name: str, known: Iterable[str]) -> None:
        self._num_checked += 1
        is_typo = self._num_checked <= _MAX_CHECKED and name not in _known_anywhere()
        meant = closest_name(name, known) if is_typo else None
        if meant is not None:
            raise _field_error(name, f"is no parameter of this request: did you mean {meant}?", "unknown_parameter")
        if self._refuses_unknown:
            text = "is no parameter of this request: leave it out, or serve with --unknown-fields ignore"
            raise _field_error(name, text, "unknown_parameter")


class Fields(BaseModel):
    """Validates a JSON object of a request.

    Fields of the class are served. For other fields, `field_table.TABLE` decides whether they are ignored or refused.
    """

    model_config = ConfigDict(extra="ignore", strict=True, allow_inf_nan=False, protected_namespaces=())

    at: ClassVar[tuple[str, str]] = ("", "")
    """API and kind of object, a class argument: the row of the table."""
    served: ClassVar[frozenset[str]] = frozenset()
    """Names of served fields, as in JSON."""
    _ignored: dict[str, None] = PrivateAttr(default_factory=dict)
    _load_s: float = PrivateAttr(default=0.0)

    def __init_subclass__(cls, *, at: tuple[str, str] | None = None, **options: Any) -> None:
        cls.at = cls.at if at is None else at

    @classmethod
    def __pydantic_init_subclass__(cls, **_: Any) -> None:
        cls.served = frozenset(field.alias or name for name, field in cls.model_fields.items())

    @classmethod
    def rules(cls) -> FieldRules:
        """Rules for fields that are not served."""
        return TABLE.get(cls.at[0], {}).get(cls.at[1], FieldRules())

    @model_validator(mode="before")
    @classmethod
    def _check_unserved_fields(cls, given: Any, info: ValidationInfo) -> Any:
        if isinstance(given, dict) and not given.keys() <= cls.served:
            unserved = info.context if isinstance(info.context, UnservedFields) else UnservedFields()
            unserved.check_unserved(cls, given)
        return given

    @property
    def ignored(self) -> Collection[str]:
        """Names of fields that are ignored, in order."""
        return self._ignored

    @property
    def load_s(self) -> float:
        """Seconds that the request waited until its model was loaded."""
        return self._load_s

    def record_loading(self, seconds: float) -> None:
        self._load_s = seconds

    def ignore(self, parameter: str, key: str | None = None) -> None:
        """Report a field, or one of its keys, as ignored, because this model does not support it."""
        name = self.parameter_names().get(parameter, parameter)
        if len(self._ignored) <= _MAX_NAMED:
            self._ignored.setdefault(_printable(name if key is None else f"{name}.{key}"))

    @property
    def is_streamed(self) -> bool:
        """Whether the answer is sent as events."""
        return bool(getattr(self, "stream", None))

    @property
    def keep_s(self) -> float | None:
        """Seconds that the model stays loaded after the request; None = the server's default."""
        return None

    def parameter_names(self) -> Mapping[str, str]:
        """The API's names of our parameters, for errors; see `answering.named`."""
        return {}


@cache
def _known_anywhere() -> frozenset[str]:
    """Names that some object of some API has. They are no misspellings in another one, as `context` is none of `content`."""
    names, left = set[str](), [Fields]
    while left:
        kind = left.pop()
        names |= {*kind.served, *kind.rules().ignored, *kind.rules().refused}
        left += kind.__subclasses__()
    return frozenset(names)


Read = TypeVar("Read", bound=Fields)
Item = TypeVar("Item")
FastList = Annotated[list[Item], Field(fail_fast=True)]
"""A list that is read up to its first wrong item: a million wrong ones would make a million errors."""


def read_body(kind: type[Read], content: bytes, settings: ServerSettings) -> Read:
    """Return the fields of a request.

    Raises:
        HttpError: the body is no JSON object, or a field is wrong.
    """
    body = _parsed(content)
    if isinstance(body, dict):
        for name, limit in _COUNTED.items():
            if isinstance(body.get(name), list):
                check_count(name, len(body[name]), getattr(settings, limit))
        if _HALF_CHARACTER.search(content):
            _check_characters({name: value for name, value in body.items() if name in kind.served and name not in _ECHOED})
    unserved = UnservedFields(refuses_unknown=settings.unknown_fields == "refuse")
    try:
        fields = kind.model_validate(body, context=unserved)
    except ValidationError as error:
        raise field_error(error.errors(include_url=False), body) from None
    fields._ignored = unserved.ignored
    return fields


def report_ignored(names: Collection[str], logged: set[str]) -> dict[str, str]:
    """Log names of ignored fields, each once, and return the header that names them; none where there are none.

    Args:
        logged: names that were logged before; a bounded number is added.
    """
    for name in names:
        if name not in logged and len(logged) < _MAX_LOGGED:
            logged.add(name)
            log.info("%s", json.dumps({"event": "field_ignored", "field": name}))
    shown = [*list(names)[:_MAX_NAMED], *(["..."] if len(names) > _MAX_NAMED else [])]
    return {IGNORED_HEADER: ", ".join(shown)} if shown else {}


def closest_name(name: str, known: Iterable[str]) -> str | None:
    """The known name that differs by one edit, or only by case, hyphens and underscores; None = there is none."""
    plain, found = _plain(name), None
    for one in known:
        other = _plain(one)
        if plain == other:
            return one
        if found is None and min(len(plain), len(other)) >= _MIN_TYPO and _is_one_edit(plain, other):
            found = one
    return found


def _is_one_edit(first: str, second: str) -> bool:
    """Whether one character is added, left out or replaced, or two neighbours are swapped."""
    if abs(len(first) - len(second)) > 1:
        return False
    start = next((at for at, (one, other) in enumerate(zip(first, second, strict=False)) if one != other), min(len(first), len(second)))
    first, second = first[start:], second[start:]
    same_length = len(first) == len(second)
    if same_length and first[:2] == second[1::-1]:
        return first[2:] == second[2:]
    return first[len(first) >= len(second) :] == second[len(second) >= len(first) :]


def _plain(name: str) -> str:
    return name[: _MAX_NAME + 1].lower().replace("_", "").replace("-", "")


def _printable(name: str) -> str:
    """A name that a header and a line of log can hold."""
    return "".join(char if " " < char <= "~" and char != "," else "?" for char in name[:_MAX_NAME])


def _field_error(name: str, text: str, code: str) -> PydanticCustomError:
    return PydanticCustomError(FIELD_ERROR, text, {"name": name, "code": code})


def _parsed(content: bytes) -> Any:
    if not content.strip():
        raise HttpError(400, "the body is empty: send one JSON object", code="missing_required_parameter")
    try:
        return parse_json(content) if len(content) > MAX_INLINE_BYTES else json.loads(content)
    except json.JSONDecodeError:
        raise HttpError(400, "the body is no JSON: send one JSON object", code="invalid_json") from None
    except UnicodeDecodeError:
        raise HttpError(400, "the body holds bytes that are no UTF-8: send JSON in UTF-8", code="invalid_json") from None
    except RecursionError:
        raise HttpError(400, "the body is nested too deeply: send flatter objects and lists", code="invalid_value") from None
    except ValueError:
        text = f"the body has a number of more than {sys.get_int_max_str_digits()} digits: send a shorter one"
        raise HttpError(400, text, code="invalid_value") from None


def _check_characters(body: Mapping[str, Any]) -> None:
    """Refuse halves of surrogate pairs, which JSON can spell and no text can hold."""
    left: list[tuple[tuple[str | int, ...], Any]] = [((), body)]
    while left:
        place, one = left.pop()
        if isinstance(one, str) and not is_unicode(one):
            break
        if isinstance(one, dict):
            if not all(map(is_unicode, one)):
                break
            left += [((*place, key), inner) for key, inner in one.items()][::-1]
        elif isinstance(one, list):
            left += [((*place, index), inner) for index, inner in enumerate(one)][::-1]
    else:
        return
    raise invalid(field_name(place) or "", "holds half of a surrogate pair, which is no character: send both halves, or leave it out")


class SpeculationFields(Fields, at=("chat", "speculation")):
    """Controls drafting for a request, and what the answer reports about it. No field changes the tokens of the answer.

    `trees` implies `origins`.
    """

    enabled: bool = True
    drafter: str | None = None
    num_speculative_tokens: WholeNumber | None = None
    origins: bool = False
    trees: bool = False

    @model_validator(mode="after")
    def _imply_origins(self) -> "SpeculationFields":
        self.origins = self.origins or self.trees
        return self


class SamplingFields(Fields):
    """How tokens are chosen, by the names of `SamplingParams`. An API with other names translates them."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: WholeNumber | None = None
    min_p: float | None = None
    seed: WholeNumber | None = None
    stop_token_ids: FastList[int] | None = None
    ignore_eos: bool | None = None
    min_tokens: WholeNumber | None = None
    logit_bias: dict[str, float] | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    bad_words: FastList[str] | None = None
    cache_salt: str | None = None
    speculation: SpeculationFields | None = None

    @property
    def shows_origins(self) -> bool:
        """Whether the answer reports who drafted each token."""
        return self.speculation is not None and self.speculation.origins


def parse_json(body: bytes) -> Any:
    """Return what `json.loads` does; other threads can run meanwhile.

    A C call holds Python's interpreter lock until it returns: `json.loads` of 8 MB blocks every thread for up to 2 s. The pure-Python
    scanner of `json` is interrupted by other threads. A string is decoded in one C call: 8 MB take at most 13 ms.

    Raises:
        ValueError: as `json.loads`.
        HttpError: it has more than `MAX_CONTAINERS` objects and lists, an object more than `MAX_MEMBERS` members, or a list more than
            `MAX_ITEMS` items.
    """
    return _Decoder().decode(body.decode(json.detect_encoding(body)))


class _Decoder(json.JSONDecoder):
    """`json`'s decoder with its pure-Python scanner."""

    def __init__(self) -> None:
        super().__init__(object_pairs_hook=_dict)
        self._num_containers = 0
        self.parse_object, self.parse_array = self._object, self._array
        self.scan_once = py_make_scanner(self)

    def _object(self, *arguments: Any) -> Any:
        self._count_container()
        return JSONObject(*arguments)

    def _array(self, start: tuple[str, int], scan_once: Callable[[str, int], Any]) -> Any:
        self._count_container()
        num_items = 0

        def scan_counted(text: str, index: int) -> Any:
            nonlocal num_items
            num_items += 1
            if num_items > MAX_ITEMS:
                raise HttpError(400, f"a list of the body has more than {MAX_ITEMS} items: send fewer", code="invalid_value")
            return scan_once(text, index)

        return JSONArray(start, scan_counted)

    def _count_container(self) -> None:
        self._num_containers += 1
        if self._num_containers > MAX_CONTAINERS:
            raise HttpError(400, f"the body has more than {MAX_CONTAINERS} objects and lists: send fewer", code="invalid_value")


def _dict(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(pairs) > MAX_MEMBERS:
        raise HttpError(400, f"an object of the body has {len(pairs)} members: send at most {MAX_MEMBERS}", code="invalid_value")
    return dict(pairs)
