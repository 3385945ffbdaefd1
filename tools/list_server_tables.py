"""Make the tables of docs/server.md from the code: `python tools/list_server_tables.py [--write]`."""

import asyncio
import importlib
import inspect
import json
import pkgutil
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import MISSING, fields
from types import ModuleType

from paceline import AsyncEngine
from paceline.parsing import tool_calls
from paceline.parsing.formats import ToolCallFormat
from paceline.parsing.registry import REASONING_FORMATS, REASONING_SYNONYMS, TOOL_CALL_FORMATS
from paceline.server import adapter_routes, answer_form, anthropic, model_routes, ollama, openai_chat, openai_completions, responses
from paceline.server import fields as shared_fields
from paceline.server.app import create_app
from paceline.server.field_table import LEFTOVERS, OTHER_SAMPLERS, REQUEST, TABLE, TEXT_REQUEST, UNSET_VALUES, FieldRules, Refusal
from paceline.server.fields import Fields, SamplingFields
from paceline.server.settings import ServerSettings
from page_blocks import REPOSITORY, run

PAGE = REPOSITORY / "docs" / "server.md"
TITLES: Mapping[str, str] = {
    "chat": "chats",
    "completions": "completions",
    "responses": "responses",
    "messages": "messages",
    "ollama": "Ollama",
    "tokenize": "tokenize",
    "adapters": "adapters",
}
MODULES: tuple[ModuleType, ...] = (
    *(openai_chat, openai_completions, responses, anthropic, ollama, model_routes, adapter_routes),
    *(answer_form, shared_fields),
)
_FOR_TEXT = ("chat", "completions", "responses", "messages")
_TAGS = {"openai": "OpenAI's, with additions of vLLM and llama.cpp", "anthropic": "Anthropic's", "ollama": "Ollama's"}
_TAGS |= {"adapters": "vLLM's, for adapters", "state": "state of the server"}


def paths() -> Iterator[str]:
    """Rows of the paths, one for each API."""
    engine = AsyncEngine.open("mini")
    settings = ServerSettings(adapter_loading=True, api_keys=("a-key-for-the-table",))
    described = create_app(engine, settings).openapi()["paths"]
    asyncio.run(engine.close())
    found: dict[str, list[str]] = {}
    for path, methods in described.items():
        for method, route in methods.items():
            found.setdefault(_TAGS[route["tags"][0]], []).append(f"`{method.upper()} {path}`")
    yield from ("| API | Paths |", "|---|---|")
    yield from (f"| {title} | {', '.join(given)} |" for title, given in found.items())


def limits() -> Iterator[str]:
    """Rows of the numbers in the server's settings."""
    texts: dict[str, str] = {}
    described = inspect.getdoc(ServerSettings) or ""  # Python 3.13 removes the indentation itself
    for names, text in re.findall(r"^    ([a-z_, ]+): (.+(?:\n        .+)*)", described, re.MULTILINE):
        texts[names] = " ".join(text.split()).rstrip(".")
    defaults = {one.name: one.default for one in fields(ServerSettings) if one.default is not MISSING}
    yield from ("| Setting | Default | |", "|---|---|---|")
    for names, text in texts.items():
        values = [defaults.get(name) for name in names.split(", ")]
        if all(isinstance(value, int | float) and not isinstance(value, bool) for value in values) and names != "host, port":
            yield f"| {_named(names.split(', '))} | {', '.join(f'{value:,}'.removesuffix('.0') for value in values)} | {text} |"


def calls() -> Iterator[str]:
    """Rows of the formats of tool calls, with the first line of each format's module: how it is written, and of which models."""
    modules = [importlib.import_module(f"{tool_calls.__name__}.{one.name}") for one in pkgutil.iter_modules(tool_calls.__path__)]
    names: dict[str, list[str]] = {}
    for name, one in TOOL_CALL_FORMATS.items():
        names.setdefault(_module_of(one, modules).__doc__ or "", []).append(name)
    yield from ("| Format | Models | Written |", "|---|---|---|")
    for text, given in sorted(names.items(), key=lambda item: item[1]):
        how, models = text.splitlines()[0].rstrip(".").rsplit(": ", 1)
        yield f"| {_named(given)} | {models} | {_code(how)} |"


def _module_of(one: ToolCallFormat, modules: Iterable[ModuleType]) -> ModuleType:
    """Return the module that defines a format."""
    for module in modules:
        if any(value is one for value in vars(module).values()):
            return module
    raise LookupError(f"no module defines {one}: give the format a name in its module")


def reasoning() -> Iterator[str]:
    """Rows of the formats of reasoning."""
    rows: dict[str, list[str]] = {}
    for name, one in REASONING_FORMATS.items():
        others = [other for other, known in REASONING_SYNONYMS.items() if known == name]
        marks = _marks(one.open, one.close) if one.close else "messages of a channel"
        rows.setdefault(marks, []).append(f"`{name}`{f' ({_named(others)})' if others else ''}")
    yield from ("| Format (other names) | Between |", "|---|---|")
    yield from (f"| {', '.join(names)} | {marks} |" for marks, names in rows.items())


def _marks(*marks: str) -> str:
    """Return the marks before and after reasoning as code; a table needs bars escaped."""
    return f"`{'…'.join(mark.strip() for mark in marks)}`".replace("|", "\\|")


def served_fields() -> dict[tuple[str, str], list[str]]:
    """Names of served fields, by API and kind of object, in the order of the models."""
    found: dict[tuple[str, str], dict[str, None]] = {}
    for module in MODULES:
        for kind in vars(module).values():
            if isinstance(kind, type) and issubclass(kind, Fields) and kind.__module__ == module.__name__ and kind.at[0]:
                names = (field.alias or name for name, field in kind.model_fields.items())
                found.setdefault(kind.at, {}).update(dict.fromkeys(names))
    return {at: list(names) for at, names in found.items()}


def request_fields() -> Iterator[str]:
    """Rows of what is served, ignored and refused: first what APIs share, then each API's own objects."""
    served = served_fields()
    sampling = tuple(SamplingFields.model_fields)
    of_text = tuple(name for name in openai_chat.TextFields.model_fields if name not in sampling)
    ignored_before = set[str]()
    yield from ("| Where | Served | Ignored | Refused |", "|---|---|---|---|")
    for title, names, rules in (
        ("every request", (), REQUEST),
        ("every object in a request", (), LEFTOVERS),
        ("chats, completions, responses, messages; Ollama's `options` refuse the same", sampling, OTHER_SAMPLERS),
        ("chats, completions", of_text, TEXT_REQUEST),
    ):
        above = () if rules is not TEXT_REQUEST else (*REQUEST.refused, *OTHER_SAMPLERS.refused)
        refused = {name: rule for name, rule in rules.refused.items() if name not in above}
        yield f"| {title} | {_named(names)} | {_named(sorted(rules.ignored - ignored_before))} | {_refused(refused)} |"
        ignored_before |= set() if rules is LEFTOVERS else rules.ignored
    for api, title in TITLES.items():
        places = dict.fromkeys([place for at, place in served if at == api] + list(TABLE.get(api, {})))
        for place in sorted(places, key=bool):  # the request first
            rules, own = TABLE.get(api, {}).get(place, FieldRules()), served.get((api, place), [])
            if not place and api in _FOR_TEXT:
                shared = (*sampling, *of_text) if api in ("chat", "completions") else sampling
                own = [name for name in own if name not in shared]
            ignored = rules.ignored - _shared_names(rules) - set(own)
            refused = {name: rule for name, rule in rules.refused.items() if TEXT_REQUEST.refused.get(name) != rule}
            if place and not ignored and not refused and api != "tokenize":
                continue  # /openapi.json describes it
            yield f"| {title}{f' `{place}`' if place else ''} | {_named(own)} | {_named(sorted(ignored))} | {_refused(refused)} |"


def _shared_names(rules: FieldRules) -> frozenset[str]:
    """Ignored names in the rows of what APIs share."""
    return frozenset().union(*(one.ignored for one in (REQUEST, LEFTOVERS, OTHER_SAMPLERS, TEXT_REQUEST) if one.ignored <= rules.ignored))


def _refused(rules: Mapping[str, Refusal]) -> str:
    """Refused names, each with the values that are ignored."""
    found = []
    for name, rule in rules.items():
        values = [_number(value) for value in rule.ignored_values if value is not None and not any(value is one for one in UNSET_VALUES)]
        found.append(f"`{name}`" + (f" ({', '.join(f'`{value}`' for value in dict.fromkeys(values))})" if values else ""))
    return ", ".join(found)


def _number(value: object) -> str:
    return json.dumps(value).removesuffix(".0")


def _named(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _code(text: str) -> str:
    """Return markup as code, words after it as they are; a table needs bars escaped."""
    text = text.replace("|", "\\|")
    if re.match(r"\w", text) and "<" not in text:
        return text
    parts = re.match(r"(\W.*?[>\]})])((?:, | )(?:with|all|as|in|the|which|or)\b[^<\[{]*)?$", text)
    return f"`{parts[1]}`{parts[2] or ''}" if parts else f"`{text}`"


TABLES = {"paths": paths, "fields": request_fields, "calls": calls, "reasoning": reasoning, "limits": limits}
BLOCKS = {name: lambda rows=rows: "\n".join(rows()) for name, rows in TABLES.items()}

if __name__ == "__main__":
    run(PAGE, BLOCKS, __doc__ or "")
