"""Fields that hold an answer to a form, in the spellings of OpenAI, vLLM, llama.cpp and TGI, and the grammars they mean.

Every function raises HttpError or RequestError if the value of the field `name` is wrong or too long.
"""

import json
import re
from collections.abc import Callable
from typing import Any

from pydantic import Field

from paceline.sampling.grammars.compiled_grammar import JSON_WHITESPACE
from paceline.sampling.grammars.grammar import Grammar
from paceline.server.errors import invalid, shown, unsupported
from paceline.server.fields import FastList, Fields, SamplingFields
from paceline.server.settings import ServerSettings

_GBNF = re.compile(r"^\s*[\w-]+\s*::=", re.MULTILINE)
_TYPES = "text, json_object, json_schema, regex, choice or grammar"

MakeGrammar = Callable[[str, Any, ServerSettings], Grammar]
"""Makes a grammar of the name and the value of a field."""


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

    def form(self, settings: ServerSettings) -> Grammar | None:
        """Return the grammar of the answer, None = any text; HttpError if there are two, or it is wrong."""
        given = self._given_forms()
        if len(given) > 1:
            raise invalid(given[0][0], f"and {given[1][0]} both hold the answer to a form: send one of them")
        for name, value, make in given:
            return make(name, value, settings)
        return None

    def form_name(self) -> str:
        """The field that a wrong grammar is an error of."""
        return next((name.partition(".")[0] for name, _, _ in self._given_forms()), "tools")

    def _given_forms(self) -> list[tuple[str, Any, MakeGrammar]]:
        """The fields that hold a form: name, value, and what makes the grammar."""
        within = {} if self.structured_outputs is None else self.structured_outputs.model_dump(by_alias=True)
        given = [(f"structured_outputs.{name}", value, _WITHIN[name]) for name, value in within.items() if value not in (None, False)]
        given += [(name, value, make) for name, make in _TOP_LEVEL.items() if (value := getattr(self, name)) not in (None, "")]
        has_format = self.response_format is not None and self.response_format.type != "text"
        return [*given, ("response_format", self.response_format, format_grammar)] if has_format else given


def format_grammar(name: str, form: ResponseFormat, settings: ServerSettings) -> Grammar:
    """Return the grammar of a `response_format` of another type than text."""
    schema = form.json_schema or form.given_schema or form.value
    if form.type == "json_object" and schema is None:
        return Grammar.json_object()
    if form.type in ("json_object", "json_schema", "json"):
        if isinstance(schema, dict) and schema is form.json_schema and "schema" in schema:
            schema = schema["schema"]
        elif schema is form.json_schema and schema is not None and not {"type", "properties", "$ref", "anyOf"} & set(schema):
            schema = None  # a name and no schema
        return schema_grammar(name, schema, settings)
    given = {"regex": form.pattern or form.regex, "choice": form.choice, "grammar": form.grammar}
    if form.type in given:
        return _MAKERS[form.type](name, given[form.type] or form.value, settings)
    raise invalid(f"{name}.type", f"is {shown(form.type)}: send {_TYPES}")


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
        before, after = (f"{json.dumps(text)} " if text else "" for text in (begin.removeprefix(trigger), end))
        index = len(rules)
        rules.append(f"tag_{index}: trigger_{index} {before}%json {json.dumps({'x-guidance': JSON_WHITESPACE, **schema})} {after}".rstrip())
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


_TAG_TYPES = ("", "structural_tag", "triggered_tags")
_MAKERS: dict[str, MakeGrammar] = {"json": schema_grammar, "regex": regex_grammar, "choice": choice_grammar, "grammar": lark_grammar}
_WITHIN = {**_MAKERS, "json_object": lambda *_: Grammar.json_object(), "structural_tag": tags_grammar}
_TOP_LEVEL = {f"guided_{name}": make for name, make in _MAKERS.items()}
_TOP_LEVEL |= {"json_schema": schema_grammar, "regex": regex_grammar, "grammar": lark_grammar}


def _check_length(name: str, num_chars: int, settings: ServerSettings) -> None:
    if num_chars > settings.max_grammar_chars:
        raise invalid(name, f"has {num_chars} characters, and may have {settings.max_grammar_chars}: send a shorter one")
