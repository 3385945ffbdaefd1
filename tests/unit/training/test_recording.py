"""Recorded features are those of the engine's own passes, and an interrupted recording goes on."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from harness.quick_profiles import quick_profiles
from harness.training_runs import NUM_HELDOUT, NUM_PROMPTS, TinyRun, record_tiny
from paceline.errors import ConfigError
from paceline.models.checkpoint import read_model_config
from paceline.training import recording
from paceline.training.recording import record
from paceline.training.run import DATA_FOLDER


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> TinyRun:
    return record_tiny(tmp_path_factory.mktemp("recorded"))


def test_recorded_features_equal_hidden_states_of_transformers(run: TinyRun) -> None:
    data, config = run.data.train.open(), read_model_config(Path(run.settings.model))
    model = AutoModelForCausalLM.from_pretrained(run.settings.model, dtype=torch.float32)
    for index in range(3):
        with torch.no_grad():
            states = model(torch.from_numpy(data.token_ids[index])[None].long(), output_hidden_states=True).hidden_states
        boundaries = run.settings.boundaries or ()
        assert boundaries[-1] < config.num_layers  # the last of transformers' states is after the norm
        expected = torch.cat([*(states[boundary][0] for boundary in boundaries), states[-1][0]], -1)
        found = data.features(index).float()
        torch.testing.assert_close(found[:-1], expected[:-1], rtol=2**-7, atol=1e-4)
        assert not found[-1].any()


def test_recorded_answers_are_generated_by_the_target(run: TinyRun) -> None:
    data, model = run.data.heldout.open(), AutoModelForCausalLM.from_pretrained(run.settings.model, dtype=torch.float32)
    ids, mask = data.token_ids[0], data.is_answer[0].astype(bool)
    assert mask.any()
    assert mask.tolist() == sorted(mask.tolist())  # the prompt, then the answer
    with torch.no_grad():
        best = model(torch.from_numpy(ids)[None].long()).logits[0].argmax(-1).numpy()
    np.testing.assert_array_equal(best[np.flatnonzero(mask) - 1], ids[mask])


def test_interrupted_training_recording_continues(run: TinyRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config, calls = read_model_config(Path(run.settings.model)), []
    answers = recording._AnswerRecorder.answers
    monkeypatch.setattr(recording, "batch_size", lambda _: 8)
    monkeypatch.setattr(recording, "_SHARD_BYTES", 1)

    def interrupted(*given: object, **options: object) -> object:
        calls.append(options)
        if len(calls) == 4:  # the trial, the held-out answers, one shard, then this
            raise KeyboardInterrupt
        return answers(*given, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(recording._AnswerRecorder, "answers", interrupted)
    with quick_profiles(), pytest.raises(KeyboardInterrupt):
        record(run.settings, config, tmp_path / DATA_FOLDER, lambda text: None)
    with quick_profiles():
        found = record(run.settings, config, tmp_path / DATA_FOLDER, lambda text: None)
    assert len(found.train.shards) > 1
    assert (found.train.num_prompts, found.heldout.num_prompts) == (NUM_PROMPTS, NUM_HELDOUT)
    before, after = run.data.train.open(), found.train.open()
    assert len(before) == len(after)
    for index in range(len(before)):  # the same, bit for bit, whatever ran together
        np.testing.assert_array_equal(before.token_ids[index], after.token_ids[index])
        assert torch.equal(before.features(index), after.features(index))


def test_estimate_of_the_disk_leaves_out_looping_answers(run: TinyRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config, lines = read_model_config(Path(run.settings.model)), list[str]()
    monkeypatch.setattr(recording, "repeat_share", lambda outputs: 2.0 * (outputs[0][-1] % 2))
    with quick_profiles():
        found = record(run.settings, config, tmp_path / DATA_FOLDER, lines.append)
    counts = found.train.counts
    assert counts["left_out"] > 0
    assert f"about {counts['tokens']:,} tokens" in next(line for line in lines if line.startswith("recording"))  # all fit into the trial


def test_training_data_recorded_with_other_settings_are_refused(run: TinyRun, tmp_path: Path) -> None:
    config = read_model_config(Path(run.settings.model))
    with pytest.raises(ConfigError, match="recorded with other settings \\(max_answer_tokens\\)"):
        record(replace(run.settings, max_answer_tokens=30), config, run.directory / DATA_FOLDER, lambda text: None)
