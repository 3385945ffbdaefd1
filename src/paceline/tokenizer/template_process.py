"""The functions that run in the process in which `chat_template.py` renders chat templates. To start fast, it imports only jinja2."""

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
    """Supports the tag `{% generation %}`, which marks the model's text for training. It is rendered as its content."""

    tags = {"generation"}  # noqa: RUF012  # type of jinja2's attribute

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("render_content"), [], [], body).set_lineno(line)

    def render_content(self, caller: Callable[[], str]) -> str:
        return caller()


class PublicNamespace(Namespace):
    """A version of Jinja's `namespace` that rejects names with a leading underscore, with which templates could escape the sandbox."""

    def __init__(*arguments: Any, **values: Any) -> None:  # no parameter `self`: a template may use that name
        namespace, *positional = arguments
        values = dict(*positional, **values)
        for name in values:
            _check_public(name)
        Namespace.__init__(namespace, values)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_public(name)
        Namespace.__setitem__(self, name, value)


class RestrictedDict:
    """Jinja's `dict(...)`. It can be called and has `fromkeys`, but no other method of the type `dict`."""

    def __call__(self, *arguments: Any, **values: Any) -> dict[Any, Any]:
        return dict(*arguments, **values)

    def fromkeys(self, *arguments: Any) -> dict[Any, Any]:
        return dict.fromkeys(*arguments)


def renderer(source: str) -> Callable[[dict[str, Any]], str]:
    """Return the function that renders a template.

    Raises:
        TemplateError: the template does not compile.
    """
    return partial(render, compile_template(source))


def compile_template(source: str) -> Template:
    """Compile a template with the same Jinja settings and functions as in transformers.

    Source: transformers, `apply_chat_template`. Deviations: templates may modify lists, as Kimi K2's does, because they are
    copies here; and `tojson` accepts generators, as in llama.cpp.
    """
    environment = SandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[GenerationBlock, loopcontrols])
    environment.filters["tojson"] = to_json
    environment.globals.update(raise_exception=raise_exception, strftime_now=strftime_now, dict=RestrictedDict(), namespace=PublicNamespace)
    return environment.from_string(source)


def raise_exception(message: str) -> None:
    raise TemplateError(message)


def strftime_now(layout: str) -> str:
    return datetime.now().strftime(layout)


def to_json(value: Any, *arguments: Any, **options: Any) -> str:
    """Replace Jinja's filter `tojson`, which would escape HTML. Positional arguments are in the order of transformers' `tojson`."""
    names = ("ensure_ascii", "indent", "separators", "sort_keys")
    return json.dumps(value, **{"ensure_ascii": False, "default": _to_list, **dict(zip(names, arguments, strict=False)), **options})


def _to_list(value: object) -> object:
    if isinstance(value, Iterator):
        return list(value)
    raise TypeError(f"{type(value).__name__} is not a JSON value")


def render(template: Template, conversation: dict[str, Any]) -> str:
    """Render a conversation.

    Args:
        conversation: a mapping with messages, tools, options, add_generation_prompt, special_tokens and max_chars.

    Raises:
        TemplateError: the rendered text is longer than `max_chars`.
    """
    limit, length = conversation["max_chars"], 0
    parts: list[str] = []
    variables = {name: conversation[name] for name in ("messages", "tools", "add_generation_prompt")} | {"documents": None}
    llama_cpp_names = {"functions": to_json(conversation["tools"] or [], indent=2), "datetime": strftime_now("%b %d %Y %H:%M:%S")}
    for part in template.generate(**{**llama_cpp_names, **conversation["special_tokens"], **conversation["options"], **variables}):
        parts.append(part)
        length += len(part)
        if length > limit:
            raise TemplateError(f"its text has more than {limit} characters")
    return "".join(parts)


def _check_public(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a namespace cannot have the name {name!r}, which begins with an underscore")
