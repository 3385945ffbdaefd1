"""Read messages: a line, continued lines, a block in triple quotes, or pasted text."""

import io
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent

PROMPT, CONTINUATION = "> ", ". "
QUOTES = '"""'
_PASTES_ARE_MARKED = "\x1b[?2004h"
_PASTES_ARE_TYPED = "\x1b[?2004l"


@dataclass(frozen=True, slots=True)
class Entry:
    """One input. `is_literal`: it is a message even if it looks like a command."""

    text: str
    is_literal: bool = False


class MessageInput(Protocol):
    """Reads the user's messages.

    Attributes:
        is_interactive: whether a user can go on after an error.
    """

    is_interactive: bool

    def next(self) -> Entry:
        """Return the next message.

        Raises:
            EOFError: there is none left.
            KeyboardInterrupt: Ctrl-C.
        """
        ...


@contextmanager
def message_input() -> Iterator[MessageInput]:
    """Open an editor on a terminal, else the lines of standard input. While it is open the terminal does not echo keys."""
    if sys.stdin.isatty() and (sys.stdout.isatty() or sys.stderr.isatty()):
        from prompt_toolkit.utils import is_dumb_terminal

        if not is_dumb_terminal():
            with _waiting_keys():
                yield Editor()
            return
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="surrogateescape")  # bytes that are no UTF-8 are an error of one message, not of the program
    yield Lines()


class Lines:
    """Reads one message per line. A backslash at the end continues the line; a block in triple quotes is one message."""

    def __init__(self) -> None:
        self.is_interactive = sys.stdin.isatty()

    def next(self) -> Entry:
        text = _read_line()
        with suppress(EOFError):  # an unclosed block ends at the end of the input
            if is_open_block(text):
                while is_open_block(text):
                    text += "\n" + _read_line()
            else:
                while continues_on_next_line(text):
                    text = text[:-1] + "\n" + _read_line()
        return entry_of(text)


class Editor:
    """Input line with editing and a history of this conversation. A pasted text stays one message and is not run as a command."""

    is_interactive = True

    def __init__(self) -> None:
        from prompt_toolkit import PromptSession
        from prompt_toolkit.output import create_output

        self._first_paste = ""  # at the beginning of the text
        self._after_paste = ""  # the whole text as the last paste left it
        self._session: PromptSession[str] = PromptSession(
            PROMPT,
            multiline=True,
            prompt_continuation=CONTINUATION,
            key_bindings=self._key_bindings(),
            output=create_output(always_prefer_tty=True),  # a redirected stdout holds answers only
            reserve_space_for_menu=0,
            enable_suspend=True,
        )

    def next(self) -> Entry:
        self._first_paste = self._after_paste = ""
        try:
            text = self._session.prompt().rstrip("\n")
        finally:
            _send_to_terminal(_PASTES_ARE_MARKED)  # also keys typed during the answer
        return Entry(text, is_literal=True) if self._is_pasted(text) else entry_of(text)

    def _is_pasted(self, text: str) -> bool:
        return bool(self._first_paste) and text.startswith(self._first_paste.rstrip("\n"))

    def _key_bindings(self) -> "KeyBindings":
        from prompt_toolkit.key_binding import KeyBindings
        from prompt_toolkit.keys import Keys

        keys = KeyBindings()

        @keys.add("enter")
        def enter(event: "KeyPressEvent") -> None:
            buffer = event.current_buffer
            text = buffer.text
            if text == self._after_paste:
                buffer.validate_and_handle()
            elif is_open_block(text) and not self._is_pasted(text):
                buffer.insert_text("\n")
            elif continues_on_next_line(text) and buffer.document.is_cursor_at_the_end:
                buffer.delete_before_cursor()
                buffer.insert_text("\n")
            else:
                buffer.validate_and_handle()

        @keys.add("escape", "enter")
        def new_line(event: "KeyPressEvent") -> None:
            event.current_buffer.insert_text("\n")

        @keys.add(Keys.BracketedPaste)
        def paste(event: "KeyPressEvent") -> None:
            buffer, pasted = event.current_buffer, event.data.replace("\r\n", "\n").replace("\r", "\n")
            if not buffer.text:
                self._first_paste = pasted
            buffer.insert_text(pasted)
            self._after_paste = buffer.text

        return keys


def entry_of(text: str) -> Entry:
    """Make an entry of typed text; quotes around a block are removed."""
    block = text.strip()
    if not block.startswith(QUOTES):
        return Entry(text)
    return Entry(block.removeprefix(QUOTES).removesuffix(QUOTES).removeprefix("\n").removesuffix("\n"), is_literal=True)


def is_open_block(text: str) -> bool:
    """Return whether a text begins with triple quotes that are not closed."""
    block = text.strip()
    return block.startswith(QUOTES) and not block.removeprefix(QUOTES).endswith(QUOTES)


def continues_on_next_line(text: str) -> bool:
    """Return whether a line ends in a single backslash."""
    return text.endswith("\\") and not text.endswith("\\\\")


@contextmanager
def _waiting_keys() -> Iterator[None]:
    """Keep keys that are typed during an answer, without echo, for the next prompt; needs termios.

    Keys are neither shown nor taken line by line, and Ctrl-C interrupts without dropping them.
    """
    try:
        import termios
    except ImportError:
        yield
        return
    keyboard = sys.stdin.fileno()
    before = termios.tcgetattr(keyboard)
    during = termios.tcgetattr(keyboard)
    during[0] &= ~(termios.ICRNL | termios.INLCR | termios.IGNCR)  # Enter arrives as an editor expects it
    during[3] &= ~(termios.ECHO | termios.ICANON | termios.IEXTEN)
    during[3] |= termios.NOFLSH
    termios.tcsetattr(keyboard, termios.TCSADRAIN, during)
    try:
        yield
    finally:
        _send_to_terminal(_PASTES_ARE_TYPED)
        termios.tcsetattr(keyboard, termios.TCSADRAIN, before)


def _send_to_terminal(sequence: str) -> None:
    """Send a control sequence to the terminal, past a redirected stdout; Windows consoles may not support it."""
    if sys.platform == "win32":
        return
    stream = sys.stdout if sys.stdout.isatty() else sys.stderr
    if stream.isatty():
        stream.write(sequence)
        stream.flush()


def _read_line() -> str:
    if sys.stdin.isatty():  # a terminal without an editor; the prompt never lands in a redirected stdout
        sys.stderr.write(PROMPT)
        sys.stderr.flush()
    return input()
