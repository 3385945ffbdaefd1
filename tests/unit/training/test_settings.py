"""Settings of a run: defaults for a target, what is refused, and the file they are kept in."""

from dataclasses import replace
from pathlib import Path

import pytest

from harness.model_configs import make_config
from paceline.errors import ConfigError
from paceline.models.config import WeightType
from paceline.models.rope_config import RopeConfig
from paceline.training.settings import TrainSettings

TARGET = make_config(
    family="llama", vocab_size=50_000, hidden_size=32, intermediate_size=64, num_layers=30, num_heads=4, num_kv_heads=2, head_size=8,
    norm_eps=1e-5, max_positions=512, rope=RopeConfig(theta=5e5), weight_type=WeightType.F32,
)  # fmt: skip


def test_training_defaults_depend_on_the_target() -> None:
    found = TrainSettings(drafter="eagle3").for_target(TARGET)
    assert (found.boundaries, found.draft_vocab_size, found.learning_rate, found.num_layers) == ((2, 15, 27), 16384, 1.2e-3, 2)
    model = TrainSettings(drafter="draft-model").for_target(TARGET)
    assert (model.boundaries, model.num_layers) == ((), 4)
    assert model.for_target(TARGET) == model  # a resumed run has no boundaries
    assert TrainSettings(drafter="draft-model").for_target(replace(TARGET, layers=TARGET.layers[:6])).num_layers == 3


def test_training_settings_file_round_trip(tmp_path: Path) -> None:
    settings = TrainSettings(drafter="dspark", data=("a.jsonl",), boundaries=(1, 4), minutes=2.5)
    settings.write(tmp_path)
    assert TrainSettings.read(tmp_path) == settings


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"drafter": "hydra"}, "use one of eagle3, dspark, dflash, medusa, draft-model"),
        ({"loss": "both"}, "use one of soft, hard"),
        ({"answers": "keep"}, "there is no data"),
        ({"minutes": 0}, "minutes is 0: use 0.001 to"),
        ({"steps": 0}, "steps is 0: use 1 to"),
        ({"temperatures": (-1.0,)}, "temperatures is -1.0: use 0 to 2"),
        ({"block_size": 1}, "block_size is 1: use 2 to"),
    ],
)
def test_training_settings_out_of_range_are_refused(values: dict[str, object], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        TrainSettings(**{"drafter": "eagle3", **values})  # type: ignore[arg-type]


@pytest.mark.parametrize("boundaries", [(3, 2), (2, 2), (2, 31), ()])
def test_impossible_training_boundaries_are_refused(boundaries: tuple[int, ...]) -> None:
    with pytest.raises(ConfigError, match="boundaries is"):
        TrainSettings(drafter="eagle3", boundaries=boundaries).for_target(TARGET)


def test_resume_without_a_started_training_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nothing to resume"):
        TrainSettings.read(tmp_path)
