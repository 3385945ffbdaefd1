"""Names in a stranger's files reach the terminal as text: no escape sequence in them does anything."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file
from typer.testing import CliRunner

from paceline.cli import app
from paceline.cli.reporting import print_error, print_notice

CLEAR = "\x1b[2J\x1b]0;gone\x07\x9b31m\u202e"
CONFIG: dict[str, Any] = {
    "model_type": "llama", "vocab_size": 8, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2,
    "dtype": "float32",
}  # fmt: skip


def model(directory: Path, *, config: dict[str, Any] | None = None) -> Path:
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps({**CONFIG, **(config or {})}))
    save_file({"x": np.zeros((2, 2), np.float32)}, directory / "model.safetensors")
    return directory


def shown(*arguments: str) -> str:
    done = CliRunner().invoke(app, list(arguments))
    assert done.exit_code in (1, 2)
    return done.output


@pytest.mark.parametrize("case", ["a directory", "a missing directory", "a tensor", "a value", "an adapter", "a tokenizer", "a GGUF file"])
@pytest.mark.parametrize("command", ["doctor", "run"])
def test_escape_sequences_in_file_names_are_escaped_in_messages(case: str, command: str, tmp_path: Path) -> None:
    directory = tmp_path / "model"
    if case == "a directory":
        directory = model(tmp_path / f"model{CLEAR}")
    elif case == "a missing directory":
        directory = tmp_path / f"model{CLEAR}"
    elif case == "a tensor":
        names = ("embed_tokens.weight", "norm.weight", "layers.0.input_layernorm.weight", f"layers.0.{CLEAR}.weight")
        model(directory)
        save_file({f"model.{name}": np.zeros((2, 2), np.float32) for name in names}, directory / "model.safetensors")
    elif case == "a value":
        model(directory, config={"model_type": CLEAR})
    elif case == "an adapter":
        directory.mkdir()
        (directory / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": CLEAR}))
    elif case == "a tokenizer":
        model(directory)
        (directory / "tokenizer.json").write_text(CLEAR)
    else:
        directory = tmp_path / f"model{CLEAR}.gguf"
        directory.write_bytes(b"GGUF" + bytes(20))
    output = shown(command, *(["x"] if command == "run" else []), "--model", str(directory), "--offline" if command == "run" else "--json")
    text = json.loads(output)["problems"][0] if command == "doctor" else output
    assert text.replace("\n", "").isprintable(), text
    if command == "doctor":
        report = shown("doctor", "--model", str(directory))
        assert report.replace("\n", "").isprintable(), report


def test_escape_sequences_in_notices_and_errors_are_escaped(capsys: pytest.CaptureFixture[str]) -> None:
    print_notice(f"the head {CLEAR} holds\nanother line")
    print_error(f"the library says {CLEAR}")
    lines = capsys.readouterr().err.splitlines()
    assert [line for line in lines if not line.isprintable()] == []
    assert len(lines) == 3
