"""Finds the formats of a model from its chat template, or from a text that it generated.

A template writes calls and reasoning of earlier turns in the format that the model generates. Each format has signs: strings that must all
be in the template. A sign that begins with "!" must not be in the template, because it belongs to another format with the same marks. A
sign may have alternatives, separated by " | ". The tables are searched in their order; the first format found is the model's.
"""

from collections.abc import Mapping, Sequence

from paceline.parsing.formats import ReasoningFormat, ToolCallFormat


def shows_format(template: str, signs: Sequence[str]) -> bool:
    """Return whether a chat template has the signs of a format."""
    wanted = [sign for sign in signs if not sign.startswith("!")]
    unwanted = [sign.removeprefix("!") for sign in signs if sign.startswith("!")]
    return (
        bool(wanted)
        and all(any(part in template for part in sign.split(" | ")) for sign in wanted)
        and not any(sign in template for sign in unwanted)
    )


def format_of_template(formats: Mapping[str, ToolCallFormat] | Mapping[str, ReasoningFormat], template: str) -> str | None:
    """Return the name of the first format that a chat template shows."""
    return next((name for name, one in formats.items() if shows_format(template, one.signs)), None)


def tool_call_formats_of_text(formats: Mapping[str, ToolCallFormat], text: str) -> list[str]:
    """Return the names of the formats that have an opening mark or a token in a text."""
    return [name for name, one in formats.items() if any(mark in text for mark in (*one.markers.anywhere, *one.tokens, *one.text_signs))]


def reasoning_format_of_text(formats: Mapping[str, ReasoningFormat], text: str) -> str | None:
    """Return the name of the first reasoning format that has a mark in a text, or a token if the format has no marks."""
    for name, one in formats.items():
        if any(mark in text for mark in (one.open, one.close) if mark) or (not one.open and any(token in text for token in one.tokens)):
            return name
    return None
