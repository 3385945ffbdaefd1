"""Checkpoints opened as the targets that drafters are made for."""

from collections.abc import Sequence
from pathlib import Path

from paceline.config import EngineConfig, SpeculationConfig
from paceline.drafters import LoadedTarget, prepare_drafters
from paceline.runtimes.load import RuntimeOptions, load_network
from paceline.speculation.drafter import Drafter
from paceline.tokenizer.tokenizer import Tokenizer


def load_target(directory: Path, speculation: SpeculationConfig, *, layers: tuple[int, ...] = (), num_blocks: int = 17) -> LoadedTarget:
    """A target with a context of 256 tokens on one thread.

    Args:
        layers: boundaries that its runtime collects.
    """
    engine = EngineConfig(model=str(directory), threads=1, max_model_len=256, device="cpu", offline=True)
    runtime = load_network(directory, RuntimeOptions(max_model_len=256, device="cpu", collect_layers=layers)).network
    tokenizer = Tokenizer.open(directory)
    return LoadedTarget(
        directory=directory, runtime=runtime, cache=runtime.new_cache(num_blocks), tokenizer=tokenizer,
        vocab_size=min(runtime.config.vocab_size, tokenizer.vocab_size), max_model_len=256, engine=engine,
        speculation=speculation,
    )  # fmt: skip


def make_drafter(wanted: str | Sequence[str], directory: Path, **options: object) -> Drafter | None:
    """The only drafter that a target in `directory` gets for these settings; None for plain decoding."""
    drafters = make_drafters(wanted, directory, **options)
    assert len(drafters) <= 1
    return drafters[0] if drafters else None


def make_drafters(wanted: str | Sequence[str], directory: Path, **options: object) -> list[Drafter]:
    """The drafters that a target in `directory` gets for these settings."""
    names = wanted if isinstance(wanted, str) else tuple(wanted)
    speculation = SpeculationConfig(drafter=names, **options)  # type: ignore[arg-type]
    prepared = prepare_drafters(directory, EngineConfig(offline=True), speculation)
    return prepared.open(load_target(directory, speculation, layers=prepared.layer_boundaries))
