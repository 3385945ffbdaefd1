"""`paceline batch`: every request of a file once, as the server would answer it, whatever ends the command."""

import asyncio
import functools
import json
import os
import pty
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from harness.adapter_files import write_adapter_of
from harness.http_client import HttpClient
from paceline import AsyncEngine
from paceline.cli import app
from paceline.errors import ConfigError, RequestError
from paceline.server.app import create_app
from paceline.server.batch import run as run_module
from paceline.server.batch.run import BatchResult, NotAnsweredError, Watcher, run_batch
from paceline.server.settings import ServerSettings

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
TEXTS = ["I need a taxi to the airport.", "def add(a, b):", "Once upon a time", "The old fisherman", '{"name":']
Run = Callable[..., BatchResult]


def request(index: int) -> dict[str, Any]:
    """One of many, greedy and sampled, some with several samples."""
    text = f"{index}. {TEXTS[index % len(TEXTS)]}"
    how = {"temperature": 0} if index % 2 else {"temperature": 0.9, "seed": index, "n": 1 + index % 4 // 2}
    url, prompt = (CHAT, {"messages": [{"role": "user", "content": text}]}) if index % 3 else (COMPLETIONS, {"prompt": text})
    return {"custom_id": f"request {index}", "method": "POST", "url": url, "body": {**prompt, **how, "max_tokens": 16 + index % 7}}


def write_lines(path: Path, lines: list[Any]) -> Path:
    path.write_text("".join((one if isinstance(one, str) else json.dumps(one)) + "\n" for one in lines))
    return path


def answers_in(path: Path) -> list[dict[str, Any]]:
    text = path.read_text()
    assert text.endswith("\n")
    return [json.loads(line) for line in text.splitlines()]


def told(line: dict[str, Any]) -> tuple[Any, ...]:
    """The fields that do not depend on the time of the request."""
    body = line["response"]["body"]
    counts = {name: body["usage"][name] for name in ("prompt_tokens", "completion_tokens")} if "usage" in body else None
    return line["id"], line["response"]["status_code"], body.get("choices"), counts, body.get("error")


@pytest.fixture
def run(engine: AsyncEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Answers lines with the open engine; printed lines are in `run.said`."""

    class Kept:
        opened = engine.loaded

        def __getattr__(self, name: str) -> Any:
            return getattr(engine, name)

        async def close(self) -> None:
            pass

    monkeypatch.setattr(run_module.AsyncEngine, "open", lambda **_: Kept())

    def run(lines: list[Any], said: list[str] | None = None, **settings: Any) -> BatchResult:
        source = write_lines(tmp_path / "in", lines)
        watcher = Watcher(lambda text: None, (said if said is not None else []).append)
        arguments = {"model": "mini", "adapters": dict.fromkeys(engine.adapters, "a directory")}
        return run_batch(arguments, ServerSettings(**settings), source, tmp_path / "out", watcher)

    return run


def test_batch_answers_equal_those_of_the_server(run: Run, client: HttpClient, tmp_path: Path) -> None:
    lines = [request(index) for index in range(12)]
    lines.append({**request(12), "body": {"prompt": "x", "temprature": 1}})
    result = run(lines)
    assert (result.num_requests, dict(result.num_by_status), result.bad) == (13, {200: 12, 400: 1}, [])
    found = {line["custom_id"]: line for line in answers_in(tmp_path / "out")}
    assert list(map(len, found.values())) == [4] * 13
    for line in lines:
        answer, served = found[line["custom_id"]], client.post(line["url"], line["body"])
        assert (answer["error"], answer["response"]["status_code"]) == (None, served.status_code)
        assert answer["response"]["request_id"].startswith("req-")
        for name in ("choices", "error", "model", "object"):
            assert answer["response"]["body"].get(name) == served.json().get(name)


def test_batch_leaves_out_bad_lines_and_answers_the_others(run: Run, tmp_path: Path) -> None:
    said: list[str] = []
    result = run([request(0), "oops", request(1), {**request(2), "url": "/v1/files"}], said)
    assert [one.number for one in result.bad] == [2, 4]
    assert [text.split(":")[0] for text in said] == ["line 2 is left out", "line 4 is left out"]
    assert {line["custom_id"] for line in answers_in(tmp_path / "out")} == {"request 0", "request 1"}


def test_second_batch_run_answers_only_missing_lines(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = [request(index) for index in range(6)]
    run(lines)
    whole = (tmp_path / "out").read_bytes().splitlines(keepends=True)
    (tmp_path / "out").write_bytes(b"".join(whole[:4]) + whole[4][:50])
    asked: list[str] = []
    answer_line = run_module.answer_line

    async def noted(app: Any, line: Any) -> Any:
        asked.append(line.custom_id)
        return await answer_line(app, line)

    monkeypatch.setattr(run_module, "answer_line", noted)
    result = run(lines)
    assert sorted(asked) == sorted(json.loads(line)["custom_id"] for line in whole[4:])
    assert (tmp_path / "out").read_bytes().startswith(b"".join(whole[:4]))
    assert result.num_answered == 6
    assert Counter(line["custom_id"] for line in answers_in(tmp_path / "out")) == Counter(line["custom_id"] for line in lines)


def test_batch_runs_more_samples_than_the_queue_limit(run: Run) -> None:
    lines = [{**request(index), "body": {**request(index)["body"], "n": 16, "max_tokens": 1}} for index in range(0, 24, 2)]
    assert run(lines).num_by_status == {200: 12}


def test_interrupted_batch_is_finished_by_the_next_run(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = [request(index) for index in range(6)]
    made = create_app

    def closing(engine: Any, settings: ServerSettings) -> Any:
        application = made(engine, settings)
        application.state.service.admission.is_draining = True
        return application

    with monkeypatch.context() as patch:
        patch.setattr(run_module, "create_app", closing)
        with pytest.raises(NotAnsweredError, match="run the same command again"):
            run(lines)
    assert not (tmp_path / "out").exists(), "nothing was answered"
    assert run(lines).num_by_status == {200: 6}


def test_batch_output_of_another_model_is_refused(run: Run) -> None:
    run([request(0)])
    with pytest.raises(ConfigError, match="holds answers of the model 'mini', and this is 'other'"):
        run([request(0), request(1)], served_model_name="other")
    with pytest.raises(ConfigError, match="this is 'other'"):  # also when no request is left to answer
        run([request(0)], served_model_name="other")


def test_batch_with_adapters_continues_after_a_stop(run: Run, engine: AsyncEngine, tmp_path: Path) -> None:
    lines = [{**request(index), "body": {**request(index)["body"], "model": ("mini", "half")[index % 2]}} for index in range(4)]
    adapter = write_adapter_of(engine.loaded.engine.runtime.config, tmp_path / "adapter", seed=1)
    asyncio.run(engine.load_adapter("half", adapter))
    try:
        run(lines)
        whole = (tmp_path / "out").read_bytes().splitlines(keepends=True)
        assert {json.loads(line)["response"]["body"]["model"] for line in whole} == {"mini", "half"}
        (tmp_path / "out").write_bytes(b"".join(whole[:2]))
        assert run(lines).num_by_status == {200: 4}
        (tmp_path / "out").write_bytes(b"".join(whole[:2]))
    finally:
        asyncio.run(engine.unload_adapter("half"))
    with pytest.raises(ConfigError, match="the model 'half', and this is 'mini': give another output file, or its adapter"):
        run(lines)


def command(source: Path, target: Path, *more: str) -> list[str]:
    return [sys.executable, "-m", "paceline", "batch", str(source), str(target), "--threads", "1", "--max-num-seqs", "4", *more]


def on_a_terminal(command: list[str]) -> tuple[int, str]:
    """Exit code and what a terminal shows, with the bar."""
    ours, theirs = pty.openpty()
    process = subprocess.Popen(command, stderr=theirs, env={**os.environ, "TERM": "xterm", "COLUMNS": "100"})
    os.close(theirs)
    shown = b""
    with suppress(OSError):  # its other end is closed
        while part := os.read(ours, 4096):
            shown += part
    os.close(ours)
    return process.wait(), shown.decode()


@pytest.mark.long
def test_killed_batch_continues_and_shows_progress_on_a_terminal(run: Run, tmp_path: Path, large_counts: bool, seed: int) -> None:
    draws = random.Random(seed)
    num_kills, num_lines = (10, 60) if large_counts else (1, 12)
    lines = [request(index) for index in range(num_lines)]
    source, target = write_lines(tmp_path / "asked", [*lines, "oops"]), tmp_path / "killed"
    num_killed = 0
    for _ in range(num_kills):
        num_before = target.read_bytes().count(b"\n") if target.exists() else 0
        process = subprocess.Popen(command(source, target), stderr=subprocess.DEVNULL)
        wanted = num_before + draws.randint(0, max(1, num_lines // num_kills - 2))
        while process.poll() is None and (not target.exists() or target.read_bytes().count(b"\n") < wanted):
            time.sleep(0.01)
        time.sleep(draws.random() * 0.1)
        process.kill()
        num_killed += process.wait() == -signal.SIGKILL
    assert num_killed == num_kills, "it was done before"
    code, shown = on_a_terminal(command(source, target))
    assert (code, f"{num_lines}/{num_lines}" in shown) == (2, True), shown
    assert f"line {num_lines + 1} is left out" in shown
    run(lines)  # unbroken, with other drafters
    assert len(answers_in(target)) == num_lines
    assert sorted(map(told, answers_in(target))) == sorted(map(told, answers_in(tmp_path / "out")))


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no such devices here")
@pytest.mark.parametrize("place", ["/dev/full", "/dev/null"])
def test_batch_output_to_a_device_is_refused(tmp_path: Path, place: str) -> None:
    silent = Watcher(lambda text: None, lambda text: None)
    with pytest.raises(RequestError, match="is no regular file"):
        run_batch({"model": "mini"}, ServerSettings(), write_lines(tmp_path / "in", [request(0)]), Path(place), silent)


def test_interrupted_batch_says_how_to_continue(tmp_path: Path) -> None:
    endless = [{**request(index), "body": {"prompt": "x", "max_tokens": 1900, "ignore_eos": True, "seed": 1}} for index in (3, 6)]
    source, target = (
        write_lines(tmp_path / "in", [{**request(0), "body": {"prompt": "x", "max_tokens": 1, "seed": 1}}, *endless]),
        tmp_path / "out",
    )
    heeds_interrupts = functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL)  # where the tests run in the background
    process = subprocess.Popen(command(source, target), stderr=subprocess.PIPE, text=True, preexec_fn=heeds_interrupts)
    while process.poll() is None and (not target.exists() or not target.read_bytes().count(b"\n")):
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 130, said
    assert f"interrupted: 1 of 3 requests are answered in {target}; run the same command to continue" in said
    assert "Traceback" not in said
    assert "\x1b" not in said, "no bar where there is no terminal"
    assert len(answers_in(target)) == 1


def test_sigterm_ends_a_batch_as_an_interrupt_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def terminated(*_: Any, watcher: Watcher, **__: Any) -> None:
        watcher.begin(1, 3)
        signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(run_module, "run_batch", terminated)
    for name in ("TRANSFORMERS_VERBOSITY", "HF_HUB_DISABLE_PROGRESS_BARS"):
        monkeypatch.setenv(name, "1")  # set by the command if it is missing: so that it is restored
    handler = signal.getsignal(signal.SIGTERM)
    try:
        done = CliRunner().invoke(app, ["batch", str(write_lines(tmp_path / "in", [request(0)])), str(tmp_path / "out")])
    finally:
        signal.signal(signal.SIGTERM, handler)
    assert done.exit_code == 143
    assert f"terminated: 1 of 3 requests are answered in {tmp_path / 'out'}; run the same command to continue" in done.stderr


def test_duplicate_custom_ids_are_refused_before_loading(tmp_path: Path) -> None:
    source = write_lines(tmp_path / "in", [request(0), request(1), request(0)])
    done = CliRunner().invoke(app, ["batch", str(source), str(tmp_path / "out"), "--model", "absent", "--debug"])
    assert (done.exit_code, done.stdout) == (2, "")
    assert "'request 0' in lines 1 and 3" in done.stderr
    assert done.stderr.splitlines()[-1].startswith("error: ")
