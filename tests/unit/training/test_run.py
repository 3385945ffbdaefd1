"""A whole run: from prompts to a measured drafter with its card, interrupted and resumed."""

import json
import xml.etree.ElementTree as ET
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from harness.checkpoints import write_checkpoint
from harness.quick_profiles import quick_profiles
from harness.training_runs import write_prompts
from paceline.cli import app
from paceline.drafters import open_head_files
from paceline.errors import ConfigError
from paceline.training import run as running
from paceline.training.run import train
from paceline.training.settings import TrainSettings


def test_run_leaves_a_measured_drafter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target, output = write_checkpoint(tmp_path / "target", "llama"), tmp_path / "drafter"
    settings = TrainSettings(
        drafter="eagle3", model=str(target), data=(str(write_prompts(tmp_path / "prompts.jsonl", 12)),),
        eval_data=(str(write_prompts(tmp_path / "heldout.jsonl", 2)),), max_prompt_tokens=32, max_answer_tokens=16, max_repeat_share=1.0,
        draft_vocab_size=64, batch_tokens=100, threads=1, steps=8, command="the command",
    )  # fmt: skip
    lines: list[str] = []
    with quick_profiles(), monkeypatch.context() as patch:
        trainer_run = running.Trainer.run
        patch.setattr(running.Trainer, "run", lambda self, is_stopped: trainer_run(self, lambda: self.progress.step == 3))
        assert not train(settings, output, lines.append)
    assert not (output / "model.safetensors").exists()
    with pytest.raises(ConfigError, match="continue it with --resume"):
        train(settings, output, lines.append)
    with quick_profiles():
        assert train(replace(settings, steps=99, command="another"), output, lines.append, is_resumed=True)
    head = open_head_files(output)
    assert head is not None
    assert head.kind.value == "eagle3"
    found = json.loads((output / "results.json").read_text(encoding="utf-8"))
    assert found["facts"]["steps"] == 8  # the settings of the directory, not those given
    assert found["served"]["are_texts_equal"] is True
    assert {row["drafter"] for row in found["served"]["speeds"]} == {"plain", "ngram", "suffix", "eagle3", "ngram+eagle3"}
    assert found["served"]["fixed"]["all"] >= 1.0
    assert len(found["data"]["sha256"]["train"]) == 64
    card = (output / "README.md").read_text(encoding="utf-8")
    assert "the command" in card
    assert "equal those of plain decoding" in card
    ET.parse(output / "training.svg")
    assert any("about" in line and "GB" in line for line in lines)  # the estimate


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["hydra", "--output", "x"], "use one of eagle3, dspark, dflash, medusa"),
        (["eagle3", "--output", "x", "--temperatures", "hot"], "use numbers with commas"),
        (["eagle3", "--output", "x", "--resume", "--steps", "3"], "leave out --steps"),
        (["eagle3", "--output", "x", "--resume"], "nothing to resume"),
    ],
)
def test_wrong_use_is_one_line(arguments: list[str], text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(app, ["train", *arguments])
    assert result.exit_code == 2
    assert text in result.output
    assert not (tmp_path / "x").exists()
