"""A whole run: from prompts to a measured drafter with its card, interrupted and resumed."""

import json
import shutil
import signal
import xml.etree.ElementTree as ET
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from harness.checkpoints import write_checkpoint
from harness.quick_profiles import quick_profiles
from harness.training_runs import write_prompts
from paceline.cli import app
from paceline.drafters import prepare_drafter
from paceline.errors import CapacityError, ConfigError, PacelineError
from paceline.training import run as running
from paceline.training.prompts import read_records
from paceline.training.run import train
from paceline.training.settings import TrainSettings


@pytest.mark.parametrize(("drafter", "name"), [("eagle3", "eagle3"), ("draft-model", "draft_model")])
def test_train_writes_a_measured_drafter_and_resumes_after_a_stop(
    drafter: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, output = write_checkpoint(tmp_path / "target", "llama"), tmp_path / "drafter"
    settings = TrainSettings(
        drafter=drafter, model=str(target), data=(str(write_prompts(tmp_path / "prompts.jsonl", 12)),),
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
    prepared = prepare_drafter(str(output), target)
    assert prepared is not None
    assert prepared.name == name
    found = json.loads((output / "results.json").read_text(encoding="utf-8"))
    assert found["facts"]["steps"] == 8  # the settings of the directory, not those given
    assert found["served"]["are_texts_equal"] is True
    assert {row["drafter"] for row in found["served"]["speeds"]} == {"plain", "ngram", "suffix", name, f"suffix+{name}"}
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
        (["hydra", "--output", "x"], "use one of eagle3, dspark, dflash, medusa, draft-model"),
        (["eagle3", "--output", "x", "--temperatures", "hot"], "use numbers with commas"),
        (["eagle3", "--output", "x", "--resume", "--steps", "3"], "leave out --steps"),
        (["eagle3", "--output", "x", "--resume"], "nothing to resume"),
        (["eagle3", "--output", "x", "--minutes", "inf"], "minutes is inf: use 0.001 to 1,000,000"),
        (["eagle3", "--output", "x", "--learning-rate", "nan"], "learning_rate is nan"),
        (["eagle3", "--output", "x", "--temperatures", "0,-1"], "temperatures is -1.0: use 0 to 2"),
        (["dspark", "--output", "x", "--markov-rank", "0"], "markov_rank is 0"),
        (["eagle3", "--output", "x", "--seed", "-1"], "seed is -1"),
        (["eagle3", "--output", "x", "--device", "tpu"], "device is 'tpu': use one of auto, cpu, cuda"),
    ],
)
def test_train_usage_error_exits_with_2(arguments: list[str], text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(app, ["train", *arguments])
    assert result.exit_code == 2
    assert text in result.output
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize("is_started", [False, True])
def test_interrupted_training_names_resume_once_it_has_settings(is_started: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(settings: TrainSettings, directory: Path, *_: object, **__: object) -> bool:
        if is_started:
            settings.write(directory)
        raise KeyboardInterrupt

    monkeypatch.setattr(running, "train", interrupted)
    result = CliRunner().invoke(app, ["train", "eagle3", "--output", str(tmp_path)])
    assert (result.exit_code, "--resume goes on" in result.output) == (130, is_started)


def test_resuming_training_with_another_method_is_refused(tmp_path: Path) -> None:
    TrainSettings(drafter="medusa").write(tmp_path)
    with pytest.raises(ConfigError, match="holds a run of medusa, not eagle3"):
        train(TrainSettings(drafter="eagle3"), tmp_path, print, is_resumed=True)


DAMAGED_SETTINGS = ['{"drafter": "eagle3", "num_prompts": "many"}', "{}", '{"drafter": "eagle3", "colour": 1}', "[1]", "{"]


@pytest.mark.parametrize("content", DAMAGED_SETTINGS)
def test_damaged_settings_of_a_training_run_are_refused(content: str, tmp_path: Path) -> None:
    (tmp_path / "train.json").write_text(content, encoding="utf-8")
    with pytest.raises(PacelineError):
        train(TrainSettings(drafter="eagle3"), tmp_path, print, is_resumed=True)


def test_training_without_readable_data_can_be_started_again(tmp_path: Path) -> None:
    target, output, data = write_checkpoint(tmp_path / "target", "llama"), tmp_path / "drafter", tmp_path / "prompts.txt"
    data.touch()
    for _ in range(2):
        with pytest.raises(ConfigError, match="holds no usable prompt"):
            train(TrainSettings(drafter="eagle3", model=str(target), data=(str(data),)), output, print)
    with pytest.raises(ConfigError, match="nothing to resume"):
        train(TrainSettings(drafter="eagle3"), output, print, is_resumed=True)


def test_draft_model_refusal_names_each_value_that_differs(tmp_path: Path) -> None:
    rope = {f"{kind}_attention": {"rope_type": "default", "rope_theta": theta} for kind, theta in (("full", 1e6), ("sliding", 1e4))}
    layer_types = ["sliding_attention", "full_attention"]
    target = write_checkpoint(tmp_path / "target", "gemma3_text", num_hidden_layers=2, layer_types=layer_types, rope_parameters=rope)
    with pytest.raises(ConfigError, match=r"norm_order = sandwich, rope\.theta = 10000\.0, scale = 0\.0625, activation = gelu_tanh: train"):
        train(TrainSettings(drafter="draft-model", model=str(target)), tmp_path / "drafter", print)


def test_training_output_path_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="is a file: give a directory"):
        train(TrainSettings(drafter="eagle3"), tmp_path / "file", print)


def test_output_that_holds_another_model_is_refused(tmp_path: Path) -> None:
    target = write_checkpoint(tmp_path / "target", "llama")
    before = {file: file.read_bytes() for file in target.iterdir()}
    with pytest.raises(ConfigError, match="holds another model, which would be overwritten"):
        train(TrainSettings(drafter="draft-model", model=str(target)), target, print)
    assert {file: file.read_bytes() for file in target.iterdir()} == before


def _flip_a_token(path: Path) -> None:
    tensors = load_file(path)
    tensors["token_ids"][0] += 1
    save_file(tensors, path)


DAMAGES: dict[str, tuple[str, Callable[[Path], object], str]] = {
    "no shard": ("data/train-0000.safetensors", Path.unlink, "train-0000.safetensors is damaged"),
    "half a shard": ("data/train-0000.safetensors", lambda path: path.write_bytes(path.read_bytes()[:200]), "is damaged .*record the data"),
    "another shard": ("data/train-0000.safetensors", _flip_a_token, "holds other sequences than were recorded"),
    "broken prompts": ("data/prompts.json", lambda path: path.write_text("[[1"), "prompts.json is damaged"),
    "other prompts": ("data/prompts.json", lambda path: path.write_text('[[{"a": 1}], []]'), "prompts.json is damaged"),
    "broken manifest": ("data/train-manifest.json", lambda path: path.write_text("{"), "manifest.json is damaged"),
    "empty manifest": ("data/train-manifest.json", lambda path: path.write_text("{}"), "manifest.json is damaged"),
    "empty checkpoint": ("checkpoint.pt", lambda path: path.write_bytes(b""), "checkpoint.pt cannot be continued"),
    "no checkpoint": ("checkpoint.pt", lambda path: path.write_bytes(b"0" * 999), "checkpoint.pt cannot be continued"),
    "broken settings": ("train.json", lambda path: path.write_text("{"), "start again with another --output"),
}


@pytest.fixture(scope="module")
def finished_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    settings = TrainSettings(
        drafter="medusa", model=str(write_checkpoint(folder / "target", "llama")), draft_vocab_size=64, batch_tokens=100, threads=1,
        steps=2, data=(str(write_prompts(folder / "prompts.jsonl", 12)),), max_prompt_tokens=32, max_answer_tokens=16, max_repeat_share=1.0,
    )  # fmt: skip
    with quick_profiles(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(running, "measure", lambda *_: {"speeds": [], "fixed": {}, "are_texts_equal": None, "num_looping": 0})
        assert train(settings, folder / "drafter", lambda _: None)
    return folder / "drafter"


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_file_of_a_run_is_named_on_resume(damage: str, finished_run: Path, tmp_path: Path) -> None:
    name, change, text = DAMAGES[damage]
    output = Path(shutil.copytree(finished_run, tmp_path / "drafter"))
    change(output / name)
    with quick_profiles(), pytest.raises(PacelineError, match=text):
        train(TrainSettings(drafter="medusa"), output, lambda _: None, is_resumed=True)


def test_file_of_a_run_that_cannot_be_written_is_named_and_keeps_its_content(
    finished_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = Path(shutil.copytree(finished_run, tmp_path / "drafter"))
    before = (output / "model.safetensors").read_bytes()

    def fill_disk(tensors: object, path: Path, **_: object) -> None:
        path.write_bytes(b"part")
        raise SafetensorError("I/O error: No space left on device (os error 28)")

    monkeypatch.setattr(running, "save_file", fill_disk)
    with quick_profiles(), pytest.raises(CapacityError, match=r"model\.safetensors cannot be written"):
        train(TrainSettings(drafter="medusa"), output, lambda _: None, is_resumed=True)
    assert ((output / "model.safetensors").read_bytes(), [*output.glob("*.new")]) == (before, [])


def test_training_output_that_cannot_be_created_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    target = write_checkpoint(tmp_path / "target", "llama")
    with pytest.raises(ConfigError, match=r"cannot be written .*give another --output"):
        train(TrainSettings(drafter="eagle3", model=str(target)), tmp_path / "file" / "drafter", print)


@pytest.mark.parametrize("name", ["prompts.JSONL", "prompts.ndjson"])
def test_json_lines_are_known_by_their_endings_and_may_hold_line_separators(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_text('\ufeff{"prompt": "a\u2028b"}\n\n{"prompt": "c"}\n', encoding="utf-8")
    assert [record["prompt"] for record in read_records(path)] == ["a\u2028b", "c"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_training_is_asked_to_stop_by_a_signal_once(number: signal.Signals) -> None:
    before = signal.signal(number, signal.SIG_IGN)
    try:
        with running._stop_flag() as is_stopped:
            assert not is_stopped()
            signal.raise_signal(number)
            assert is_stopped()
            assert signal.getsignal(number) is signal.SIG_IGN
        assert signal.getsignal(number) is signal.SIG_IGN
    finally:
        signal.signal(number, before)
