"""Training runs on a tiny random target: recorded once, then trained in a few steps in float32."""

import json
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from harness.checkpoints import VOCAB_SIZE, write_checkpoint
from harness.quick_profiles import quick_profiles
from paceline.models.checkpoint import open_weights, read_model_config
from paceline.training.drafter import TargetMatrices, TrainableDrafter
from paceline.training.recording import Data, record
from paceline.training.run import DATA_FOLDER, make_drafter
from paceline.training.settings import TrainSettings
from paceline.training.trainer import Trainer

WORDS = ("the", "cat", "dog", "bird", "sat", "ran", "flew", "on", "under", "mat", "tree", "house", "red", "blue")
NUM_PROMPTS, NUM_HELDOUT = 24, 4


@dataclass(frozen=True)
class TinyRun:
    """A target with recorded answers.

    Attributes:
        directory: of the run.
    """

    settings: TrainSettings
    directory: Path
    data: Data

    def make_trainer(self, drafter: str = "eagle3", *, seed: int = 0, loss: str = "soft", steps: int = 12) -> Trainer:
        """Return a trainer at its first step."""
        settings = replace(self.settings, drafter=drafter, seed=seed, loss=loss, steps=steps)
        made = self.make_drafter(settings)
        return Trainer(made, self.data.train.open(), self.data.heldout.open(), settings, self.directory, lambda text: None)

    def make_drafter(self, settings: TrainSettings) -> TrainableDrafter:
        """Return a drafter with its start values, which computes in float32."""
        torch.set_num_threads(1)  # tiny products
        config = read_model_config(Path(settings.model))
        drafter = make_drafter(settings, TargetMatrices(config, open_weights(Path(settings.model), config)), self.data, lambda text: None)
        drafter.dtype = torch.float32
        return drafter


def write_prompts(path: Path, count: int = NUM_PROMPTS) -> Path:
    """Write prompts of a few words each, as JSON lines."""
    prompts = [" ".join(WORDS[(5 * index + 3 * step) % len(WORDS)] for step in range(3 + index % 4)) for index in range(count)]
    path.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in prompts), encoding="utf-8")
    return path


def record_tiny(folder: Path, family: str = "llama", **values: object) -> TinyRun:
    """Let a tiny random target answer a few prompts."""
    target = write_checkpoint(folder / "target", family)
    directory = folder / "run"
    directory.mkdir()
    given = {
        "drafter": "eagle3", "model": str(target), "data": (str(write_prompts(folder / "prompts.jsonl")),),
        "eval_data": (str(write_prompts(folder / "heldout.jsonl", NUM_HELDOUT)),), "max_prompt_tokens": 32,
        "max_answer_tokens": 24, "max_repeat_share": 1.0, "draft_vocab_size": VOCAB_SIZE - 20, "batch_tokens": 200, "threads": 1,
        "block_size": 4, "markov_rank": 8, "temperatures": (0.0, 0.8), "num_heads": 2, **values,
    }  # fmt: skip
    config = read_model_config(target)
    settings = TrainSettings(**given).for_target(config)  # type: ignore[arg-type]
    with quick_profiles():
        return TinyRun(settings, directory, record(settings, config, directory / DATA_FOLDER, lambda text: None))
