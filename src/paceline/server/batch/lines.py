"""The lines of a batch file: which of them ask for something, and what."""

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.errors import RequestError

ENDPOINTS = ("/v1/chat/completions", "/v1/completions")
MAX_ID_CHARS = 512
_FIELDS = ("custom_id", "method", "url", "body")


@dataclass(frozen=True, slots=True)
class BatchLine:
    """One request.

    Attributes:
        number: of its line, from 1.
        offset: bytes of the file in front of it.
        num_bytes: of the line, its end included.
        url: one of `ENDPOINTS`.
        body: JSON.
    """

    number: int
    offset: int
    num_bytes: int
    custom_id: str
    url: str
    body: bytes

    @property
    def id(self) -> str:
        """Names the request in the output. Made of all that was asked, so that an answer can be told from one to another request."""
        asked = json.dumps([self.custom_id, self.url]).encode() + self.body
        return f"batch_req_{hashlib.sha256(asked).hexdigest()[:24]}"


@dataclass(frozen=True, slots=True)
class BadLine:
    """A line that is no request, and why."""

    number: int
    reason: str


def read_lines(path: Path, max_line_bytes: int) -> Iterator[BatchLine | BadLine]:
    """All lines of a batch file but empty ones.

    Raises:
        RequestError: the file cannot be read.
    """
    if path.exists() and not path.is_file():
        raise RequestError(f"the batch file {path} is no regular file, and it is read twice: give a file with a request on each line")
    number, offset = 0, 0
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
                    yield parsed_line(line, number, offset)
                offset += num_bytes
    except OSError as error:
        raise RequestError(f"the batch file {path} cannot be read ({error.strerror}): give a file with a request on each line") from None


def parsed_line(line: bytes, number: int, offset: int) -> BatchLine | BadLine:
    """What one line says."""
    try:
        fields = json.loads(line)
        wrong = _wrong_in(fields)
        if wrong is not None:
            return BadLine(number, wrong)
        body = json.dumps(fields["body"], separators=(",", ":")).encode()
    except (ValueError, RecursionError):
        return BadLine(number, "it is no JSON: write one JSON object on a line")
    return BatchLine(number, offset, len(line), fields["custom_id"], fields["url"], body)


def _wrong_in(fields: Any) -> str | None:
    """Why the fields are no request."""
    if not isinstance(fields, dict):
        return "it is no JSON object: write {custom_id, method, url, body}"
    for name in _FIELDS:
        if name not in fields:
            return f"{name} is missing: write {{custom_id, method, url, body}}"
    if unknown := sorted(set(fields) - set(_FIELDS)):
        return f"{unknown[0]} is no field of a batch line: what belongs to the request stands in its body"
    custom_id = fields["custom_id"]
    if not isinstance(custom_id, str) or not 1 <= len(custom_id) <= MAX_ID_CHARS or not _is_unicode(custom_id):
        return f"custom_id is no text of 1 to {MAX_ID_CHARS} characters: name the line"
    if fields["method"] != "POST":
        return "method is not POST: write POST"
    if fields["url"] not in ENDPOINTS:
        return f"url is none of {' and '.join(ENDPOINTS)}: write one of them"
    if not isinstance(fields["body"], dict):
        return "body is no JSON object: write the fields of the request"
    return "body asks for a stream, which a file cannot hold: leave stream out" if fields["body"].get("stream") else None


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
