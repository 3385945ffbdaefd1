"""Each peer has an environment of its own, whole or not there."""

import ast
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from paceline.benchmarking.peers import PEERS, RECORD, Peer, environment_python, make_environment
from paceline.errors import BackendUnavailableError

PEER = Peer("fake", ("torch==2.13.0+cpu", "fake==1.0"), frozenset({"gguf"}), ("plain",), Path("fake.py"), ("alone==2.0",), "a compiler")


class Commands:
    """In place of pip and venv: notes what is run, and makes an environment's Python."""

    def __init__(self, refused: str = "") -> None:
        self.run: list[list[str]] = []
        self._refused = refused

    def __call__(self, command: Sequence[str]) -> None:
        self.run.append(list(command))
        if self._refused and self._refused in command:
            raise subprocess.CalledProcessError(1, list(command), stderr=f"noise\nERROR: no {self._refused}\nhint: read the log\n")
        if command[1:3] == ["-m", "venv"]:
            python = Path(command[3]) / "bin" / "python"
            python.parent.mkdir(parents=True)
            python.touch()

    @property
    def installed(self) -> list[list[str]]:
        return [[word for word in command if "==" in word or word == "--no-deps"] for command in self.run if "install" in command]


def make(commands: Commands) -> Path:
    """The Python of the environment that the commands make."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("paceline.benchmarking.peers._run", commands)
        return make_environment(PEER)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path))
    monkeypatch.setattr("os.name", "posix")
    return tmp_path


def test_peer_environment_installs_torch_first(cache: Path) -> None:
    commands = Commands()
    python = make(commands)
    assert python == environment_python(PEER) == cache / "peers" / "fake" / "bin" / "python"
    assert commands.installed == [["torch==2.13.0+cpu"], ["torch==2.13.0+cpu", "fake==1.0"], ["--no-deps", "alone==2.0"]]


def test_peer_environment_falls_back_to_torch_of_the_default_index() -> None:
    commands = Commands(refused="torch==2.13.0+cpu")
    make(commands)
    assert commands.installed[1:] == [["torch==2.13.0"], ["torch==2.13.0", "fake==1.0"], ["--no-deps", "alone==2.0"]]


def test_existing_peer_environment_is_not_rebuilt() -> None:
    make(Commands())
    commands = Commands()
    assert make(commands) == environment_python(PEER)
    assert commands.run == []


def test_incomplete_peer_environment_is_ignored_and_rebuilt(cache: Path) -> None:
    with pytest.raises(BackendUnavailableError):
        make(Commands(refused="alone==2.0"))
    assert (cache / "peers" / "fake" / "bin" / "python").is_file()
    assert environment_python(PEER) is None
    (cache / "peers" / "fake" / "left over").touch()
    make(Commands())
    assert not (cache / "peers" / "fake" / "left over").exists()
    assert environment_python(PEER) is not None


def test_peer_environment_with_other_requirements_is_ignored(cache: Path) -> None:
    make(Commands())
    record = cache / "peers" / "fake" / RECORD
    for text in (record.read_text(encoding="utf-8").replace("fake==1.0", "fake==0.9"), "[]", "{"):
        record.write_text(text, encoding="utf-8")
        assert environment_python(PEER) is None


def test_failed_peer_installation_reports_its_reason() -> None:
    with pytest.raises(BackendUnavailableError, match=r"fake cannot be installed here: ERROR: no fake==1\.0; it needs a compiler"):
        make(Commands(refused="fake==1.0"))


@pytest.mark.parametrize("peer", PEERS.values(), ids=lambda peer: peer.name)
def test_peer_packages_are_pinned_and_workers_import_no_paceline(peer: Peer) -> None:
    assert all("==" in package or package.startswith("setuptools<") for package in (*peer.packages, *peer.alone))
    assert set(peer.modes) <= {"plain", "ngram", "draft_model", "mtp"}
    assert peer.modes[0] == "plain"
    assert peer.formats <= {"safetensors", "gguf", "openvino"}
    for file in (peer.worker, peer.worker.with_name("worker_loop.py"), peer.worker.with_name("export_gguf.py")):
        tree = ast.parse(file.read_text(encoding="utf-8"))
        names = [alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names]
        names += [node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
        assert not [name for name in names if name.split(".")[0] == "paceline"]
