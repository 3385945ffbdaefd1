"""The input file of a batch: its lines, and which of them still have to be answered."""

import hashlib
import json
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.errors import ConfigError, RequestError, is_unicode
from paceline.server.batch.output_file import Finished

ENDPOINTS = ("/v1/chat/completions", "/v1/completions")
MAX_ID_CHARS = 512
_FIELDS = ("custom_id", "method", "url", "body")


@dataclass(frozen=True, slots=True)
class BatchLine:
    """One request.

    Attributes:
        number: of its line, from 1.
        url: one of `ENDPOINTS`.
        body: JSON.
    """

    number: int
    custom_id: str
    url: str
    body: bytes

    @property
    def id(self) -> str:
        """Id in the output: a hash of the whole request, so that a changed request is not taken as answered."""
        content = json.dumps([self.custom_id, self.url]).encode() + self.body
        return f"batch_req_{hashlib.sha256(content).hexdigest()[:24]}"


@dataclass(frozen=True, slots=True)
class BadLine:
    """A line that is not a request, and why."""

    number: int
    reason: str


def read_lines(path: Path, max_line_bytes: int) -> Iterator[BatchLine | BadLine]:
    """Yield the lines of a batch file without empty ones; RequestError if it cannot be read."""
    if path.exists() and not path.is_file():
        raise RequestError(f"the batch file {path} is no regular file, and it is read twice: give a file with a request on each line")
    number = 0
    try:
        with path.open("rb") as file:
            while line := file.readline(max_line_bytes + 1):
                number, num_bytes = number + 1, len(line)
                rest = line
                while not rest.endswith(b"\n") and (rest := file.readline(max_line_bytes)):
                    num_bytes += len(rest)
                if num_bytes > max_line_bytes:
                    yield BadLine(number, f"it has {num_bytes} bytes, and may have {max_line_bytes}: --max-body-mb allows more")
                elif line.strip():
                    yield _parsed_line(line, number)
    except OSError as error:
        raise RequestError(f"the batch file {path} cannot be read ({error.strerror}): give a file with a request on each line") from None


def _parsed_line(line: bytes, number: int) -> BatchLine | BadLine:
    try:
        fields = json.loads(line)
        error = _request_error(fields)
        if error is not None:
            return BadLine(number, error)
        body = json.dumps(fields["body"], separators=(",", ":")).encode()
    except (ValueError, RecursionError):
        return BadLine(number, "it is no JSON: write one JSON object on a line")
    return BatchLine(number, fields["custom_id"], fields["url"], body)


def _request_error(fields: Any) -> str | None:
    """Return why a line's JSON is not a valid batch request; None = it is valid."""
    if not isinstance(fields, dict):
        return "it is no JSON object: write {custom_id, method, url, body}"
    for name in _FIELDS:
        if name not in fields:
            return f"{name} is missing: write {{custom_id, method, url, body}}"
    if unknown := sorted(set(fields) - set(_FIELDS)):
        return f"{unknown[0]} is no field of a batch line: fields of the request belong into its body"
    custom_id = fields["custom_id"]
    if not isinstance(custom_id, str) or not 1 <= len(custom_id) <= MAX_ID_CHARS or not is_unicode(custom_id):
        return f"custom_id is no text of 1 to {MAX_ID_CHARS} characters: name the line"
    if fields["method"] != "POST":
        return "method is not POST: write POST"
    if fields["url"] not in ENDPOINTS:
        return f"url is none of {' and '.join(ENDPOINTS)}: write one of them"
    if not isinstance(fields["body"], dict):
        return "body is no JSON object: write the fields of the request"
    return "body requests a stream, which a file cannot hold: leave stream out" if fields["body"].get("stream") else None


_SHOWN = 5  # duplicates that an error names


@dataclass(frozen=True, slots=True)
class Plan:
    """The lines of a batch file that have to be answered.

    Attributes:
        version: of the file when its lines were counted.
        max_line_bytes: as for `read_lines`.
        answered: the custom_id of each request that is answered.
        num_requests: of the file, including answered ones.
    """

    path: Path
    version: tuple[int, int]
    max_line_bytes: int
    answered: Collection[str]
    num_requests: int
    bad: list[BadLine]

    @property
    def num_pending(self) -> int:
        return self.num_requests - len(self.answered)

    def lines(self) -> Iterator[BatchLine]:
        """Read the lines to be answered again; RequestError if the file was changed."""
        for line in read_lines(self.path, self.max_line_bytes):
            if isinstance(line, BatchLine) and line.custom_id not in self.answered:
                self._check_version()
                yield line
        self._check_version()

    def _check_version(self) -> None:
        if _version_of(self.path) != self.version:
            raise RequestError(f"the batch file {self.path} was changed while it was being answered: run the command again")


def _version_of(path: Path) -> tuple[int, int]:
    """Return size and time of the last change of a file; zeros if it does not exist."""
    try:
        found = path.stat()
    except OSError:
        return 0, 0
    return found.st_size, found.st_mtime_ns


def plan_batch(path: Path, finished: Finished, max_line_bytes: int) -> Plan:
    """Return the requests of a batch file that are not answered yet.

    Raises:
        RequestError: it cannot be read, or two lines have the same custom_id.
        ConfigError: `finished` is another batch's.
    """
    version, numbers = _version_of(path), dict[str, int]()
    twice: list[str] = []
    bad = list[BadLine]()
    unmatched = dict(finished.ids)
    for line in read_lines(path, max_line_bytes):
        if isinstance(line, BadLine):
            bad.append(line)
        elif line.custom_id in numbers:
            twice.append(f"{line.custom_id!r} in lines {numbers[line.custom_id]} and {line.number}")
        else:
            numbers[line.custom_id] = line.number
            answered = unmatched.pop(line.custom_id, None)
            if answered not in (None, line.id):
                text = f"line {line.number} of {path} is not the request that was answered as {line.custom_id!r}"
                raise ConfigError(f"{text}: undo the change, or give another output file")
    if twice:
        more = f" and {len(twice) - _SHOWN} more" if len(twice) > _SHOWN else ""
        raise RequestError(f"a custom_id names two requests of {path}: {', '.join(twice[:_SHOWN])}{more}; give each a name of its own")
    if unmatched:
        name = next(iter(unmatched))
        raise ConfigError(f"the output holds an answer to {name!r}, which is no request of {path}: give another output file")
    return Plan(path, version, max_line_bytes, frozenset(finished.ids), len(numbers), bad)
