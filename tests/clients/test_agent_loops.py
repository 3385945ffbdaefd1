"""Two-turn agent loops of the official clients, over the mini with each chat template of llama.cpp's sources (make test-clients)."""

import asyncio
import json
import subprocess
from collections import Counter
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from clients.test_peer_parsers import TEMPLATES
from harness.live_server import live_server
from harness.tool_model import write_tool_model
from paceline import AsyncEngine

SCRIPT = Path(__file__).with_name("agent_loop_calls.py")
CONTEXT = 8192  # tokens; some templates alone have 2,000
KEY = "a-key-of-enough-characters"


class LoopClients:
    """The process with the official clients."""

    def __init__(self, python: Path) -> None:
        command = [str(python), str(SCRIPT), KEY]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def failures(self, url: str) -> dict[str, str]:
        """Return the loops that failed against a server, with their errors."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(url + "\n")
        self._process.stdin.flush()
        found: dict[str, str] = json.loads(self._process.stdout.readline())
        return found

    def close(self) -> None:
        """End the process."""
        self._process.communicate(timeout=60)


@pytest.fixture(scope="module")
def loop_clients(clients: Path) -> Iterator[LoopClients]:
    python = clients / "servers" / "bin" / "python"
    if not python.exists():
        pytest.skip(f"there is no environment {python.parent.parent}")
    with closing(LoopClients(python)) as started:
        yield started


@contextmanager
def served(model: Path) -> Iterator[str]:
    """A server of a model; yields its address."""
    engine = AsyncEngine.open(str(model), drafter="none", max_num_seqs=4, threads=1)
    try:
        # the mini has not learnt to end reasoning, which some prompts begin
        with live_server(engine, served_model_name="mini", reasoning_parser="none") as server:
            yield server.url
    finally:
        asyncio.run(engine.close())


@pytest.mark.parametrize("name", TEMPLATES)
def test_agent_loops_of_client_libraries_work_with_public_templates(
    name: str, clients: Path, loop_clients: LoopClients, mini_dir: Path, tmp_path: Path, tally: "Counter[str]"
) -> None:
    template = clients / "parsers/llama.cpp/models/templates" / f"{name}.jinja"
    if not template.exists():
        pytest.skip("the environment of other projects' parsers is not there: make test-clients builds it")
    model = write_tool_model(mini_dir, tmp_path / "model", template.read_text(encoding="utf-8"))
    config = json.loads((mini_dir / "config.json").read_text(encoding="utf-8"))
    (model / "config.json").unlink()  # a link
    (model / "config.json").write_text(json.dumps({**config, "max_position_embeddings": CONTEXT}), encoding="utf-8")
    with served(model) as url:
        failures = loop_clients.failures(url)
    assert failures == {}
    tally["chat templates with which all agent loops run"] += 1
