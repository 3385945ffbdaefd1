"""`paceline` and `python -m paceline`: the command line, which Ctrl-C ends with one line while it is still being imported too."""

import os
import signal
from contextlib import suppress
from types import FrameType


def main() -> None:
    """Run the command line; see `paceline.cli.main` for its exit codes."""
    heeds_interrupts = signal.getsignal(signal.SIGINT) is signal.default_int_handler  # a shell's background job ignores them
    if heeds_interrupts:
        signal.signal(signal.SIGINT, _leave)
    from paceline.cli import main as run_command

    if heeds_interrupts:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    run_command()


def _leave(signal_number: int, frame: FrameType | None) -> None:
    """Nothing has begun that would have to be ended; an exception could be caught by whatever is being imported."""
    with suppress(OSError):  # closed, or on a full disk
        os.write(2, b"interrupted\n")
    os._exit(128 + signal_number)


if __name__ == "__main__":
    main()
