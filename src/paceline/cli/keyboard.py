"""The terminal's keyboard during a conversation: what is typed while an answer is written waits, unseen, for the next prompt."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager

PASTES_ARE_MARKED = "\x1b[?2004h"
PASTES_ARE_TYPED = "\x1b[?2004l"


@contextmanager
def waiting_keys() -> Iterator[None]:
    """Keys are neither shown nor taken line by line, and Ctrl-C interrupts without dropping them; without termios nothing changes."""
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
        tell_terminal(PASTES_ARE_TYPED)
        termios.tcsetattr(keyboard, termios.TCSADRAIN, before)


def tell_terminal(sequence: str) -> None:
    """Send a control sequence to the terminal, past a redirected stdout; Windows' consoles may not know it."""
    if sys.platform == "win32":
        return
    stream = sys.stdout if sys.stdout.isatty() else sys.stderr
    if stream.isatty():
        stream.write(sequence)
        stream.flush()
