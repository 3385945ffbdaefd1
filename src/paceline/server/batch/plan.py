"""What is left to do of a batch: its requests without those that an earlier run has answered."""

from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from paceline.errors import ConfigError, RequestError
from paceline.server.batch.lines import BadLine, BatchLine, parsed_line, read_lines
from paceline.server.batch.output_file import Finished

_SHOWN = 5  # duplicates that an error names


@dataclass(frozen=True, slots=True)
class Plan:
    """Which lines of a batch file are to be answered.

    Attributes:
        pending: number, offset and bytes of each, one behind the other.
        num_requests: of the file, answered ones included.
    """

    path: Path
    pending: "array[int]"
    num_requests: int
    bad: list[BadLine]

    @property
    def num_pending(self) -> int:
        return len(self.pending) // 3

    def lines(self) -> Iterator[BatchLine]:
        """The lines to be answered, read anew.

        Raises:
            RequestError: the file was changed meanwhile.
        """
        with self.path.open("rb") as file:
            for place in range(0, len(self.pending), 3):
                number, offset, num_bytes = self.pending[place : place + 3]
                file.seek(offset)
                line = parsed_line(file.read(num_bytes), number, offset)
                if isinstance(line, BadLine):
                    raise RequestError(f"line {number} of {self.path} was changed while it was being answered: run the command again")
                yield line


def plan_batch(path: Path, finished: Finished, max_line_bytes: int) -> Plan:
    """What is left of a batch file.

    Raises:
        RequestError: it cannot be read, or two lines have the same custom_id.
        ConfigError: `finished` is another batch's.
    """
    numbers: dict[str, int] = {}
    twice: list[str] = []
    pending, bad = array("q"), list[BadLine]()
    unmatched = dict(finished.ids)
    for line in read_lines(path, max_line_bytes):
        if isinstance(line, BadLine):
            bad.append(line)
        elif line.custom_id in numbers:
            twice.append(f"{line.custom_id!r} in lines {numbers[line.custom_id]} and {line.number}")
        else:
            numbers[line.custom_id] = line.number
            answered = unmatched.pop(line.custom_id, None)
            if answered is None:
                pending.extend((line.number, line.offset, line.num_bytes))
            elif answered != line.id:
                text = f"line {line.number} of {path} asks something else than what was answered as {line.custom_id!r}"
                raise ConfigError(f"{text}: undo the change, or give another output file")
    if twice:
        more = f" and {len(twice) - _SHOWN} more" if len(twice) > _SHOWN else ""
        raise RequestError(f"a custom_id names two requests of {path}: {', '.join(twice[:_SHOWN])}{more}; give each a name of its own")
    if unmatched:
        name = next(iter(unmatched))
        raise ConfigError(f"the output holds an answer to {name!r}, which is no request of {path}: give another output file")
    return Plan(path, pending, len(numbers), bad)
