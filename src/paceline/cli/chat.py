"""`paceline chat`: a conversation in the terminal, its state, and the commands that change it."""

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paceline.cli.options import SAMPLING, Settings, checked_text, with_settings
from paceline.cli.reporting import EXIT_INTERRUPTED, exit_code, print_error, print_notice
from paceline.cli.run import Explain, ShowDrafts, System
from paceline.errors import CONTEXT_LENGTH_EXCEEDED, CapacityError, PacelineError, RequestError
from paceline.sampling.params import MAX_INT, SamplingParams
from paceline.spelling import OTHER_NAMES

if TYPE_CHECKING:
    from paceline.cli.message_input import Entry, MessageInput
    from paceline.cli.rendering import Answer
    from paceline.llm import LLM

_COMMAND = re.compile(r"(/[A-Za-z]*|/\?)(?:\s+(.*))?", re.DOTALL)
KEEP_SYSTEM_HELP = "When the context is full the oldest turns are not sent any more; keep the system message then."
_NOTHING = ('""', "''")


@dataclass(slots=True)
class Conversation:
    """The state of a conversation.

    Attributes:
        turns: messages of the user and the model, in order.
        num_dropped: oldest turns that are no longer sent, because the context is full.
        keeps_system: whether the system message is sent after turns were dropped.
        answer: the last one, as it was written.
        withdrawn_message: the last message, if it was not answered.
        saved: files that were written and may be written again.
    """

    params: SamplingParams
    system: str | None = None
    turns: list[dict[str, str]] = field(default_factory=list)
    num_dropped: int = 0
    keeps_system: bool = True
    answer: "Answer | None" = None
    withdrawn_message: str | None = None
    saved: set[Path] = field(default_factory=set)

    @property
    def messages(self) -> list[dict[str, str]]:
        """All messages, the system message first."""
        first = [] if self.system is None else [{"role": "system", "content": self.system}]
        return [*first, *self.turns]

    def messages_to_send(self, text: str) -> list[dict[str, str]]:
        """Return the messages of a request: without the turns that were dropped, and with a new message."""
        has_system = self.system is not None and (self.keeps_system or not self.num_dropped)
        first = self.messages[:1] if has_system else []
        return [*first, *self.turns[self.num_dropped :], {"role": "user", "content": text}]

    def message_to_retry(self) -> str:
        """Return the last message after removing its turn.

        Raises:
            RequestError: there is none.
        """
        if self.withdrawn_message is not None:
            return self.withdrawn_message
        if not self.turns:
            raise RequestError("/retry: nothing was said yet")
        del self.turns[-1]
        text = self.turns.pop()["content"]
        self.num_dropped = min(self.num_dropped, len(self.turns))
        return text


@dataclass(frozen=True, slots=True)
class Command:
    """`do` changes the conversation and returns what to print; None = the caller carries the command out."""

    argument: str
    meaning: str
    do: Callable[[Conversation, str], str] | None = None


def parse_command(text: str) -> tuple[str, str] | None:
    """Parse a command and its argument; None = a message, which may start with a path.

    Raises:
        RequestError: it is nearly a command.
    """
    match = _COMMAND.fullmatch(text.strip())
    if match is None:
        return None
    name, argument = OTHER_COMMANDS.get(match[1], match[1]), (match[2] or "").strip()
    if name in COMMANDS:
        if argument and not COMMANDS[name].argument:
            raise RequestError(f"{name} takes no argument; put a message that begins like this in triple quotes")
        return name, argument
    meant = next(iter(get_close_matches(name, [*COMMANDS, *OTHER_COMMANDS], 1, 0.75)), None)
    if name in OTHER_PROGRAMS:
        raise RequestError(f"{name} is not a command; {OTHER_PROGRAMS[name]}")
    if meant is not None or not argument:
        raise RequestError(f"{name} is not a command; " + (f"did you mean {meant}?" if meant else "/help lists them"))
    return None


def _help(conversation: Conversation, argument: str) -> str:
    width = max(len(f"{name} {command.argument}") for name, command in COMMANDS.items()) + 2
    lines = [f"{f'{name} {command.argument}':<{width}}{command.meaning}" for name, command in COMMANDS.items()]
    return "\n".join([*lines, 'A line that ends in \\ goes on in the next one; """ begins and ends a block; pasted lines are one message.'])


_SET_AT_START = ("max_model_len", "drafter", "num_speculative_tokens", "threads", "kv_cache_dtype", "kv_cache_gb", "dtype")
"""Options of the model's engine that users of other programs change in a conversation."""


def _set(conversation: Conversation, argument: str) -> str:
    name, _, text = argument.partition(" ")
    name = name.replace("-", "_")
    if not name:
        return "\n".join(f"{name:<20}{_shown(name, conversation.params)}" for name in SAMPLING.options)
    if name in ("system", "parameter"):  # Ollama's syntax
        raise RequestError("/set: " + ("use /system TEXT" if name == "system" else "leave out the word parameter: /set temperature 0.7"))
    if name not in SAMPLING.options:
        ours = OTHER_NAMES.get(name, name)
        if ours in _SET_AT_START:
            flag = f"--{ours.replace('_', '-')}"
            raise RequestError(f"/set: {name} is set when the model is loaded; end, and begin again: paceline chat MODEL {flag} VALUE")
        meant = ours if ours in SAMPLING.options else next(iter(get_close_matches(name, SAMPLING.options, 1)), None)
        raise RequestError(f"/set: there is no {name}; " + (f"did you mean {meant}?" if meant else "/set alone lists all"))
    if text.strip():
        value = _value(name, text.strip())
        conversation.params = replace(conversation.params, **{name: value})
    return f"{name} is {_shown(name, conversation.params)}"


def _value(name: str, text: str) -> Any:
    """Parse a setting's value: JSON, "none", or, for a stop text, the text itself."""
    if name == "max_tokens" and text in ("-1", "none"):
        return MAX_INT
    if text == "none":
        return None
    if name == "stop" and text[0] not in '["':
        return checked_text("stop", text)
    try:
        return json.loads(text)
    except ValueError:
        return text  # SamplingParams refuses it and lists allowed values


def _shown(name: str, params: SamplingParams) -> str:
    value = getattr(params, name)
    if name == "max_tokens" and value == MAX_INT:
        return "-1"
    return "none" if value in (None, ()) else json.dumps(value)


def _system(conversation: Conversation, argument: str) -> str:
    if argument:
        is_quoted = len(argument) > 1 and argument[0] == argument[-1] == '"'
        conversation.system = None if argument in _NOTHING else checked_text("system", argument[1:-1] if is_quoted else argument)
    return "no system message" if conversation.system is None else f"system message: {conversation.system}"


def _clear(conversation: Conversation, argument: str) -> str:
    conversation.turns.clear()
    conversation.num_dropped = 0
    conversation.withdrawn_message = None
    conversation.saved.clear()  # a new conversation does not overwrite the files of the last one
    return "the conversation starts anew"


def _save(conversation: Conversation, argument: str) -> str:
    if not argument:
        raise RequestError("/save needs the name of a file")
    try:
        path = Path(argument).expanduser().resolve()
        if path.exists() and path not in conversation.saved:
            raise RequestError(f"/save: {argument} exists; give another name")
        path.write_text(json.dumps(conversation.messages, ensure_ascii=False, indent=2) + "\n", encoding="utf-8")
    except (OSError, RuntimeError, ValueError) as error:  # RuntimeError: unknown home directory; ValueError: null character
        raise RequestError(f"/save: {argument} cannot be written: {getattr(error, 'strerror', None) or error}") from None
    conversation.saved.add(path)
    return f"saved {len(conversation.messages)} messages to {argument}"


COMMANDS: Mapping[str, Command] = {
    "/help": Command("", "list these commands", _help),
    "/set": Command("[NAME [VALUE]]", "show the sampling parameters, or change one", _set),
    "/system": Command("[TEXT]", 'show or change the system message; "" removes it', _system),
    "/retry": Command("", "answer the last message again"),
    "/save": Command("FILE", "write the conversation as JSON", _save),
    "/drafts": Command("", "show who drafted the last answer"),
    "/clear": Command("", "forget the conversation; the system message stays (also /reset)", _clear),
    "/exit": Command("", "end, as Ctrl-D does (also /quit, /bye)"),
}
OTHER_COMMANDS = {"/reset": "/clear", "/quit": "/exit", "/bye": "/exit", "/?": "/help"}
OTHER_PROGRAMS = {
    "/show": "/set shows the sampling parameters, /system the system message; paceline doctor MODEL shows the model",
    "/load": "end, and begin with another model: paceline chat MODEL",
    "/regen": "did you mean /retry?",
    "/read": "a text of a file: paceline run --chat MODEL < FILE",
    "/glob": "a text of a file: paceline run --chat MODEL < FILE",
}
"""Commands of Ollama and llama.cpp, and what to use instead."""


@with_settings
def chat(
    *,
    system: System = None,
    keep_system: Annotated[bool, typer.Option(help=KEEP_SYSTEM_HELP, rich_help_panel="Prompt")] = True,
    show_drafts: ShowDrafts = False,
    explain: Explain = False,
    settings: Settings,
) -> None:
    """Talk to the model.

    Ctrl-C stops an answer and keeps the conversation, Ctrl-D ends it; /help lists the commands. Answers go to stdout, the rest to stderr.

    A line that ends in \\ goes on in the next one, \"\"\" begins and ends a block, pasted lines are one message.

    From a pipe each line is a message; the exit code is that of the first one that could not be answered, and Ctrl-C ends it all.
    """
    adapter = settings.adapter
    system = None if system is None else checked_text("system", system)
    from paceline.cli.loading import chat_sampling, check_takes_messages, load
    from paceline.cli.message_input import message_input

    with message_input() as source:
        check_takes_messages(settings)
        llm = load(settings)
        conversation = Conversation(chat_sampling(llm, settings), system, keeps_system=keep_system)
        llm.tokenizer.check_chat_template()
        if source.is_interactive and not settings.quiet:
            print_notice("Ctrl-C stops an answer, Ctrl-D ends, /help lists the commands")
        shown = DisplayOptions(drafts=show_drafts, details=explain, statistics=not settings.quiet)
        Chat(llm, conversation, source, shown, adapter=adapter).run()


@dataclass(frozen=True, slots=True)
class DisplayOptions:
    """What is printed besides answers: where tokens came from, details, and a line of statistics."""

    drafts: bool = False
    details: bool = False
    statistics: bool = True


class Chat:
    """Reads messages until the end of input, answers each, and keeps the conversation."""

    def __init__(
        self, llm: "LLM", conversation: Conversation, source: "MessageInput", shown: DisplayOptions, *, adapter: str | None = None
    ) -> None:
        self._llm, self._adapter = llm, adapter
        self._conversation = conversation
        self._source = source
        self._shown = shown
        self._failure: PacelineError | None = None

    def run(self) -> None:
        """Read and answer until /exit or the end of input.

        Raises:
            typer.Exit: not interactive, and a message could not be answered.
        """
        from paceline.cli.rendering import legend

        if self._shown.drafts:
            print_notice(legend())
        while True:
            try:
                if not self._handle_entry(self._source.next()):
                    break
            except EOFError:
                break
            except RequestError as error:  # raised by a command such as /set
                self._fail(error)
            except KeyboardInterrupt:
                if not self._source.is_interactive:  # no user who could go on
                    raise
                print_notice("Ctrl-D or /exit ends")
        if self._failure is not None and not self._source.is_interactive:
            raise typer.Exit(exit_code(self._failure))

    def _handle_entry(self, entry: "Entry") -> bool:
        """Answer a message or carry out a command; False = the conversation ends."""
        command = None if entry.is_literal else parse_command(entry.text)
        if command is None:
            if entry.text.strip():
                self._answer(entry.text)
            return True
        name, argument = command
        if name == "/exit":
            return False
        if name == "/retry":
            self._retry()
        elif name == "/drafts":
            self._replay()
        elif (do := COMMANDS[name].do) is not None:
            print_notice(do(self._conversation, argument))
        return True

    def _fail(self, error: PacelineError) -> None:
        self._failure = self._failure or error
        print_error(error)

    def _retry(self) -> None:
        params, was_answered = self._conversation.params, self._conversation.withdrawn_message is None
        text = self._conversation.message_to_retry()
        if was_answered and (params.is_greedy or params.seed is not None):
            way_out = "/set temperature 0.7" if params.is_greedy else "/set seed none"
            print_notice(f"the same answer will come again; {way_out} makes it another one")
        self._answer(text)

    def _replay(self) -> None:
        """Write the last answer again and show where its tokens came from."""
        from paceline.cli.rendering import drafters_of, legend, write_stream, writer_for

        answer = self._conversation.answer
        if answer is None:
            raise RequestError("/drafts: there is no answer yet")
        print_notice(legend())
        write_stream(answer.chunks, writer_for(self._llm, show_drafts=True, wraps=True))
        print_notice(drafters_of(answer))

    def _drop_turns(self, text: str) -> None:
        """Drop the oldest turns until a message and its answer fit the context; print that once.

        A quarter of the context is kept for the answer, or less where `max_tokens` is smaller.
        """
        conversation, num_before = self._conversation, self._conversation.num_dropped
        num_free = min(conversation.params.max_tokens, self._llm.max_model_len // 4)
        while conversation.num_dropped < len(conversation.turns) and not self._fits(text, num_free):
            conversation.num_dropped += 2
        if conversation.num_dropped and not num_before:
            print_notice(
                f"the context of {self._llm.max_model_len} tokens is full: from now on the oldest turns are not sent to the model; "
                "/clear begins a new conversation"
            )

    def _fits(self, text: str, num_free: int) -> bool:
        try:
            num_tokens = len(self._llm.chat_token_ids(self._conversation.messages_to_send(text)))
        except RequestError as error:
            if error.code != CONTEXT_LENGTH_EXCEEDED:
                raise
            return False
        return num_tokens + num_free <= self._llm.max_model_len

    def _answer(self, text: str) -> None:
        """Run one turn. A turn that fails is removed; an answer interrupted by Ctrl-C is kept."""
        from paceline.cli.rendering import Answer, print_statistics, write_stream, writer_for

        conversation, shown = self._conversation, self._shown
        answer: Answer | None
        conversation.withdrawn_message = text
        try:
            checked_text("message", text)
            self._drop_turns(text)
            messages = conversation.messages_to_send(text)
            stream = self._llm.stream_chat(messages, conversation.params, adapter=self._adapter, speculation={"trees": True})
            answer = write_stream(stream, writer_for(self._llm, show_drafts=shown.drafts, wraps=True))
        except (RequestError, CapacityError) as error:
            self._fail(error)
            if self._source.is_interactive:
                print_notice("this message was removed from the conversation; /retry sends it again, /clear starts a new one")
            return
        except KeyboardInterrupt:  # Ctrl-C before the first token
            answer = None
        if answer is None or (answer.interrupted and not answer.text):
            print_notice("interrupted; /retry sends the message again")
        else:
            conversation.withdrawn_message, conversation.answer = None, answer
            conversation.turns += [{"role": "user", "content": text}, {"role": "assistant", "content": answer.text}]
            print_statistics(self._llm, answer, conversation.params, is_short=shown.statistics, is_detailed=shown.details)
        if (answer is None or answer.interrupted) and not self._source.is_interactive:
            raise typer.Exit(EXIT_INTERRUPTED)
