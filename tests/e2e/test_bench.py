"""`paceline bench` as a person meets it."""

import json
import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from paceline.cli import app

SHORT = ("--drafter", "ngram", "--workload", "chat", "--rounds", "1", "--max-tokens", "24", "--num-prompts", "1", "--threads", "1")


def bench(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["bench", *arguments])


def test_bench_measures_two_modes_of_one_workload(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["paceline", "bench", *SHORT])
    for name in ("TRANSFORMERS_VERBOSITY", "HF_HUB_DISABLE_PROGRESS_BARS"):
        monkeypatch.setenv(name, "1")  # the command sets it if it is unset; monkeypatch restores it
    files = [tmp_path / name for name in ("result.json", "result.html")]
    done = bench(*SHORT, "--json-file", str(files[0]), "--html", str(files[1]))
    assert done.exit_code == 0, done.output
    assert "chat, temperature 0" in done.stdout
    assert "mini, bf16" in done.stdout
    found = json.loads(files[0].read_text())
    assert found["command"].startswith("paceline bench --drafter ngram")
    assert [(cell["mode"], cell["num_rounds"]) for cell in found["cells"]] == [("plain", 1), ("ngram", 1)]
    assert found["cells"][1]["differing"] == [0, 2]
    assert found["failures"] == []
    assert found["ended"] == "complete"
    assert [len(one["outputs"][0]["token_ids"]) for one in found["samples"]] == [24] * 4
    assert files[1].read_text().startswith("<!doctype html>")


@pytest.mark.long
@pytest.mark.parametrize(("option", "begin"), [(("-o", "md"), "| model | threads | workload | mode | tokens/s |"), (("--json",), "{")])
def test_bench_prints_its_result_as_markdown_or_json(monkeypatch: pytest.MonkeyPatch, option: tuple[str, ...], begin: str) -> None:
    for name in ("TRANSFORMERS_VERBOSITY", "HF_HUB_DISABLE_PROGRESS_BARS"):
        monkeypatch.setenv(name, "1")
    done = bench("mini", *SHORT, *option)
    assert done.exit_code == 0, done.output
    lines = done.stdout.splitlines()
    assert lines[0].startswith(begin)
    if begin == "{":
        assert [cell["mode"] for cell in json.loads(done.stdout)["cells"]] == ["plain", "ngram"]
        return
    assert [line.split(" | ")[3] for line in lines[2:4]] == ["plain", "ngram"]
    assert len({line.count("|") for line in lines[:4]}) == 1


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--workload", "poems"], "workload is 'poems': use one of chat"),
        (["--drafter", "mtp"], "holds no mtp head"),
        (["--model", "no/such/model"], "no/such/model"),
        (["--prompts", "no-such-file.jsonl"], "there is no file no-such-file.jsonl"),
        (["--spec-bench", "no-such-file.jsonl"], "there is no file no-such-file.jsonl"),
        (["--temperature", "warm"], "temperature is 'warm': use numbers with commas"),
        (["--peer", "nobody"], "peer is 'nobody': use one of"),
        (["--install-peers", "nobody"], "peer is 'nobody': use one of"),
        (["--rounds", "0"], "rounds is 0"),
        (["--output", "csv"], "output is 'csv': use one of text, md, json"),
        (["--json-file", "no-such-folder/x.json"], "there is no folder"),
        (["--json-file", "same.out", "--html", "same.out"], "two reports would go to"),
        (["--html", "."], "it is a folder; give the name of a file"),
    ],
)
def test_bench_reports_invalid_options_before_measuring(arguments: list[str], said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    for name in ("TRANSFORMERS_VERBOSITY", "HF_HUB_DISABLE_PROGRESS_BARS"):
        monkeypatch.setenv(name, "1")
    start = time.monotonic()
    done = bench(*arguments, "--offline")
    assert done.exit_code == 2 or "no/such/model" in said
    assert done.exit_code in (1, 2)
    assert "error: " in done.stderr
    assert said in done.stderr
    assert done.stdout == ""
    assert time.monotonic() - start < 20


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="looks into /proc")
@pytest.mark.long
def test_interrupted_bench_prints_partial_results_and_ends_its_workers(tmp_path: Path) -> None:
    file = tmp_path / "result.json"
    command = [
        sys.executable,
        "-m",
        "paceline",
        "bench",
        "--drafter",
        "ngram",
        "--workload",
        "chat",
        "--rounds",
        "1000",
        "--max-tokens",
        "16",
    ]
    command += ["--num-prompts", "1", "--minutes", "1", "--threads", "1", "--json-file", str(file)]
    marks = {**os.environ, "PACELINE_MARK": str(tmp_path)}
    heeds_interrupts = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)  # where the tests run in the background
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, env=marks, preexec_fn=heeds_interrupts, **pipes) as process:
        try:
            assert process.stderr is not None
            assert any(line.startswith("measuring ") for line in process.stderr)  # reads until then
            time.sleep(1.0)
            process.send_signal(signal.SIGINT)
            stdout, stderr = process.communicate(timeout=60)
        finally:
            process.kill()
    assert process.returncode == 130, stderr
    assert "chat, temperature 0" in stdout
    found = json.loads(file.read_text())
    assert found["ended"] == "interrupted"
    assert found["samples"]
    assert marked(str(tmp_path)) == []


def marked(word: str) -> list[int]:
    """Processes that were started with this word in their environment and are still there."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            if f"PACELINE_MARK={word}".encode() in path.read_bytes():
                found.append(int(path.parent.name))
        except OSError:
            continue
    return found
