"""`paceline doctor` with adapters that become part of the target or of its draft model."""

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from harness.adapter_files import write_adapter_of
from harness.checkpoints import write_byte_level_tokenizer, write_checkpoint
from harness.gguf_checkpoints import byte_level_vocabulary, write_gguf
from paceline.cli import app
from paceline.models.checkpoint import read_model_config


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("doctor") / "target", "llama", num_hidden_layers=2)


@pytest.fixture(scope="module")
def draft(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("doctor") / "draft", "llama", num_hidden_layers=1)


@pytest.fixture(scope="module")
def of_target(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_adapter_of(read_model_config(target), tmp_path_factory.mktemp("adapters") / "wide", seed=1)


@pytest.fixture(scope="module")
def of_draft(draft: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_adapter_of(read_model_config(draft), tmp_path_factory.mktemp("adapters") / "small", seed=1)


def ask(*arguments: str | Path) -> tuple[int, dict[str, Any]]:
    done = CliRunner().invoke(app, ["doctor", "--json", *map(str, arguments)])
    return done.exit_code, json.loads(done.stdout)


def text(*arguments: str | Path) -> str:
    done = CliRunner(env={"COLUMNS": "400"}).invoke(app, ["doctor", *map(str, arguments)])
    return " ".join(done.stdout.split())


def test_doctor_checks_an_adapter_to_merge(target: Path, of_target: Path, of_draft: Path) -> None:
    code, facts = ask("--model", target, "--merge-adapter", of_target)
    assert (code, facts["merged_adapter"]["name"], facts["merged_adapter"]["num_products"]) == (0, "wide", 2)
    assert ask("--model", target)[1]["merged_adapter"] is None
    assert "merged wide: fits; 2 products of rank 4 at most" in (said := text("--model", target, "--merge-adapter", of_target))
    assert "tokens may differ from those with a separate adapter" in said
    code, facts = ask("--model", target, "--merge-adapter", of_draft)
    assert (code, facts["works"]) == (1, False)
    assert "does not adapt 1 module: model.layers.1.self_attn.q_proj" in facts["problems"][0]


def test_doctor_counts_merged_gguf_matrices_as_float16(tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    directory = write_checkpoint(tmp_path / "hf", "llama", vocab_size=263, num_hidden_layers=2)
    write_byte_level_tokenizer(directory)
    file = write_gguf(directory, tmp_path / "model.gguf", "Q8_0", metadata=byte_level_vocabulary(directory))
    config = read_model_config(file)
    adapter = write_adapter_of(config, tmp_path / "wide", seed=1)
    plain, merged = (ask("--model", file, "--drafter", "none", *more)[1] for more in ((), ("--merge-adapter", adapter)))
    num_values = config.num_layers * config.hidden_size * config.layers[0].attention.query_size
    more_bytes = merged["memory"]["target_weights_bytes"] - plain["memory"]["target_weights_bytes"]
    assert 0.7 * num_values < more_bytes < num_values  # two bytes for one and its share of a scale
    assert any("2 quantised matrices become f16 with the adapter merged" in note for note in merged["notes"])


def test_doctor_checks_adapters_against_the_merged_model(target: Path, of_target: Path) -> None:
    code, facts = ask("--model", target, "--merge-adapter", of_target, "--adapter", f"more={of_target}")
    assert (code, [one["name"] for one in facts["adapters"]]) == (0, ["more"])


def test_doctor_checks_an_adapter_of_the_draft_model(target: Path, draft: Path, of_target: Path, of_draft: Path) -> None:
    pair = ("--model", target, "--drafter", draft)
    code, facts = ask(*pair, "--draft-adapter", of_draft)
    assert (code, facts["drafters"][0]["adapter"]["name"], facts["drafters"][0]["adapter"]["num_products"]) == (0, "small", 1)
    assert ask(*pair)[1]["drafters"][0]["adapter"] is None
    assert "with the adapter small: fits; 1 products of rank 4" in text(*pair, "--draft-adapter", of_draft)
    code, facts = ask(*pair, "--draft-adapter", of_target)
    assert (code, len(facts["problems"])) == (1, 1)
    assert "is no adapter of this model" in facts["problems"][0]
    code, facts = ask("--model", target, "--drafter", "ngram", "--draft-adapter", of_draft)
    assert (code, len(facts["problems"])) == (1, 1)
    assert "and the drafter is ngram: leave it out, or name the draft model" in facts["problems"][0]


def test_doctor_probe_loads_both_adapters(target: Path, draft: Path, of_target: Path, of_draft: Path) -> None:
    arguments = ("--model", target, "--drafter", draft, "--merge-adapter", of_target, "--draft-adapter", of_draft, "--max-model-len", "64")
    code, facts = ask(*arguments, "--probe")
    assert (code, facts["problems"]) == (0, [])
    assert any("the adapter 'wide' is merged into the weights" in notice for notice in facts["probe"]["notices"])
