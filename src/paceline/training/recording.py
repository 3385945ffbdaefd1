"""Records the target's answers and hidden states, shard by shard; an interrupted recording goes on after its last shard."""

import json
import shutil
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from paceline.engine.loader import LoadedEngine
from paceline.errors import CapacityError, ConfigError
from paceline.models.config import ModelConfig
from paceline.repeats import repeat_share
from paceline.sampling.params import SamplingParams
from paceline.training.memory import MemoryWatch
from paceline.training.prompts import PrintLine, Prompt, read_prompts, write_own_prompts
from paceline.training.recorder import FeatureRecorder, batch_size, open_recorder, run
from paceline.training.saving import save_text, write_errors
from paceline.training.settings import TrainSettings
from paceline.training.shards import Recorded, ShardStore, damaged_data

PROMPTS_FILE = "prompts.json"
_SHARD_BYTES = 192 << 20
_HELDOUT_SHARE = 0.05
_MAX_HELDOUT = 64
_SPARE_BYTES = 1 << 30


@dataclass(frozen=True, slots=True)
class Data:
    """The recorded data of a run."""

    train: ShardStore
    heldout: ShardStore
    heldout_prompts: Sequence[Prompt]


def record(settings: TrainSettings, target: ModelConfig, directory: Path, print_line: PrintLine) -> Data:
    """Record what is missing of a run's data in `directory`.

    Raises:
        ConfigError: there is nothing to record, or the directory holds other data.
        CapacityError: the disk has no room for it.
        PacelineError: the target cannot be loaded.
    """
    facts = settings.data_facts
    train, heldout = ShardStore(directory, "train", facts), ShardStore(directory, "heldout", facts)
    kept = _read_kept_prompts(directory)
    if kept is None or train.num_prompts < len(kept[0]) or heldout.num_prompts < len(kept[1]):
        loaded, features = open_recorder(settings, settings.boundaries or (), target.hidden_size)
        if kept is None:
            kept = _choose_prompts(loaded, settings, print_line)
            with write_errors(directory):
                directory.mkdir(parents=True, exist_ok=True)
            save_text(directory / PROMPTS_FILE, json.dumps([[asdict(one) for one in part] for part in kept]))
        recorder = _AnswerRecorder(loaded, features, settings, print_line)
        recorder.print_estimate(kept[0][train.num_prompts :], directory)
        with MemoryWatch() as watch:
            recorder.fill(heldout, kept[1], (0.0,))
            recorder.fill(train, kept[0], settings.temperatures)
        print_line(f"peak while recording: {watch.peak_bytes / 1e9:.1f} GB of memory")
    counts = train.counts
    print_line(
        f"data: {counts['sequences']:,} sequences, {counts['tokens']:,} tokens, {counts['answer_tokens']:,} of answers, "
        f"{counts['bytes'] / 1e9:.2f} GB; {counts['left_out']} looping answers left out"
    )
    if not counts["answer_tokens"]:
        raise ConfigError(f"{directory} holds no answer to train with: give more or other --data")
    return Data(train, heldout, kept[1])


def _choose_prompts(loaded: LoadedEngine, settings: TrainSettings, print_line: PrintLine) -> tuple[list[Prompt], list[Prompt]]:
    """Return the prompts to train with and those held out."""
    num_own = settings.self_prompts if settings.self_prompts is not None else 0 if settings.data else settings.num_prompts
    num_own = min(num_own, settings.num_prompts)
    own: list[Prompt] = []
    if num_own:
        start = time.monotonic()
        own = write_own_prompts(loaded, settings, num_own, print_line)
        print_line(f"prompts: the target wrote {len(own)} in {time.monotonic() - start:.0f} s")
    given = read_prompts(settings.data, loaded, settings, most=settings.num_prompts - len(own))
    prompts = _merge(own, given)
    if settings.eval_data:
        heldout = [one for name in settings.eval_data for one in read_prompts([name], loaded, settings, most=settings.num_eval_prompts)]
    else:
        count = max(1, min(_MAX_HELDOUT, int(_HELDOUT_SHARE * len(prompts))))
        prompts, heldout = prompts[count:], prompts[:count]
    if not prompts:
        raise ConfigError("there is no prompt to train with: give more --data, or more --self-prompts")
    return prompts, heldout


def _merge(first: Sequence[Prompt], second: Sequence[Prompt]) -> list[Prompt]:
    """Mix two lists evenly, so that each part of the data holds both."""
    keyed = [((index + 0.5) / len(part), number, one) for number, part in enumerate((first, second)) for index, one in enumerate(part)]
    return [one for _, _, one in sorted(keyed, key=lambda item: item[:2])]


def _read_kept_prompts(directory: Path) -> tuple[list[Prompt], list[Prompt]] | None:
    path = directory / PROMPTS_FILE
    if not path.is_file():
        return None
    try:
        train, heldout = json.loads(path.read_text(encoding="utf-8"))
        return [Prompt(**one) for one in train], [Prompt(**one) for one in heldout]
    except (OSError, ValueError, TypeError) as error:
        raise damaged_data(path, error) from error


@dataclass(frozen=True, slots=True)
class _AnswerRecorder:
    """Lets the target answer prompts, and records the answers with their features."""

    loaded: LoadedEngine
    features: FeatureRecorder
    settings: TrainSettings
    print_line: PrintLine

    def print_estimate(self, prompts: Sequence[Prompt], directory: Path) -> None:
        """Record a few answers, and print the time, disk space and memory that all of them will take."""
        count = max(2 * batch_size(self.settings), len(prompts) // 32)
        trial = prompts[:: max(1, len(prompts) // count)][:count]
        if not trial:
            return
        start = time.monotonic()
        with MemoryWatch() as watch:
            sequences = self.usable(self.answers(trial, self.settings.temperatures, first=0))
        seconds = (time.monotonic() - start) / len(trial) * len(prompts)
        num_tokens = sum(len(one.token_ids) for one in sequences) / len(trial) * len(prompts)
        size = int(num_tokens * self.features.width * 2)
        num_held = min(self.answers_per_shard(), len(prompts))
        memory = watch.peak_bytes + max(0, num_held - len(trial)) * size // len(prompts)  # the rest of a full shard
        free = shutil.disk_usage(directory).free
        self.print_line(
            f"recording {len(prompts):,} answers: about {num_tokens:,.0f} tokens, {size / 1e9:.2f} GB in {directory}, "
            f"{memory / 1e9:.1f} GB of memory, {seconds / 60:.1f} minutes"
        )
        if size + _SPARE_BYTES > free:
            raise CapacityError(f"{directory} has {free / 1e9:.1f} GB free and {size / 1e9:.1f} GB are needed: give less --num-prompts")

    def fill(self, store: ShardStore, prompts: Sequence[Prompt], temperatures: Sequence[float]) -> None:
        """Record the prompts that a store lacks."""
        while (first := store.num_prompts) < len(prompts):
            start = time.monotonic()
            part = prompts[first : first + self.answers_per_shard()]
            answers = self.answers(part, temperatures, first=first)
            usable = self.usable(answers)
            store.append(usable, num_prompts=len(part), num_left_out=len(answers) - len(usable))
            seconds = time.monotonic() - start
            left = (len(prompts) - store.num_prompts) / len(part) * seconds
            rate = sum(sum(one.is_answer) for one in answers) / seconds
            done = f"recorded {store.num_prompts:,} of {len(prompts):,} {store.part} answers"
            self.print_line(f"{done}, {rate:,.0f} tokens/s, {left / 60:.1f} minutes left")

    def answers_per_shard(self) -> int:
        """Return how many answers are held in memory before they are written as one shard."""
        return max(batch_size(self.settings), min(1024, _SHARD_BYTES // (self.settings.max_tokens * self.features.width * 2)))

    def answers(self, prompts: Sequence[Prompt], temperatures: Sequence[float], *, first: int) -> list[Recorded]:
        """Generate missing answers and record the target's features."""
        params = [
            SamplingParams(
                max_tokens=self.settings.max_answer_tokens if one.answer_mask is None else 1,
                temperature=temperatures[(first + index) % len(temperatures)],
                seed=self.settings.seed * 2**20 + first + index,
            )
            for index, one in enumerate(prompts)
        ]
        found = []
        for prompt, request in zip(prompts, run(self.loaded, [one.token_ids for one in prompts], params), strict=True):
            count = len(prompt.token_ids)
            ids = list(request.token_ids) if prompt.answer_mask is None else prompt.token_ids
            mask = prompt.answer_mask or [index >= count for index in range(len(ids))]
            features = self.features.take(request)[: len(ids) - 1]
            if len(ids) >= 4 and len(features) == len(ids) - 1:
                found.append(Recorded(ids, mask, features, prompt.source))
        return found

    def usable(self, answers: Sequence[Recorded]) -> list[Recorded]:
        """Return the answers that do not repeat themselves."""
        return [one for one in answers if repeat_share([one.token_ids]) <= self.settings.max_repeat_share]
