"""Files of reports: checked before a run of minutes, and written so that no failure loses what was measured."""

import errno
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from paceline.errors import ConfigError
from paceline.small_files import write_atomically


def check_report_files(*paths: Path | None) -> None:
    """Check that reports can be written, and that none would overwrite another.

    Raises:
        ConfigError: one cannot, or two are the same file.
    """
    given = [path for path in paths if path is not None]
    if len({path.resolve() for path in given}) < len(given):
        raise ConfigError(f"two reports would go to {given[0].resolve()}: give each a file of its own")
    for path in given:
        _check_writable(path)


def _check_writable(path: Path) -> None:
    folder = path.absolute().parent
    if path.is_dir():
        raise ConfigError(f"{path} cannot be written: it is a folder; give the name of a file")
    if not folder.is_dir():
        raise ConfigError(f"{path} cannot be written: there is no folder {folder}; make it first")
    with write_errors(path):
        if path.exists() and not os.access(path, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        if not _is_written_in_place(path):
            with tempfile.TemporaryFile(dir=folder):  # permissions alone do not show a file system that is read-only
                pass


def write_report(path: Path, text: str) -> None:
    """Write a report. A file that is there keeps its content if this fails.

    Raises:
        ConfigError: it cannot be written.
    """
    with write_errors(path):
        if _is_written_in_place(path):
            path.write_text(text, encoding="utf-8")
        else:
            write_atomically(path, text)


def write_reports(*reports: tuple[Path | None, Callable[[Path], object]]) -> Iterator[Path | ConfigError]:
    """Write the reports that have a path; yield the path of each, or the error if it cannot be written."""
    for path, write in reports:
        if path is not None:
            try:
                with write_errors(path):
                    write(path)
                yield path
            except ConfigError as error:
                yield error


@contextmanager
def write_errors(path: Path) -> Iterator[None]:
    """Turn the errors of writing a path into one with the way out.

    Raises:
        ConfigError: it cannot be written.
    """
    try:
        yield
    except OSError as error:
        is_full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        advice = "make room or give a place on another disk" if is_full else "give another place"
        raise ConfigError(f"{path} cannot be written: {error.strerror or error}; {advice}") from error


def _is_written_in_place(path: Path) -> bool:
    """Return whether a path is a device, a pipe or a link, such as /dev/stdout, which a new file must not replace."""
    return path.is_symlink() or (path.exists() and not path.is_file())
