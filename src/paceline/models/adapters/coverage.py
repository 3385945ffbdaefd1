"""Whether an adapter's file holds what its settings say: no more, and nothing less."""

from collections.abc import Sequence
from pathlib import Path

from paceline.errors import CheckpointError
from paceline.models.adapters.entries import Entry, Kind, listed, without_stacks
from paceline.models.adapters.fit import Fit
from paceline.models.adapters.modules import LM_HEAD, Stack, modules_of
from paceline.models.adapters.settings import AdapterSettings
from paceline.models.config import ModelConfig
from paceline.models.tensor_names import checkpoint_names

_EXPERTS = ".experts."
_ROUTERS = (".gate", ".router", ".router.proj", ".router.layer")  # modules of their own kind in newer models, which PEFT then leaves out


def check_targets(path: Path, entries: Sequence[Entry], fit: Fit, settings: AdapterSettings, config: ModelConfig) -> None:
    """Compare the modules that a file adapts with those that its settings name.

    Raises:
        CheckpointError: some are only in one of the two.
    """
    adapted = [entry for entry in entries if Kind.DOWN in entry.tensors]
    names = {fit.matched_name(entry): entry for entry in adapted}
    of_modules = settings.targets.of(list(names))
    of_parameters = tuple(f".{one}" for one in settings.target_parameters)
    wanted = {*of_modules, *(name for name in names if f".{name}".endswith(of_parameters) or f".{name}.weight".endswith(of_parameters))}
    tied = LM_HEAD if settings.ties and config.tied_embeddings else None
    others = [name for name, entry in names.items() if name not in wanted and entry.name != tied]
    if others:
        raise CheckpointError(
            f"{path} adapts {listed(others, 'module')} that {settings.path} does not name as targets: one of the two files is "
            "another adapter's"
        )
    missing = _missing(adapted, fit, settings, config)
    if missing:
        raise CheckpointError(
            f"{path} adapts nothing in {listed(missing, 'module')} that {settings.path} names and this model has: the adapter was made "
            "for another model, or its file is not whole"
        )


def check_low_rank_biases(path: Path, entries: Sequence[Entry], settings: AdapterSettings) -> None:
    """That a file holds biases of low-rank matrices only where its settings ask for them: PEFT leaves others out without a word.

    Raises:
        CheckpointError: it holds others.
    """
    unread = [entry.tensors[Kind.UP_BIAS][0] for entry in entries if Kind.UP_BIAS in entry.tensors]
    if unread and not settings.has_low_rank_biases:
        raise CheckpointError(
            f"{path} holds {listed(unread)} that {settings.path} does not ask for: set lora_bias there to true if the adapter was trained "
            "with them, else export it again without them"
        )


def check_saved(path: Path, entries: Sequence[Entry], settings: AdapterSettings, config: ModelConfig) -> None:
    """That a file holds every module which its settings call replaced as a whole; names that the model does not have say nothing.

    Raises:
        CheckpointError: one is missing.
    """
    saved = settings.targets.saved
    if not saved:
        return
    held = {entry.name for entry in entries if Kind.WHOLE in entry.tensors}
    if settings.ties and config.tied_embeddings and held:
        held.add(LM_HEAD)
    parts = [name.split(".") for name in checkpoint_names(config).values()]
    names = (LM_HEAD, *(".".join(one[:end]) for one in parts for end in range(1, len(one))))
    missing = [name for name in dict.fromkeys(names) if name.endswith(saved) and name not in held]
    if missing:
        raise CheckpointError(
            f"{path} holds no whole matrix for {listed(missing, 'module')} that {settings.path} names in modules_to_save: the file is not "
            "whole, or it replaces what no adapter can replace here (the embedding and lm_head alone)"
        )


def _missing(adapted: Sequence[Entry], fit: Fit, settings: AdapterSettings, config: ModelConfig) -> list[str]:
    """Modules of the target that the settings name and the file leaves out; experts, which models hold in several ways, do not count."""
    in_layers = next((entry for entry in adapted if entry.name.startswith("model.layers.")), None)
    if in_layers is None:
        return []
    before = without_stacks(in_layers.in_file).partition("layers.")[0]
    covered = {name for entry in adapted if not isinstance(target := fit.target(entry), Stack) for name in target.parts}
    candidates = {
        f"{before}{name.removeprefix('model.')}": set(module.parts)
        for name, module in modules_of(config).items()
        if name.startswith("model.layers.") and _EXPERTS not in name and not name.endswith(_ROUTERS)
    }
    return [name for name in settings.targets.of(list(candidates)) if not candidates[name] <= covered]
