"""`paceline chat`: a conversation in the terminal."""

import io
import re
import sys
from contextlib import suppress
from typing import TYPE_CHECKING

from paceline.cli.options import Settings, checked_text, with_settings
from paceline.cli.reporting import say, say_error
from paceline.cli.run import ShowDrafts, System
from paceline.errors import CapacityError, RequestError

if TYPE_CHECKING:
    from paceline.llm import LLM

COMMANDS = {
    "/help": "list these commands",
    "/reset": "forget the conversation; a system message stays",
    "/exit": "end, as Ctrl-D does",
}
COMMAND_FORM = re.compile(r"/[A-Za-z]*")  # one word: a message may well start with a path
PROMPT = "> "


@with_settings
def chat(*, system: System = None, show_drafts: ShowDrafts = False, settings: Settings) -> None:
    """Talk to the model.

    Ctrl-C stops an answer and keeps the conversation, Ctrl-D ends it; /help lists the commands. Answers go to stdout, the rest to stderr.
    """
    messages = [] if system is None else [{"role": "system", "content": checked_text("system", system)}]
    from paceline.cli.loading import load

    _prepare_input()
    llm = load(settings)
    say("Ctrl-C stops an answer, Ctrl-D ends, /help lists the commands")
    Conversation(llm, settings, messages, show_drafts=show_drafts).run()


class Conversation:
    """Reads lines until the end of input, answers each, and remembers what was said."""

    def __init__(self, llm: "LLM", settings: Settings, messages: list[dict[str, str]], *, show_drafts: bool) -> None:
        self._llm = llm
        self._params = settings.sampling
        self._messages = messages
        self._num_given = len(messages)
        self._show_drafts = show_drafts

    def run(self) -> None:
        """Until /exit or the end of input."""
        from paceline.cli.rendering import legend

        if self._show_drafts:
            say(legend())
        while True:
            try:
                line = _read_line()
            except EOFError:
                return
            except KeyboardInterrupt:
                if not sys.stdin.isatty():  # nobody there to go on
                    raise
                say("\nCtrl-D or /exit ends")
                continue
            if line.strip() == "/exit":
                return
            if COMMAND_FORM.fullmatch(line.strip()):
                self._obey(line.strip())
            elif line.strip():
                self._answer(line)

    def _obey(self, command: str) -> None:
        if command == "/reset":
            del self._messages[self._num_given :]
            say("the conversation starts anew")
        elif command == "/help":
            say("\n".join(f"{name:<8}{meaning}" for name, meaning in COMMANDS.items()))
        else:
            say(f"{command} is not a command; /help lists them")

    def _answer(self, line: str) -> None:
        """One turn. A turn that cannot be served is taken back; an answer cut short by Ctrl-C stays as it is."""
        from paceline.cli.rendering import write_stream, writer_for

        num_before = len(self._messages)
        try:
            self._messages.append({"role": "user", "content": checked_text("message", line)})
            stream = self._llm.stream_chat(self._messages, self._params)
            answer = write_stream(stream, writer_for(self._llm, show_drafts=self._show_drafts))
        except (RequestError, CapacityError) as error:
            del self._messages[num_before:]
            say_error(error)
            say("this message was taken back; /reset forgets the conversation")
            return
        except KeyboardInterrupt:  # before the stream began
            del self._messages[num_before:]
            say("interrupted")
            return
        self._messages.append({"role": "assistant", "content": answer.text})
        say(answer.closing_line(sampled=not self._params.is_greedy))


def _read_line() -> str:
    """A line from standard input; the prompt is shown to people only and never lands in a redirected stdout.

    Raises:
        EOFError: there is none left.
    """
    on_terminal = sys.stdin.isatty()
    if on_terminal and sys.stdout.isatty():
        return input(PROMPT)  # line editing must know the prompt's width
    if on_terminal:
        sys.stderr.write(PROMPT)
        sys.stderr.flush()
    return input()


def _prepare_input() -> None:
    """Line editing where there is a library for it, and bytes that are no UTF-8 as an error of one message, not of the program."""
    with suppress(ImportError):
        import readline  # noqa: F401  # importing it is what changes input()
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="surrogateescape")
