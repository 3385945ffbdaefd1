"""Renders a chat template: an untrusted program, which `tokenizer/chat_template.py` runs in a process of its own.

It imports nothing of paceline, and of other packages only jinja2.
"""

import json
from collections.abc import Callable, Iterator
from datetime import datetime
from functools import partial
from typing import Any

from jinja2 import Template, TemplateError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import SandboxedEnvironment
from jinja2.utils import Namespace


class GenerationBlock(Extension):
    """`{% generation %}` marks what the model says, for training; here it is its body."""

    tags = {"generation"}  # noqa: RUF012  # as jinja2 declares it

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("body_of"), [], [], body).set_lineno(line)

    def body_of(self, caller: Callable[[], str]) -> str:
        return caller()


class PublicNamespace(Namespace):
    """Jinja's `namespace`, without names that begin with an underscore: they could lead out of the sandbox."""

    def __init__(*arguments: Any, **values: Any) -> None:  # so that "self" may be a name
        own, *given = arguments
        values = dict(*given, **values)
        for name in values:
            _check_public(name)
        Namespace.__init__(own, values)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_public(name)
        Namespace.__setitem__(self, name, value)


class DictMaker:
    """`dict(...)` without the type's other attributes."""

    def __call__(self, *arguments: Any, **values: Any) -> dict[Any, Any]:
        return dict(*arguments, **values)

    def fromkeys(self, *arguments: Any) -> dict[Any, Any]:
        return dict.fromkeys(*arguments)


def renderer(source: str) -> Callable[[dict[str, Any]], str]:
    """The function that renders a template.

    Raises:
        TemplateError: it cannot be compiled.
    """
    return partial(rendered, compiled(source))


def compiled(source: str) -> Template:
    """A template in the environment that transformers gives to chat templates; a test compares their texts.

    Source: transformers, `apply_chat_template`. Deviations: templates may change their lists (Kimi K2's does; the values are this process's
    own), and `tojson` takes generators, as llama.cpp's does.
    """
    environment = SandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[GenerationBlock, loopcontrols])
    environment.filters["tojson"] = to_json
    environment.globals.update(raise_exception=raise_exception, strftime_now=strftime_now, dict=DictMaker(), namespace=PublicNamespace)
    return environment.from_string(source)


def raise_exception(message: str) -> None:
    raise TemplateError(message)


def strftime_now(layout: str) -> str:
    return datetime.now().strftime(layout)


def to_json(value: Any, *arguments: Any, **options: Any) -> str:
    """JSON that is not escaped for HTML; options by position are those of `json.dumps` that transformers takes, in its order."""
    names = ("ensure_ascii", "indent", "separators", "sort_keys")
    return json.dumps(value, **{"ensure_ascii": False, "default": _listed, **dict(zip(names, arguments, strict=False)), **options})


def _listed(value: object) -> object:
    if isinstance(value, Iterator):
        return list(value)
    raise TypeError(f"{type(value).__name__} is not JSON")


def rendered(template: Template, conversation: dict[str, Any]) -> str:
    """The text of a conversation: its messages, tools, options, add_generation_prompt, names and the most characters that it may have.

    Raises:
        TemplateError: it has more characters.
    """
    most, length = conversation["most"], 0
    parts: list[str] = []
    given = {name: conversation[name] for name in ("messages", "tools", "add_generation_prompt")} | {"documents": None}
    older = {"functions": to_json(conversation["tools"] or [], indent=2), "datetime": strftime_now("%b %d %Y %H:%M:%S")}  # as llama.cpp's
    for part in template.generate(**{**older, **conversation["names"], **conversation["options"], **given}):
        parts.append(part)
        length += len(part)
        if length > most:
            raise TemplateError(f"it makes a text of more than {most} characters")
    return "".join(parts)


def _check_public(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a namespace cannot hold {name!r}: the name begins with an underscore")
