"""A conversation's state, and the commands that change it."""

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from paceline.cli.options import SAMPLING, checked_text
from paceline.errors import RequestError
from paceline.sampling.params import SamplingParams

_COMMAND = re.compile(r"(/[A-Za-z]*)(?:\s+(.*))?", re.DOTALL)
_NOTHING = ('""', "''")


@dataclass(slots=True)
class Conversation:
    """The state of a conversation.

    Attributes:
        turns: messages of the user and the model, in order.
        taken_back: the last message, if it could not be answered.
        saved: files that were written and may be written again.
    """

    params: SamplingParams
    system: str | None = None
    turns: list[dict[str, str]] = field(default_factory=list)
    taken_back: str | None = None
    saved: set[Path] = field(default_factory=set)

    @property
    def messages(self) -> list[dict[str, str]]:
        """All of it, as a model takes it."""
        first = [] if self.system is None else [{"role": "system", "content": self.system}]
        return [*first, *self.turns]

    def message_to_retry(self) -> str:
        """The last message, as if it had not been sent yet.

        Raises:
            RequestError: there is none.
        """
        if self.taken_back is not None:
            return self.taken_back
        if not self.turns:
            raise RequestError("/retry: nothing was said yet")
        del self.turns[-1]
        return self.turns.pop()["content"]


@dataclass(frozen=True, slots=True)
class Command:
    """`do` changes the conversation and returns what to print; None = the caller carries the command out."""

    argument: str
    meaning: str
    do: Callable[[Conversation, str], str] | None = None


def parse_command(text: str) -> tuple[str, str] | None:
    """A command and its argument; None = a message. A message may well start with a path.

    Raises:
        RequestError: it is nearly a command.
    """
    match = _COMMAND.fullmatch(text.strip())
    if match is None:
        return None
    name, argument = match[1], (match[2] or "").strip()
    if name in COMMANDS:
        if argument and not COMMANDS[name].argument:
            raise RequestError(f"{name} takes nothing behind it; a message that begins so stands in triple quotes")
        return name, argument
    meant = next(iter(get_close_matches(name, COMMANDS, 1, 0.75)), None)
    if meant is not None or not argument:
        raise RequestError(f"{name} is not a command; " + (f"did you mean {meant}?" if meant else "/help lists them"))
    return None


def _help(conversation: Conversation, argument: str) -> str:
    width = max(len(f"{name} {command.argument}") for name, command in COMMANDS.items()) + 2
    lines = [f"{f'{name} {command.argument}':<{width}}{command.meaning}" for name, command in COMMANDS.items()]
    return "\n".join([*lines, 'A line that ends in \\ goes on in the next one; """ begins and ends a block; pasted lines are one message.'])


def _set(conversation: Conversation, argument: str) -> str:
    name, _, text = argument.partition(" ")
    name = name.replace("-", "_")
    if not name:
        return "\n".join(f"{name:<20}{_shown(getattr(conversation.params, name))}" for name in SAMPLING.options)
    if name not in SAMPLING.options:
        meant = next(iter(get_close_matches(name, SAMPLING.options, 1)), None)
        raise RequestError(f"/set: there is no {name}; " + (f"did you mean {meant}?" if meant else "/set alone lists all"))
    if text.strip():
        value = _value(name, text.strip())
        conversation.params = replace(conversation.params, **{name: value})
    return f"{name} is {_shown(getattr(conversation.params, name))}"


def _value(name: str, text: str) -> Any:
    """A setting's value from its text: JSON, "none", or, for a stop text, the text itself."""
    if text == "none":
        return None
    if name == "stop" and text[0] not in '["':
        return checked_text("stop", text)
    try:
        return json.loads(text)
    except ValueError:
        return text  # refused by the parameters, with what they take


def _shown(value: object) -> str:
    return "none" if value in (None, ()) else json.dumps(value)


def _system(conversation: Conversation, argument: str) -> str:
    if argument:
        is_quoted = len(argument) > 1 and argument[0] == argument[-1] == '"'
        conversation.system = None if argument in _NOTHING else checked_text("system", argument[1:-1] if is_quoted else argument)
    return "no system message" if conversation.system is None else f"system message: {conversation.system}"


def _reset(conversation: Conversation, argument: str) -> str:
    conversation.turns.clear()
    conversation.taken_back = None
    return "the conversation starts anew"


def _save(conversation: Conversation, argument: str) -> str:
    if not argument:
        raise RequestError("/save needs the name of a file")
    try:
        path = Path(argument).expanduser().resolve()
        if path.exists() and path not in conversation.saved:
            raise RequestError(f"/save: {argument} exists; give another name")
        path.write_text(json.dumps(conversation.messages, ensure_ascii=False, indent=2) + "\n", encoding="utf-8")
    except (OSError, RuntimeError, ValueError) as error:  # also: no such home, a null character
        raise RequestError(f"/save: {argument} cannot be written: {getattr(error, 'strerror', None) or error}") from None
    conversation.saved.add(path)
    return f"saved {len(conversation.messages)} messages to {argument}"


COMMANDS: Mapping[str, Command] = {
    "/help": Command("", "list these commands", _help),
    "/set": Command("[NAME [VALUE]]", "show the sampling parameters, or change one", _set),
    "/system": Command("[TEXT]", 'show or change the system message; "" removes it', _system),
    "/retry": Command("", "answer the last message again"),
    "/save": Command("FILE", "write the conversation as JSON", _save),
    "/reset": Command("", "forget the conversation; the system message stays", _reset),
    "/exit": Command("", "end, as Ctrl-D does"),
}
