"""Settings of a training run, kept as `train.json` in its directory."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from paceline.errors import CheckpointError, ConfigError
from paceline.models.config import ModelConfig
from paceline.small_files import read_json
from paceline.training.saving import save_text

DRAFT_MODEL = "draft-model"
METHODS = ("eagle3", "dspark", "dflash", "medusa", DRAFT_MODEL)
ANSWERS = ("target", "keep")
LOSSES = ("soft", "hard")
DEVICES = ("auto", "cpu", "cuda")
SETTINGS_FILE = "train.json"
_RANGES: Mapping[str, tuple[float, float]] = {
    "num_prompts": (8, 10**8), "self_prompts": (0, 10**8), "num_eval_prompts": (1, 10**6), "max_prompt_tokens": (8, 2**20),
    "max_answer_tokens": (8, 2**20), "temperatures": (0, 2), "max_repeat_share": (0, 1), "num_layers": (1, 64),
    "block_size": (2, 64), "markov_rank": (1, 4096), "num_heads": (1, 16), "ttt_steps": (1, 16), "learning_rate": (1e-8, 1),
    "batch_tokens": (16, 2**20), "minutes": (0.001, 10**6), "steps": (1, 10**9), "seed": (0, 2**63 - 1), "threads": (1, 4096),
    "tree_width": (1, 8),
}  # fmt: skip
_DATA_NAMES = (
    "model", "gguf_file", "data", "eval_data", "answers", "num_prompts", "self_prompts", "num_eval_prompts", "max_prompt_tokens",
    "max_answer_tokens", "temperatures", "max_repeat_share", "boundaries", "seed",
)  # fmt: skip
"""Settings that decide what is recorded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainSettings:
    """What is trained, on which data, for how long.

    Attributes:
        drafter: one of `METHODS`.
        model: the target: a directory, a GGUF file, "mini" or a Hugging Face id.
        data: files of prompts, conversations or texts; none = the target writes its own user turns.
        eval_data: files of held-out prompts; none = a share of the training prompts.
        answers: "target": it answers the prompts itself; "keep": the answers in the files.
        num_prompts: most training prompts in all.
        self_prompts: user turns that the target writes; None = all without `data`, else none.
        num_eval_prompts: held-out prompts of each file.
        max_prompt_tokens, max_answer_tokens: longer prompts are left out, longer answers are cut.
        temperatures: of the target's answers, in turns.
        max_repeat_share: answers with a larger share of repeated 8-grams are left out.
        boundaries: layer boundaries of the target that are recorded; None = 2, L / 2 and L - 3, of a draft model none.
        num_layers: decoder layers of a block drafter or a draft model; None = 2, of a draft model 4, at most half of the target's.
        draft_vocab_size: ids that can be drafted; None = by the size of the target's vocabulary.
        block_size: rows of a block.
        markov_rank: of the bias of dspark.
        num_heads: heads of medusa.
        ttt_steps: steps of training-time test (eagle3): the head reads its own outputs in all but the first.
        loss: "soft": cross-entropy with the target's distribution; "hard": with the tokens of the text.
        learning_rate: highest; None = by the method.
        batch_tokens: answer positions of a step.
        minutes: of training, without the recording of data; the learning rate reaches zero at its end.
        steps: train for so many steps instead of `minutes`.
        seed: of prompts, answers and the order of the data.
        threads: CPU threads; None = all processors.
        device: "auto", "cpu" or "cuda"; where the drafter is trained.
        tree_width: of the drafter in the evaluation.
        command: the command line, for the card.

    Raises:
        ConfigError: a value is out of range.
    """

    drafter: str
    model: str = "mini"
    gguf_file: str | None = None
    data: tuple[str, ...] = ()
    eval_data: tuple[str, ...] = ()
    answers: str = "target"
    num_prompts: int = 4000
    self_prompts: int | None = None
    num_eval_prompts: int = 16
    max_prompt_tokens: int = 256
    max_answer_tokens: int = 192
    temperatures: tuple[float, ...] = (0.0, 0.0, 0.7)
    max_repeat_share: float = 0.3
    boundaries: tuple[int, ...] | None = None
    num_layers: int | None = None
    draft_vocab_size: int | None = None
    block_size: int = 7
    markov_rank: int = 96
    num_heads: int = 4
    ttt_steps: int = 3
    loss: str = "soft"
    learning_rate: float | None = None
    batch_tokens: int = 1536
    minutes: float = 30.0
    steps: int | None = None
    seed: int = 0
    threads: int | None = None
    device: str = "auto"
    tree_width: int = 1
    command: str = ""

    def __post_init__(self) -> None:
        for name, known in (("drafter", METHODS), ("answers", ANSWERS), ("loss", LOSSES), ("device", DEVICES)):
            if getattr(self, name) not in known:
                raise ConfigError(f"{name} is {getattr(self, name)!r}: use one of {', '.join(known)}")
        for name, (lowest, highest) in _RANGES.items():
            value = getattr(self, name)
            for number in value if isinstance(value, tuple) else () if value is None else (value,):
                if not lowest <= number <= highest:
                    raise ConfigError(f"{name} is {number}: use {lowest:,} to {highest:,}")
        if not self.temperatures:
            raise ConfigError("temperatures is empty: give one or more")
        if self.answers == "keep" and not self.data:
            raise ConfigError("answers is 'keep' and there is no data: give files with answers, or let the target answer")

    @property
    def data_facts(self) -> dict[str, Any]:
        """Return the settings that decide what is recorded."""
        values = asdict(self)
        return json.loads(json.dumps({name: values[name] for name in _DATA_NAMES}))  # type: ignore[no-any-return]

    @property
    def max_tokens(self) -> int:
        """Longest sequence of tokens in the data."""
        return self.max_prompt_tokens + self.max_answer_tokens

    def for_target(self, target: ModelConfig) -> "TrainSettings":
        """Return the settings with the defaults for a target.

        Raises:
            ConfigError: the target has no such boundaries.
        """
        count, is_model = target.num_layers, self.drafter == DRAFT_MODEL
        usual = [] if is_model else sorted({min(2, count), count // 2, max(count - 3, 1)})
        chosen = usual if self.boundaries is None else list(self.boundaries)
        if sorted(set(chosen)) != chosen or (not chosen and not is_model) or any(not 0 <= one <= count for one in chosen):
            raise ConfigError(f"boundaries is {chosen}: give ascending ones from 0 to {count}, the number of the target's layers")
        size = self.draft_vocab_size
        size = min(target.vocab_size, 16384 if target.hidden_size < 1536 else 32768) if size is None else size
        if not 1 <= size <= target.vocab_size:
            raise ConfigError(f"draft_vocab_size is {size}: use 1 to {target.vocab_size}, the size of the target's vocabulary")
        num_layers = self.num_layers or (min(4, max(1, count // 2)) if is_model else 2)
        rate = self.learning_rate
        if rate is None:
            rate = 1.2e-3 if target.hidden_size < 1536 else 3e-4
        return replace(self, boundaries=tuple(chosen), num_layers=num_layers, draft_vocab_size=size, learning_rate=rate)

    def write(self, directory: Path) -> None:
        """Write them to `train.json`."""
        save_text(directory / SETTINGS_FILE, json.dumps(asdict(self), indent=1) + "\n")

    @classmethod
    def read(cls, directory: Path) -> "TrainSettings":
        """Read them from `train.json`.

        Raises:
            ConfigError: there is none, it is not ours, or a value is out of range.
        """
        try:
            found = read_json(directory / SETTINGS_FILE)
        except CheckpointError as error:
            raise ConfigError(f"{directory / SETTINGS_FILE} is damaged: start again with another --output") from error
        if found is None:
            raise ConfigError(f"{directory} holds no {SETTINGS_FILE}: nothing to resume; leave out --resume to begin")
        known = {one.name for one in fields(cls)}
        if unknown := sorted(set(found) - known):
            raise ConfigError(f"unknown settings {', '.join(unknown)}: known are {', '.join(sorted(known))}")
        given: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in found.items()}
        try:
            return cls(**given)
        except TypeError as error:  # a value of another type, or none for a setting without a default
            raise ConfigError(f"settings of a training run cannot be read: {error}") from error
