"""The program that renders a chat template, in a process of its own; `chat_template.py` starts it and asks.

A template is an untrusted program, and a single operation of it can take a minute or all memory, which nothing in the same process could
stop. So the system limits this process's address space and its time for each answer.

It imports nothing of paceline, and of other packages only jinja2. Its arguments are the limits. Questions and answers are lines of JSON:
{} once it is ready; {} to {"template"}; then {"text"} to {"messages", "tools", "options", "add_generation_prompt", "names", "most"}; or
{"error", "message"}.
"""

import faulthandler
import json
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from datetime import datetime
from typing import Any

from jinja2 import Template, TemplateError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

BROKEN = 3
"""Exit code of a process that could not even say what went wrong; of one that was too late it is 1."""


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


def compiled(source: str) -> Template:
    """A template in the environment that transformers gives to chat templates; a test compares their texts.

    Source: transformers, `apply_chat_template`.
    """
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[GenerationBlock, loopcontrols])
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
    return json.dumps(value, **{"ensure_ascii": False, **dict(zip(names, arguments, strict=False)), **options})


def rendered(template: Template, question: dict[str, Any]) -> str:
    """The text of a conversation.

    Raises:
        TemplateError: it has more characters than are wanted.
    """
    most, length = question["most"], 0
    parts: list[str] = []
    given = {name: question[name] for name in ("messages", "tools", "add_generation_prompt")} | {"documents": None}
    for part in template.generate(**{**question["names"], **question["options"], **given}):
        parts.append(part)
        length += len(part)
        if length > most:
            raise TemplateError(f"it makes a text of more than {most} characters")
    return "".join(parts)


def serve(memory_bytes: int, cpu_seconds: int, wait_seconds: int) -> None:
    """Answer the questions of standard input until it ends."""
    compiled("")  # imports what it needs before the limits hold
    _limit_memory(memory_bytes)
    _answer({})
    template: Template | None = None
    for line in sys.stdin.buffer:
        faulthandler.dump_traceback_later(wait_seconds, exit=True)  # its watchdog thread does not need the GIL
        _limit_processor(cpu_seconds)
        try:
            question = json.loads(line)
            if template is None:
                template, found = compiled(question["template"]), {}
            else:
                found = {"text": rendered(template, question)}
        except Exception as error:
            found = {"error": type(error).__name__, "message": str(error)[:2000]}
        _answer(found)
        faulthandler.cancel_dump_traceback_later()


def _answer(found: dict[str, str]) -> None:
    sys.stdout.buffer.write(json.dumps(found).encode() + b"\n")
    sys.stdout.buffer.flush()


def _check_public(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a namespace cannot hold {name!r}: the name begins with an underscore")


def _limit_memory(num_bytes: int) -> None:
    """Limit memory, where the system can, and forbid writing files."""
    with suppress(ImportError, OSError, ValueError):
        import resource

        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
        resource.setrlimit(resource.RLIMIT_AS, (num_bytes, num_bytes))


def _limit_processor(seconds: int) -> None:
    """Allow `seconds` more, where the system can."""
    with suppress(ImportError, OSError, ValueError):
        import resource

        usage = resource.getrusage(resource.RUSAGE_SELF)
        used = int(usage.ru_utime + usage.ru_stime)
        resource.setrlimit(resource.RLIMIT_CPU, (used + seconds, resource.getrlimit(resource.RLIMIT_CPU)[1]))


if __name__ == "__main__":
    try:
        serve(*map(int, sys.argv[1:4]))
    except BaseException:  # out of memory while reporting that
        os._exit(BROKEN)
