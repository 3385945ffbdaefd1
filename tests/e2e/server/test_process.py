"""`paceline serve` as a process: its socket, its keys, its end."""

import fcntl
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner, Result

from harness.apis import APIS
from harness.http_client import events_in
from harness.live_server import head_of, post_of, read_all, statuses
from harness.server_process import Server
from paceline.cli import app

CHAT = "/v1/chat/completions"
FIELDS = {"messages": [{"role": "user", "content": "I need a taxi to the airport."}], "temperature": 0, "max_tokens": 24}
ENDLESS = {**FIELDS, "max_tokens": 1900, "ignore_eos": True, "stream": True}
KEY = "key-of-the-environment"


Start = Callable[..., Server]


@pytest.fixture(scope="module")
def start() -> Iterator[Start]:
    """Starts servers, and ends them after the tests."""
    with ExitStack() as servers:

        def started(*arguments: str, **environment: str) -> Server:
            return servers.enter_context(closing(Server(*arguments, **environment)))

        yield started


@pytest.fixture(scope="module")
def server(start: Start) -> Server:
    """One for several tests, the last of which ends it."""
    return start("--drain-s", "60")


@pytest.fixture
def refused(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Result]:
    """The command in this process, for arguments with which it serves nothing."""
    for name in ("TRANSFORMERS_VERBOSITY", "HF_HUB_DISABLE_PROGRESS_BARS"):
        monkeypatch.setenv(name, "1")  # set by the command if it is missing: so that it is restored
    monkeypatch.delenv("PACELINE_API_KEYS", raising=False)
    return lambda *arguments: CliRunner().invoke(app, ["serve", *arguments])


def joined(events: list[dict[str, Any]]) -> str:
    return "".join(choice["delta"].get("content", "") for event in events for choice in event["choices"])


def test_served_mini_model_answers_streamed_and_whole(server: Server) -> None:
    with server.client() as client:
        assert [client.get(path).status_code for path in ("/health", "/ready")] == [200, 200]
        whole = client.post(CHAT, json=FIELDS).json()
        with client.stream("POST", CHAT, json={**FIELDS, "stream": True}) as stream:
            parts = list(stream.iter_text())
        assert joined(events_in("".join(parts))) == whole["choices"][0]["message"]["content"]
        assert len(parts) > 3, "they come as they are made"
        assert client.get("/v1/models").json()["data"][0]["id"] == "mini"
        assert 'paceline:request_success_total{engine="0",finished_reason="stop",model_name="mini"}' in client.get("/metrics").text


def test_request_of_a_client_that_closes_its_connection_is_aborted(server: Server) -> None:
    with server.client() as client:
        before = number_of(client, "request_aborts_total")
        with client.stream("POST", CHAT, json=ENDLESS) as stream:
            next(stream.iter_text())
        with pytest.raises(httpx.ReadTimeout):
            client.post(CHAT, json={**ENDLESS, "stream": False}, timeout=0.3)
        deadline_s = time.monotonic() + 20
        while number_of(client, "request_aborts_total") < before + 2:
            assert time.monotonic() < deadline_s
            time.sleep(0.05)
        assert number_of(client, "num_requests_running") == 0


def number_of(client: httpx.Client, name: str) -> float:
    (found,) = re.findall(rf"^paceline:{name}{{[^}}]*}} (\S+)$", client.get("/metrics").text, re.MULTILINE)
    return float(found)


def test_sigterm_lets_running_requests_of_the_server_finish(start: Start, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("key-of-the-file-one\nkey-of-the-file-two\n")
    server = start("--api-key-file", str(keys), "--served-model-name", "mine", PACELINE_API_KEYS=KEY)
    with server.client() as client:
        assert client.get("/v1/models").status_code == 401
        assert client.get("/v1/models", headers={"x-api-key": KEY}).status_code == 401, "the file stands for the environment"
    with server.client(Authorization="Bearer key-of-the-file-two") as client:
        assert client.get("/v1/models").json()["data"][0]["id"] == "mine"
        with client.stream("POST", CHAT, json={**ENDLESS, "max_tokens": 150}) as stream:
            parts = stream.iter_text()
            text = next(parts)
            server.process.send_signal(signal.SIGTERM)
            text += "".join(parts)
        assert events_in(text)[-1]["choices"][0]["finish_reason"] == "length"
    assert server.wait() == 0
    assert "airport" not in server.stderr
    assert "key-of" not in server.stderr
    logged = [json.loads(line) for line in server.stderr.splitlines() if line.startswith("{")]
    assert [line["status"] for line in logged] == [401, 401, 200, 200]
    assert logged[-1]["route"] == CHAT


@pytest.mark.long
def test_open_stream_and_upload_are_cut_after_drain_s(start: Start) -> None:
    server = start("--drain-s", "0.2", "--quiet", "--host", "0.0.0.0", PACELINE_API_KEYS=f"another-key-of-the-test,{KEY}")
    assert "WARNING" in server.stderr
    url = server.url.replace("0.0.0.0", "127.0.0.1")
    headers = {"x-api-key": KEY}
    with socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2]))) as never_sends:
        never_sends.sendall(
            head_of("/v1/completions", method="POST", Content_Type="application/json", Content_Length="500", **headers) + b"{"
        )
        with httpx.Client(base_url=url, timeout=60, headers=headers) as client, client.stream("POST", CHAT, json=ENDLESS) as stream:
            parts = stream.iter_text()
            text = next(parts)
            server.process.send_signal(signal.SIGINT)
            text += "".join(parts)
        code = server.wait()
    last = text.rstrip().split("\n\n")[-1]
    assert json.loads(last.removeprefix("data: "))["error"]["code"] == "shutting_down"
    assert code == 0
    assert "Traceback" not in server.stderr
    assert "Cancel" not in server.stderr


def test_second_sigterm_ends_running_requests_with_an_error(server: Server) -> None:
    """Whole and streamed, in every API, and without the time of the drain."""
    answers: dict[str, bytes] = {}
    long = {"max_tokens": 1900, "temperature": 100.0, "seed": 1, "top_p": 1.0}  # it hardly ever ends by itself
    bodies = {"openai": (CHAT, ENDLESS), "whole": (CHAT, {**ENDLESS, "stream": False})}
    for kind, api in (("anthropic", APIS["messages"]), ("ollama", APIS["ollama"])):
        bodies[kind] = (api.path, {**api.fields(FIELDS["messages"], **long), "stream": True})

    def ask(name: str) -> None:
        path, fields = bodies[name]
        body = json.dumps(fields).encode()
        with socket.create_connection(("127.0.0.1", int(server.url.rpartition(":")[2])), timeout=60) as connection:
            connection.sendall(post_of(path, body, Connection="close"))
            answers[name] = read_all(connection)

    asking = [threading.Thread(target=ask, args=(name,)) for name in bodies]
    for thread in asking:
        thread.start()
    with server.client() as client:
        while number_of(client, "num_requests_running") < 4:
            time.sleep(0.01)
    started_s = time.monotonic()
    for _ in range(2):
        server.process.send_signal(signal.SIGTERM)
        time.sleep(0.2)
    assert server.wait() == 0
    assert time.monotonic() - started_s < 10
    for thread in asking:
        thread.join(10)
    head, _, body = answers["whole"].partition(b"\r\n\r\n")
    assert (statuses(head), json.loads(body)["error"]["code"]) == ([503], "shutting_down")
    for name in ("openai", "anthropic", "ollama"):
        assert b"shut down before" in answers[name][-600:], answers[name][-600:]
        assert answers[name].endswith(b"0\r\n\r\n"), "the stream is complete"
    assert "Traceback" not in server.stderr


def test_port_in_use_is_refused_before_loading(refused: Callable[..., Result]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        done = refused("--port", port, "--model", "path/that/is/not/there")
    assert (done.exit_code, done.stdout) == (2, "")
    assert done.stderr.startswith(f"error: host 127.0.0.1 port {port} cannot be listened on")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--host", "0.0.0.0"], "--insecure"),
        (["--port", "70000"], "port is 70000"),
        (["--max-queue", "-1"], "max_queue is -1"),
        (["--api-key-file", "absent"], "cannot be read"),
        (["--max-num-seqs", "0"], "max_num_seqs is 0"),
        (["--model", "absent-model", "--port", "0", "--offline"], "absent-model"),
        (["mini", "absent-model", "--port", "0", "--offline"], "absent-model"),
        (["mini", "mini", "--port", "0"], "two models are called 'mini'"),
        (["mini", "other", "--replicas", "2"], "replicas serve one model, and 2 are given"),
        (["mini", "--unload-after", "soon"], "unload_after is 'soon'"),
        (["mini", "--max-loaded", "0"], "max_loaded is 0"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_startup_error_is_one_line_on_stderr(arguments: list[str], says: str, refused: Callable[..., Result]) -> None:
    done = refused(*arguments)
    assert done.exit_code in (1, 2)
    assert says in done.stderr
    assert done.stderr.count("\n") == 1


def test_unusable_api_key_is_refused_without_repeating_it(refused: Callable[..., Result], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_API_KEYS", "secret?")
    done = refused()
    assert (done.exit_code, "secret?" in done.output) == (2, False)


def test_api_key_option_warns_that_ps_shows_the_key(refused: Callable[..., Result]) -> None:
    done = refused("absent-model", "--port", "0", "--api-key", KEY, "--offline")
    assert (done.exit_code, KEY in done.output) == (1, False)
    assert "every user of this machine can see the key with ps; --api-key-file and PACELINE_API_KEYS keep it private" in done.stderr


@pytest.mark.skipif(not hasattr(fcntl, "F_SETPIPE_SZ"), reason="the size of a pipe can be set on Linux alone")
@pytest.mark.long
def test_full_stderr_pipe_blocks_neither_answers_nor_shutdown() -> None:
    """A line that waits for its reader in the event loop would be the last thing the server does."""
    reading, writing = os.pipe()
    fcntl.fcntl(writing, fcntl.F_SETPIPE_SZ, 4096)
    command = [sys.executable, "-m", "paceline", "serve", "--port", "0", "--threads", "1", "--drafter", "none", "--drain-s", "0.5"]
    process = subprocess.Popen(command, stderr=writing)
    os.close(writing)
    try:
        said = b""
        while not (found := re.search(rb"answers at (http://\S+)/v1", said)):
            said += os.read(reading, 1000)
        with httpx.Client(base_url=found[1].decode(), timeout=20) as client:
            assert [client.get("/health").status_code for _ in range(60)] == [200] * 60
            with client.stream("POST", CHAT, json=ENDLESS) as stream:
                next(stream.iter_text())
                process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
    finally:
        os.close(reading)
        process.kill()
        process.wait()


def test_server_of_several_models_runs_until_sigterm(start: Start, mini_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "other").symlink_to(mini_dir / "draft")
    server = start("mini", str(tmp_path / "other"), "--max-model-len", "256")
    fields = {"prompt": "Once there was a", "temperature": 0, "max_tokens": 8}
    with server.client() as client:
        texts = [
            client.post("/v1/completions", json={**fields, "model": name}).json()["choices"][0]["text"]
            for name in ("mini", "other", "mini")
        ]
        assert texts[0] == texts[2] != texts[1]
        assert client.get("/health").json()["models"] == {"mini": "loaded", "other": "unloaded"}
    server.process.send_signal(signal.SIGTERM)
    assert server.wait() == 0
    loads = [json.loads(line)["model"] for line in server.stderr.splitlines() if '"model_loaded"' in line]
    assert loads == ["mini", "other", "mini"]
    assert str(tmp_path) not in server.stderr
