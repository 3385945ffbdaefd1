"""Fields that hold an answer to a form, in the spellings of OpenAI, vLLM, llama.cpp and TGI, and the grammars they mean.

Every function raises HttpError or RequestError if the value of the field `name` is wrong or too long.
"""

import json
import re
from collections.abc import Callable
from typing import Any

from pydantic import Field

from paceline.sampling.grammars.grammar import Grammar
from paceline.server.errors import invalid, shown, unsupported
from paceline.server.fields import FastList, Fields, SamplingFields
from paceline.server.settings import ServerSettings

_GBNF = re.compile(r"^\s*[\w-]+\s*::=", re.MULTILINE)
_TYPES = "text, json_object, json_schema, regex, choice or grammar"

Form = tuple[str, Grammar]
"""The name of the field that holds an answer to a form, and the grammar."""


class ResponseFormat(Fields, at=("chat", "response_format")):
    """OpenAI's `response_format`. TGI writes the form in `value`, llama.cpp the schema in `schema`."""

    type: str
    json_schema: dict[str, Any] | None = None
    given_schema: Any = Field(default=None, alias="schema")
    pattern: str | None = None
    regex: str | None = None
    choice: FastList[str] | None = None
    grammar: str | None = None
    value: Any = None

    def form(self, settings: ServerSettings) -> Grammar | None:
        """The grammar; None = any text."""
        name = "response_format"
        if self.type == "text":
            return None
        schema = self.json_schema or self.given_schema or self.value
        if self.type == "json_object" and schema is None:
            return Grammar.json_object()
        if self.type in ("json_object", "json_schema", "json"):
            if isinstance(schema, dict) and schema is self.json_schema and "schema" in schema:
                schema = schema["schema"]
            elif schema is self.json_schema and schema is not None and not {"type", "properties", "$ref", "anyOf"} & set(schema):
                schema = None  # a name and no schema
            return schema_grammar(name, schema, settings)
        if self.type == "regex":
            return regex_grammar(name, self.pattern or self.regex or self.value, settings)
        if self.type == "choice":
            return choice_grammar(name, self.choice or self.value, settings)
        if self.type == "grammar":
            return lark_grammar(name, self.grammar or self.value, settings)
        raise invalid(f"{name}.type", f"is {shown(self.type)}: send {_TYPES}")


class StructuredOutputs(Fields, at=("chat", "structured_outputs")):
    json_form: Any = Field(default=None, alias="json")
    regex: str | None = None
    choice: FastList[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: Any = None


class FormFields(SamplingFields):
    """All fields that hold an answer to a form. A request may have one of them."""

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: Any = None
    guided_regex: str | None = None
    guided_choice: FastList[str] | None = None
    guided_grammar: str | None = None
    json_schema: Any = None
    regex: str | None = None
    grammar: str | None = None

    def form(self, settings: ServerSettings) -> Form | None:
        """Return the form of the answer, None = any text; HttpError if there are two, or it is wrong."""
        names = self._form_names()
        if len(names) > 1:
            raise invalid(names[0], f"and {names[1]} both hold the answer to a form: send one of them")
        found = [*self._structured(settings), *self._top_level(settings)]
        if self.response_format is not None and (grammar := self.response_format.form(settings)) is not None:
            found.append(("response_format", grammar))
        return found[0] if found else None

    def _form_names(self) -> list[str]:
        """The fields that hold a form."""
        within, names = self.structured_outputs, list[str]()
        if within is not None:
            given = [(field.alias or name, getattr(within, name)) for name, field in StructuredOutputs.model_fields.items()]
            names += [f"structured_outputs.{name}" for name, value in given if value not in (None, False)]
        names += [name for name in _TOP_LEVEL if getattr(self, name) not in (None, "")]
        has_format = self.response_format is not None and self.response_format.type != "text"
        return [*names, "response_format"] if has_format else names

    def form_name(self) -> str:
        """The field that a wrong grammar is an error of."""
        given = [name for name in (*_TOP_LEVEL, "response_format") if getattr(self, name) not in (None, "")]
        return "structured_outputs" if self.structured_outputs is not None else next(iter(given), "tools")

    def _structured(self, settings: ServerSettings) -> list[Form]:
        given, name = self.structured_outputs, "structured_outputs"
        if given is None:
            return []
        found = [
            (f"{name}.{key}", make(f"{name}.{key}", value, settings))
            for key, value, make in (
                ("json", given.json_form, schema_grammar),
                ("regex", given.regex, regex_grammar),
                ("choice", given.choice, choice_grammar),
                ("grammar", given.grammar, lark_grammar),
                ("structural_tag", given.structural_tag, tags_grammar),
            )
            if value is not None
        ]
        return [*found, (f"{name}.json_object", Grammar.json_object())] if given.json_object else found

    def _top_level(self, settings: ServerSettings) -> list[Form]:
        return [
            (name, make(name, value, settings)) for name, make in _TOP_LEVEL.items() if (value := getattr(self, name)) not in (None, "")
        ]


def schema_grammar(name: str, schema: object, settings: ServerSettings) -> Grammar:
    """Return the grammar of a JSON schema, given as an object or its text."""
    schema = _parsed(name, schema)
    if not isinstance(schema, dict):
        raise invalid(name, "has no schema that is a JSON object: send one")
    _check_length(name, len(json.dumps(schema)), settings)
    return Grammar.json_schema(schema)


def regex_grammar(name: str, pattern: object, settings: ServerSettings) -> Grammar:
    """Return the grammar of a regular expression that the whole answer matches; ^ and $ are implied."""
    if not isinstance(pattern, str) or not pattern:
        raise invalid(name, "has no pattern: send a regular expression as a string")
    _check_length(name, len(pattern), settings)
    pattern = pattern.removeprefix("^")
    if pattern.endswith("$") and not pattern.endswith("\\$"):
        pattern = pattern[:-1]
    return Grammar.regex(pattern)


def choice_grammar(name: str, texts: object, settings: ServerSettings) -> Grammar:
    """Return the grammar of one of several texts."""
    if not isinstance(texts, list) or not texts or not all(isinstance(text, str) and text for text in texts):
        raise invalid(name, "is no list of non-empty strings: send the texts to choose from")
    _check_length(name, sum(map(len, texts)), settings)
    return Grammar.choice(texts)


def lark_grammar(name: str, text: object, settings: ServerSettings) -> Grammar:
    """Return the grammar that a Lark text describes."""
    if not isinstance(text, str) or not text:
        raise invalid(name, "has no grammar: send a Lark grammar as a string")
    _check_length(name, len(text), settings)
    if _GBNF.search(text):
        reason = "it is GBNF (rules with ::=), and grammars are Lark's as llguidance reads them"
        raise unsupported(name, f"{reason}; write rules as `start: ...`, or send a JSON schema or a regex")
    return Grammar.lark(text)


def tags_grammar(name: str, given: object, settings: ServerSettings) -> Grammar:
    """Return the grammar of free text with tags that a schema follows: vLLM's structural tags, in both of its forms.

    A trigger is the beginning of a tag's `begin`. Text is free until a trigger is complete.

    Raises:
        HttpError, RequestError: it is none, or too long.
    """
    found = _parsed(name, given)
    outer = found if isinstance(found, dict) else {}
    inner = outer["format"] if isinstance(outer.get("format"), dict) else outer
    triggers, tags = inner.get("triggers"), inner.get("structures", inner.get("tags"))
    if not isinstance(triggers, list) or not isinstance(tags, list) or not tags or inner.get("type", "") not in _TAG_TYPES:
        raise invalid(name, "is no structural tag: send triggers, and structures with begin, schema and end")
    rules = list[str]()
    for tag in tags:
        begin, end, schema = _tag(name, tag)
        trigger = next((one for one in triggers if isinstance(one, str) and one and begin.startswith(one)), None)
        if trigger is None:
            raise invalid(name, f"has a tag that begins with {shown(begin)}, and no trigger that this begins with: send one")
        parts = [json.dumps(text) for text in (begin.removeprefix(trigger), end)]
        parts = [parts[0] * (parts[0] != '""'), f"%json {json.dumps({'x-guidance': _ONE_LINE, **schema})}", parts[1] * (parts[1] != '""')]
        index = len(rules)
        rules.append(f"tag_{index}: trigger_{index} {' '.join(part for part in parts if part)}")
        rules.append(f"trigger_{index}[lazy]: /(.|\\n)*/ {json.dumps(trigger)}")
    choices = " | ".join(f"tag_{index}" for index in range(0, len(rules), 2))
    text = "\n".join([f"start: ({choices})* /(.|\\n)*/", *rules])
    _check_length(name, len(text), settings)
    return Grammar.lark(text)


def _tag(name: str, tag: object) -> tuple[str, str, Any]:
    """Begin, end and schema of a structural tag."""
    given = tag if isinstance(tag, dict) else {}
    content = given["content"] if isinstance(given.get("content"), dict) else {}
    begin, end, schema = given.get("begin"), given.get("end"), given.get("schema", content.get("json_schema"))
    if not isinstance(begin, str) or not isinstance(end, str) or not isinstance(schema, dict):
        raise invalid(name, "has a tag without begin, end or JSON schema: send all three")
    return begin, end, schema


def _parsed(name: str, given: object) -> object:
    """A JSON value, which may come as its text."""
    if not isinstance(given, str):
        return given
    try:
        return json.loads(given)
    except (ValueError, RecursionError):
        raise invalid(name, "is no JSON: send a JSON object") from None


_ONE_LINE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_TAG_TYPES = ("", "structural_tag", "triggered_tags")
_TOP_LEVEL: dict[str, Callable[[str, Any, ServerSettings], Grammar]] = {
    "guided_json": schema_grammar,
    "guided_regex": regex_grammar,
    "guided_choice": choice_grammar,
    "guided_grammar": lark_grammar,
    "json_schema": schema_grammar,
    "regex": regex_grammar,
    "grammar": lark_grammar,
}


def _check_length(name: str, num_chars: int, settings: ServerSettings) -> None:
    if num_chars > settings.max_grammar_chars:
        raise invalid(name, f"has {num_chars} characters, and may have {settings.max_grammar_chars}: send a shorter one")
