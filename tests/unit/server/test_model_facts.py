"""What lists of models show, and the durations after which models are unloaded."""

import math
from pathlib import Path

import pytest

from harness.gguf_checkpoints import write_gguf
from harness.tool_model import write_tool_model
from paceline.config import EngineConfig
from paceline.errors import CheckpointError, ConfigError
from paceline.server.model_facts import ModelFacts, template_facts
from paceline.server.settings import ServerSettings, seconds_of
from paceline.tokenizer.tokenizer import Tokenizer


@pytest.mark.parametrize(("kind", "share"), [("Q4_1", 0.33), ("Q8_0", 0.55), ("BF16", 1.0)])
def test_model_facts_of_a_gguf_file_name_its_quantisation(mini_dir: Path, tmp_path: Path, kind: str, share: float) -> None:
    file = tmp_path / "mini.gguf"
    write_gguf(mini_dir, file, kind)
    whole, facts = ModelFacts.read(EngineConfig(model="mini")), ModelFacts.read(EngineConfig(model=str(file)))
    assert (facts.quantization, facts.num_bytes) == (kind, file.stat().st_size)
    assert facts.num_parameters == whole.num_parameters
    assert facts.num_bytes / whole.num_bytes == pytest.approx(share, abs=0.05)
    assert facts.as_details() == {
        "parent_model": "",
        "format": "gguf",
        "family": "llama",
        "families": ["llama"],
        "parameter_size": "14.16M",
        "quantization_level": kind,
    }


def test_model_facts_list_the_quantisation_applied_at_load() -> None:
    assert ModelFacts.read(EngineConfig(model="mini", quantization="int8")).quantization == "int8"


def test_model_facts_with_settings_the_model_does_not_allow_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="made for 2048 tokens"):
        ModelFacts.read(EngineConfig(model="mini", max_model_len=4096))
    (tmp_path / "config.json").write_text("{}", encoding="utf-8")
    with pytest.raises(CheckpointError):
        ModelFacts.read(EngineConfig(model=str(tmp_path)))


def test_template_facts_list_source_and_variables(mini_dir: Path, tmp_path: Path) -> None:
    source, variables = template_facts(Tokenizer.open(mini_dir))
    assert ("messages" in source, variables) == (True, ())
    thinking = write_tool_model(mini_dir, tmp_path / "model", "{{ messages }}{{ tools }}{% if enable_thinking %}…{% endif %}")
    assert template_facts(Tokenizer.open(thinking))[1] == ("tools", "enable_thinking")


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("300", 300),
        (300, 300),
        ("5m", 300),
        ("1h30m", 5400),
        ("1.5h", 5400),
        ("300ms", 0.3),
        ("0", 0),
        (0, 0),
        (-1, math.inf),
        ("-5m", math.inf),
    ],
)
def test_durations_are_parsed_as_in_ollama(text: str | float, seconds: float) -> None:
    assert seconds_of(text) == pytest.approx(seconds)


@pytest.mark.parametrize("text", ["", "soon", "5 m", "5m!", "m", "nan"])
def test_invalid_duration_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="use a time such as 10m"):
        ServerSettings(unload_after=text)


def test_http_loaded_adapters_with_unload_after_are_refused() -> None:
    with pytest.raises(ConfigError, match="would be lost"):
        ServerSettings(unload_after="10m", adapter_loading=True, api_keys=("a-key-of-this-test",))
