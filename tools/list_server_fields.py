"""Lists in docs/server.md the fields of requests: `python tools/list_server_fields.py` prints them, `--write` puts them into the page.

Served fields are those of the server's pydantic models; ignored and refused ones are those of `server/field_table.py`.
"""

import json
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from textwrap import fill
from types import ModuleType

from paceline.server import adapter_routes, answer_form, anthropic, fields, model_routes, ollama, openai_chat, openai_completions, responses
from paceline.server.field_table import LEFTOVERS, NOTHING, OTHER_SAMPLERS, REQUEST, TABLE, TEXT_REQUEST, FieldRules, Refusal
from paceline.server.fields import Fields

PAGE = Path(__file__).resolve().parents[1] / "docs" / "server.md"
BEGIN, END = "<!-- fields:begin -->", "<!-- fields:end -->"
WIDTH = 120
NONE = "–"
TITLES: Mapping[str, str] = {
    "chat": "OpenAI's chats, `/v1/chat/completions`",
    "completions": "OpenAI's completions, `/v1/completions`",
    "responses": "OpenAI's responses, `/v1/responses`",
    "messages": "Anthropic's messages, `/v1/messages`",
    "ollama": "Ollama's `/api/chat`, `/api/generate` and `/api/show`",
    "tokenize": "`/tokenize` and `/detokenize`",
    "adapters": "`/v1/load_lora_adapter` and `/v1/unload_lora_adapter`",
}
MODULES: tuple[ModuleType, ...] = (
    *(openai_chat, openai_completions, responses, anthropic, ollama, model_routes, adapter_routes),
    *(answer_form, fields),
)
SHARED: Mapping[str, FieldRules] = {
    "every request": REQUEST,
    "every request for text": OTHER_SAMPLERS,
    "every chat and completion": TEXT_REQUEST,
    "every object within": LEFTOVERS,
}
INTRODUCTION = """## Fields of requests

Fields are **served**, **ignored** or **refused**. Ignored fields change nothing in the answer; a response header
(`X-Paceline-Ignored-Fields`) names those that a request had, and the log names each once. Refused fields request
something that this server does not do, and get status 400; `null`, false, 0 and empty values of them are ignored.
A field in none of these tables is unknown: it is ignored like the others, or refused with `--unknown-fields refuse`. A
name that differs by one letter from a known one is always refused, with the known one."""


def served_fields() -> dict[tuple[str, str], list[str]]:
    """Names of served fields, by dialect and kind of object, in the order of the models."""
    found: dict[tuple[str, str], dict[str, None]] = {}
    for module in MODULES:
        for kind in vars(module).values():
            if isinstance(kind, type) and issubclass(kind, Fields) and kind.__module__ == module.__name__ and kind.at[0]:
                names = (field.alias or name for name, field in kind.model_fields.items())
                found.setdefault(kind.at, {}).update(dict.fromkeys(names))
    return {at: list(names) for at, names in found.items()}


def tables() -> str:
    """All tables, as Markdown."""
    served = served_fields()
    parts = [INTRODUCTION, "\n".join(_shared_rows())]
    for dialect, title in TITLES.items():
        rows = [f"| {title} | Served | Ignored |", "|---|---|---|"]
        refused: list[tuple[str, FieldRules]] = []
        places = dict.fromkeys([place for at, place in served if at == dialect] + list(TABLE.get(dialect, {})))
        for place in sorted(places, key=bool):  # the request first
            rules = TABLE.get(dialect, {}).get(place, FieldRules())
            names = served.get((dialect, place), [])
            own = rules.ignored - _shared_names(rules) - set(names)
            rows.append(f"| {f'`{place}`' if place else 'request'} | {_named(names)} | {_named(sorted(own))} |")
            refused.append((place, rules))
        parts.append("\n".join(rows))
        if lines := list(_refused_rows(refused)):
            parts.append("\n".join(["| Refused | Because | Also ignored if |", "|---|---|---|", *lines]))
    return "\n\n".join(parts)


def _shared_rows() -> Iterator[str]:
    """What several dialects share."""
    yield "| Where | Ignored |"
    yield "|---|---|"
    listed = set[str]()
    for title, rules in SHARED.items():
        yield f"| {title} | {_named(sorted(rules.ignored - listed))} |"
        if rules is not LEFTOVERS:
            listed |= rules.ignored
    yield ""
    yield "| Refused in every chat and completion, samplers in all dialects | Because | Also ignored if |"
    yield "|---|---|---|"
    yield from _rows_of(TEXT_REQUEST.refused, "")


def _shared_names(rules: FieldRules) -> frozenset[str]:
    """Ignored names that the tables of shared fields have."""
    return frozenset().union(*(shared.ignored for shared in SHARED.values() if shared.ignored <= rules.ignored))


def _refused_rows(objects: Iterable[tuple[str, FieldRules]]) -> Iterator[str]:
    for place, rules in objects:
        own = {name: rule for name, rule in rules.refused.items() if TEXT_REQUEST.refused.get(name) != rule}
        yield from _rows_of(own, f"{place}." if place else "")


def _rows_of(refused: Mapping[str, Refusal], prefix: str) -> Iterator[str]:
    """A row for each reason."""
    groups: dict[tuple[str, str], list[str]] = {}
    for name, rule in refused.items():
        groups.setdefault((rule.reason, _harmless(rule)), []).append(prefix + name)
    for (reason, harmless), names in groups.items():
        yield f"| {_named(names)} | {reason} | {harmless} |"


def _harmless(rule: Refusal) -> str:
    values = [json.dumps(value) for value in rule.harmless if value is not None and not any(value is one for one in NOTHING)]
    if False not in rule.harmless and not values:
        return NONE
    with_others = " or no penalty is set" if rule.only_with else ""
    return (", ".join(f"`{value}`" for value in dict.fromkeys(values)) or NONE) + with_others


def _named(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names) or NONE


def written(page: str) -> str:
    """The page with the tables between the markers.

    Raises:
        ValueError: a marker is missing.
    """
    if BEGIN not in page or END not in page:
        raise ValueError(f"the page has no {BEGIN} … {END}: put both lines where the tables belong")
    before, rest = page.split(BEGIN, 1)
    return f"{before}{BEGIN}\n{tables()}\n{END}{rest.split(END, 1)[1]}"


def main(arguments: list[str]) -> int:
    """Print the tables, or write them with --write."""
    if arguments == ["--write"]:
        PAGE.write_text(written(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
        return 0
    print(fill(f"Without --write nothing is written to {PAGE.name}.", WIDTH), "", tables(), sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
