"""Writes the files of a training run."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from paceline.errors import CapacityError, ConfigError
from paceline.small_files import replaced_file, write_atomically


@contextmanager
def write_errors(path: Path) -> Iterator[None]:
    """Context manager: raise an error for `path` if a file cannot be written.

    Raises:
        ConfigError: it must not be written there.
        CapacityError: writing failed, as on a full disk.
    """
    try:
        yield
    except (FileNotFoundError, NotADirectoryError, FileExistsError, PermissionError) as error:
        raise ConfigError(f"{path} cannot be written ({error.strerror}): give another --output") from error
    except (OSError, RuntimeError, SafetensorError) as error:  # torch.save raises RuntimeError
        reason = getattr(error, "strerror", None) or next(iter(str(error).splitlines()), type(error).__name__)
        way_out = "make room on its disk and run the command again, with --resume once there is a train.json"
        raise CapacityError(f"{path} cannot be written ({reason}): {way_out}") from error


@contextmanager
def saved_file(path: Path) -> Iterator[Path]:
    """Context manager: yield a file to write, which then replaces `path`; errors as of `write_errors`."""
    with write_errors(path), replaced_file(path) as unfinished:
        yield unfinished


def save_text(path: Path, content: str) -> None:
    """Write a text file. If that fails, the file keeps its previous content; errors as of `write_errors`."""
    with write_errors(path):
        write_atomically(path, content)
