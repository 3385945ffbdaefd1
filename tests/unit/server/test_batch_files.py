"""What a batch reads and writes, without a model: bad lines, an output that ended anywhere, and one writer."""

import json
import os
import random
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from paceline.errors import CapacityError, ConfigError, RequestError
from paceline.server.batch.input_file import BadLine, BatchLine, plan_batch, read_lines
from paceline.server.batch.output_file import Finished, OutputFile

LIMIT = 10_000


def line(name: str, **changes: Any) -> dict[str, Any]:
    return {"custom_id": name, "method": "POST", "url": "/v1/completions", "body": {"prompt": f"é {name}"}, **changes}


def written(path: Path, *lines: Any) -> Path:
    path.write_text("".join((one if isinstance(one, str) else json.dumps(one)) + "\n" for one in lines))
    return path


def answer(request: BatchLine, status: int = 200) -> dict[str, Any]:
    body = {"model": "mini", "choices": [{"text": f"ü {request.custom_id}"}]}
    response = {"status_code": status, "request_id": "req-1", "body": body}
    return {"id": request.id, "custom_id": request.custom_id, "response": response, "error": None}


def requests_of(path: Path) -> list[BatchLine]:
    return [one for one in read_lines(path, LIMIT) if isinstance(one, BatchLine)]


BAD = {
    "no json": ("oops", "no JSON"),
    "half": ('{"custom_id": "a"', "no JSON"),
    "deep": ("[" * 100_000, "no JSON|it has"),
    "a list": ("[]", "no JSON object"),
    "no name": (json.dumps({"method": "POST", "url": "/v1/completions", "body": {}}), "custom_id is missing"),
    "a number for a name": (line("x", custom_id=3), "custom_id is no text"),
    "an empty name": (line(""), "custom_id is no text"),
    "half a character": (line("\ud800"), "custom_id is no text"),
    "another method": (line("x", method="GET"), "method is not POST"),
    "another url": (line("x", url="/v1/models"), "url is none"),
    "a url that is no text": (line("x", url=["/v1/completions"]), "url is none"),
    "a body that is no object": (line("x", body="hello"), "body is no JSON object"),
    "a stream": (line("x", body={"stream": True}), "stream"),
    "a field too many": (line("x", prompt="hello"), "prompt is no field"),
    "too long": (line("x", body={"prompt": "a" * LIMIT}), "it has 10[0-9]{3} bytes"),
}


@pytest.mark.parametrize("name", BAD)
def test_invalid_batch_line_is_named_and_the_others_are_kept(name: str, tmp_path: Path) -> None:
    bad, reason = BAD[name]
    path = written(tmp_path / "in", line("before"), "", bad, line("behind"))
    first, wrong, last = read_lines(path, LIMIT)
    assert isinstance(first, BatchLine)
    assert isinstance(last, BatchLine)
    assert (first.custom_id, last.custom_id, last.number) == ("before", "behind", 4)
    assert isinstance(wrong, BadLine)
    assert wrong.number == 3
    assert re.search(reason, wrong.reason)


def test_batch_lines_that_are_not_answered_are_read_again(tmp_path: Path) -> None:
    path = written(tmp_path / "in", line("one"), "x" * 3 * LIMIT, "", line("two"), line("three"))
    path.write_bytes(path.read_bytes().rstrip(b"\n"))
    plan = plan_batch(path, Finished(), LIMIT)
    assert [(one.custom_id, one.number, one.body) for one in plan.lines()] == [
        (one.custom_id, one.number, one.body) for one in requests_of(path)
    ]
    assert (plan.num_requests, plan.num_pending, len(plan.bad)) == (3, 3, 1)


@pytest.mark.parametrize("change", ["cut", "appended", "deleted"])
def test_batch_file_that_changes_while_it_is_answered_is_an_error(change: str, tmp_path: Path) -> None:
    path = written(tmp_path / "in.jsonl", *(line(str(number)) for number in range(3)))
    lines = plan_batch(path, Finished(), LIMIT).lines()
    assert next(lines).custom_id == "0"
    if change == "deleted":
        path.unlink()
    else:
        written(path, *(line(str(number)) for number in range(1 if change == "cut" else 4)))
    with pytest.raises(RequestError, match="was changed while it was being answered: run the command again"):
        list(lines)


def test_duplicate_custom_ids_are_refused_with_their_line_numbers(tmp_path: Path) -> None:
    path = written(tmp_path / "in", line("one"), line("two"), line("one", body={}), line("two"))
    with pytest.raises(RequestError, match=r"'one' in lines 1 and 3, 'two' in lines 2 and 4"):
        plan_batch(path, Finished(), LIMIT)


@pytest.mark.parametrize("name", ["absent", "."], ids=["absent", "a folder"])
def test_unreadable_batch_input_file_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="give a file with a request on each line"):
        plan_batch(tmp_path / name, Finished(), LIMIT)


def test_batch_output_truncated_anywhere_is_completed_without_duplicates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda handle: None)  # it takes milliseconds each time
    path = written(tmp_path / "in", *(line(f"n{index}") for index in range(3)))
    asked, target = requests_of(path), tmp_path / "out"
    with OutputFile(target) as output:
        for one in asked:
            output.append(answer(one))
    whole = target.read_bytes()
    for length in range(len(whole) + 1):
        for tail in (b"", b"\0" * 7) if length % 7 == 0 else (b"",):
            target.write_bytes(whole[:length] + tail)
            with OutputFile(target) as output:
                assert target.read_bytes() == whole[: whole.rfind(b"\n", 0, length) + 1], "what is cut is cut before anything is written"
                plan = plan_batch(path, output.finished, LIMIT)
                assert plan.num_pending == 3 - whole[:length].count(b"\n")
                for one in plan.lines():
                    output.append(answer(one))
            assert target.read_bytes() == whole, f"{length} bytes were left, then {len(tail)} zeros"


def test_incomplete_last_line_of_a_batch_output_is_cut(tmp_path: Path) -> None:
    source = written(tmp_path / "in", line("a"), line("b"))
    whole, torn = (json.dumps(answer(request), indent=None) for request in requests_of(source))
    assert ", " in whole, "our own lines have no spaces"
    for start in range(len(torn)):
        (tmp_path / "out").write_text(f"{whole}\n{torn[:start]}")
        with OutputFile(tmp_path / "out") as output:
            assert list(output.finished.ids) == ["a"]
        assert (tmp_path / "out").read_text() == f"{whole}\n"


def test_duplicate_answer_in_a_batch_output_is_refused_with_its_line(tmp_path: Path) -> None:
    first, second = map(answer, requests_of(written(tmp_path / "in", line("a"), line("b"))))
    path = written(tmp_path / "out", first, second, first)
    with pytest.raises(ConfigError, match=f"line 3 of {path} answers 'a' a second time"):
        OutputFile(path)
    assert len(path.read_text().splitlines()) == 3


def one_answer_and_an_error(output: OutputFile, source: Path) -> None:
    output.append(answer(requests_of(source)[0]))
    raise CapacityError("the engine ended")


def test_refused_batch_run_leaves_no_empty_output_file(tmp_path: Path) -> None:
    path = tmp_path / "out"
    for is_there in (False, True):
        if is_there:
            path.touch()
        with pytest.raises(RequestError), OutputFile(path) as output:
            plan_batch(tmp_path / "absent", output.finished, LIMIT)
        assert path.exists() == is_there
    path.unlink()
    with pytest.raises(CapacityError), OutputFile(path) as output:
        one_answer_and_an_error(output, written(tmp_path / "in", line("a")))
    assert path.read_text().count("\n") == 1
    with OutputFile(tmp_path / "of nothing"):
        pass
    assert (tmp_path / "of nothing").exists(), "every request is answered: there are none"


def test_file_that_is_no_batch_output_is_left_unchanged(tmp_path: Path) -> None:
    path = written(tmp_path / "in", line("one"))
    good = json.dumps(answer(requests_of(path)[0]), separators=(",", ":")) + "\n"
    foreign = [path.read_bytes(), b"some text", b"some text\n", b"{}\n", f"half\n{good}".encode(), f"{good}half".encode()]
    foreign += [good.encode() + b'{"id":"batch_req_1"}\n', b"\0\0\n" + good.encode()]
    for content in foreign:
        path.write_bytes(content)
        with pytest.raises(ConfigError, match="is no answer of a batch: nothing is written"):
            OutputFile(path)
        assert path.read_bytes() == content


def test_output_of_another_batch_is_refused(tmp_path: Path) -> None:
    path = written(tmp_path / "in", line("one"), line("two"))
    with OutputFile(tmp_path / "out") as output:
        output.append(answer(requests_of(path)[0]))
        with pytest.raises(ConfigError, match=r"line 1 of .* is not the request that was answered as 'one'"):
            plan_batch(written(path, line("one", body={"prompt": "other"})), output.finished, LIMIT)
        with pytest.raises(ConfigError, match="holds an answer to 'one', which is no request"):
            plan_batch(written(path, line("two")), output.finished, LIMIT)


def test_batch_request_id_ignores_json_whitespace(tmp_path: Path) -> None:
    path = written(tmp_path / "in", line("one"))
    again = written(tmp_path / "again", json.dumps(line("one"), ensure_ascii=False, indent=None).replace(": ", ":"))
    assert requests_of(path)[0].id == requests_of(again)[0].id


def test_second_batch_run_with_the_same_output_is_refused(tmp_path: Path) -> None:
    target = tmp_path / "out"
    open_it = f"from pathlib import Path; from paceline.server.batch.output_file import OutputFile; OutputFile(Path({str(target)!r}))"
    with OutputFile(target), pytest.raises(ConfigError, match="another run is writing"):
        OutputFile(target)
    with OutputFile(target):
        done = subprocess.run([sys.executable, "-c", open_it], capture_output=True, text=True, check=False)
    assert "another run is writing" in done.stderr
    OutputFile(target).close()


def test_batch_answer_that_does_not_fit_the_disk_leaves_no_partial_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, target = written(tmp_path / "in", line("one"), line("two")), tmp_path / "out"
    first, second = requests_of(path)
    with OutputFile(target) as output:
        output.append(answer(first))
        monkeypatch.setattr(output, "_file", _FullDisk(output._file))
        with pytest.raises(CapacityError, match="make room and run the same command again"):
            output.append(answer(second))
    assert [json.loads(one)["custom_id"] for one in target.read_text().splitlines()] == ["one"]


class _FullDisk:
    """A file that takes ten bytes more."""

    def __init__(self, file: Any) -> None:
        self._file, self._room = file, 10

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def write(self, content: bytes) -> int:
        if not self._room:
            raise OSError(28, "No space left on device")
        taken = min(self._room, len(content))
        self._room -= taken
        return int(self._file.write(content[:taken]))


def test_batch_output_is_synced_on_close_if_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[int] = []
    monkeypatch.setattr(os, "fsync", synced.append)
    with OutputFile(tmp_path / "out") as output:
        output.sync()
        num_before = len(synced)
        output.sync()
        assert len(synced) == num_before, "there was nothing new"
        output.append(answer(BatchLine(1, "one", "/v1/completions", b"{}")))
    assert len(synced) == num_before + 1


def test_batch_request_id_depends_on_id_path_and_body(seed: int) -> None:
    draws = random.Random(seed)
    base = BatchLine(1, "one", "/v1/completions", b'{"a":1}')
    moved = BatchLine(draws.randrange(100), "one", "/v1/completions", b'{"a":1}')
    others = [
        BatchLine(1, "two", "/v1/completions", b'{"a":1}'),
        BatchLine(1, "one", "/v1/chat/completions", b'{"a":1}'),
        BatchLine(1, "one", "/v1/completions", b'{"a":2}'),
    ]
    assert base.id == moved.id
    assert len({base.id, *(one.id for one in others)}) == 4
