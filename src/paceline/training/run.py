"""A training run from settings to a drafter with its card; each stage continues where an interrupted run ended."""

import json
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from paceline.errors import BackendUnavailableError, ConfigError
from paceline.hub import resolve_model
from paceline.machine import usable_processors
from paceline.models.checkpoint import open_weights, read_model_config, weight_files
from paceline.tokenizer.tokenizer import Tokenizer
from paceline.training.block import TrainableBlockDrafter
from paceline.training.card import write_card
from paceline.training.draft_model import TrainableDraftModel
from paceline.training.drafter import TargetMatrices, TrainableDrafter
from paceline.training.eagle3 import TrainableEagle3Head
from paceline.training.medusa import TrainableMedusaHeads
from paceline.training.prompts import PrintLine
from paceline.training.recording import Data, record
from paceline.training.saving import save_text, saved_file, write_errors
from paceline.training.serving import measure
from paceline.training.settings import DRAFT_MODEL, SETTINGS_FILE, TrainSettings
from paceline.training.trainer import CHECKPOINT, Trainer
from paceline.training.vocabulary import choose_vocabulary

DATA_FOLDER = "data"
CONFIG_FILE, WEIGHTS_FILE = "config.json", "model.safetensors"
_DRAFTERS: dict[str, type[TrainableDrafter]] = {
    "eagle3": TrainableEagle3Head,
    "dspark": TrainableBlockDrafter,
    "dflash": TrainableBlockDrafter,
    "medusa": TrainableMedusaHeads,
    DRAFT_MODEL: TrainableDraftModel,
}


def train(settings: TrainSettings, directory: Path, print_line: PrintLine, *, is_resumed: bool = False) -> bool:
    """Train a drafter into `directory`; return whether it is finished, False after an interrupt.

    Args:
        print_line: takes lines of progress.
        is_resumed: continue the run in the directory; its settings are used.

    Raises:
        ConfigError: the directory holds another run, or a setting does not fit the target.
        PacelineError: the target cannot be used.
    """
    if is_resumed:
        stored = TrainSettings.read(directory)
        if stored.drafter != settings.drafter:
            raise ConfigError(f"{directory} holds a run of {stored.drafter}, not {settings.drafter}: name that, or give another --output")
        settings = stored
    elif directory.exists() and not directory.is_dir():
        raise ConfigError(f"{directory} is a file: give a directory as --output")
    elif (directory / SETTINGS_FILE).is_file() and (directory / DATA_FOLDER).exists():
        raise ConfigError(f"{directory} holds a run already: continue it with --resume, or give another --output")
    elif (directory / CONFIG_FILE).exists() and not (directory / SETTINGS_FILE).exists():
        raise ConfigError(f"{directory} holds another model, which would be overwritten: give another --output")
    target = resolve_model(settings.model, gguf_file=settings.gguf_file)
    config = read_model_config(target)
    settings = settings.for_target(config)
    _DRAFTERS[settings.drafter].check_target(config, settings)
    tokenizer = Tokenizer.open(target)
    device = _device(settings.device)
    torch.set_num_threads(settings.threads or usable_processors())
    is_new_run = not (directory / SETTINGS_FILE).exists()
    with write_errors(directory):
        directory.mkdir(parents=True, exist_ok=True)
        settings.write(directory)
        if settings.drafter == DRAFT_MODEL:
            tokenizer.save(directory)
    try:
        data = record(settings, config, directory / DATA_FOLDER, print_line)
    except ConfigError:
        if is_new_run and not (directory / DATA_FOLDER).exists():  # no prompt can be used: there is nothing to resume
            (directory / SETTINGS_FILE).unlink()
        raise
    weights = open_weights(target, config, num_threads=settings.threads or usable_processors())
    end_ids = (*tokenizer.end_token_ids, *config.eos_token_ids, 0)
    drafter = make_drafter(settings, TargetMatrices(config, weights, end_ids[0]), data, print_line)
    trainer = Trainer(drafter, data.train.open(), data.heldout.open(), settings, directory, print_line, device=device)
    if is_resumed and (directory / CHECKPOINT).is_file():
        trainer.load()
    with _stop_flag() as is_stopped:
        if not trainer.run(is_stopped):
            print_line(
                f"saved after step {trainer.progress.step:,}: paceline train {settings.drafter} --output {directory} --resume goes on"
            )
            return False
    name = Path(settings.model).name
    export(drafter, directory, name)
    print_line(f"written: {directory / WEIGHTS_FILE}, {(directory / WEIGHTS_FILE).stat().st_size / 1e6:.1f} MB")
    results = measure(settings, directory, data.heldout_prompts, drafter.depth, print_line)
    files = [(file.name, file.stat().st_size) for file in weight_files(target)]
    write_card(directory, settings, trainer.progress, data, results, _facts(drafter, trainer, files))
    return True


def make_drafter(settings: TrainSettings, target: TargetMatrices, data: Data, print_line: PrintLine) -> TrainableDrafter:
    """Return the drafter with its start values, which depend on the seed."""
    sequences = data.train.open()
    vocabulary = choose_vocabulary(sequences, settings.draft_vocab_size or target.config.vocab_size, target.config.vocab_size)
    torch.manual_seed(settings.seed)
    drafter = _DRAFTERS[settings.drafter](target, vocabulary, settings)
    heldout = data.heldout.open()
    boundaries = ", ".join(map(str, settings.boundaries or ())) or "none"
    print_line(
        f"{settings.drafter}: {drafter.num_parameters():,} trained values, reads boundaries {boundaries}; "
        f"{len(vocabulary.target_ids):,} draft ids cover {vocabulary.coverage(sequences):.1%} of the data, "
        f"{vocabulary.coverage(heldout):.1%} of held-out answers"
    )
    return drafter


def export(drafter: TrainableDrafter, directory: Path, name: str) -> None:
    """Write config.json and the weights in bfloat16, in the publishers' layout."""
    config, tensors = drafter.export(name)
    stored = {
        key: (values.detach().to(torch.bfloat16) if values.is_floating_point() else values.detach()).cpu().contiguous()
        for key, values in tensors.items()
    }
    with saved_file(directory / WEIGHTS_FILE) as unfinished:
        save_file(stored, unfinished, metadata={"format": "pt"})
    save_text(directory / CONFIG_FILE, json.dumps(config, indent=1) + "\n")


def _facts(drafter: TrainableDrafter, trainer: Trainer, files: list[tuple[str, int]]) -> dict[str, Any]:
    progress = trainer.progress
    return {
        "num_parameters": drafter.num_parameters(),
        "draft_ids": len(drafter.vocabulary.target_ids),
        "target_files": files,
        "steps": progress.step,
        "epochs": progress.epoch + (progress.index > 0),
        "training_s": round(progress.elapsed_s, 1),
        "depth": drafter.depth,
    }


def _device(name: str) -> str:
    has_cuda = torch.cuda.is_available()
    if name == "cuda" and not has_cuda:
        raise BackendUnavailableError("device is 'cuda' and torch finds no CUDA device: use cpu")
    return "cuda" if name != "cpu" and has_cuda else "cpu"


@contextmanager
def _stop_flag() -> Iterator[Callable[[], bool]]:
    """Yield a function that returns whether Ctrl-C or SIGTERM arrived; a second one ends the process as usual."""
    is_set = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield is_set.is_set
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def restore() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    def stop(*_: object) -> None:
        is_set.set()
        restore()

    for number in before:
        signal.signal(number, stop)
    try:
        yield is_set.is_set
    finally:
        restore()
