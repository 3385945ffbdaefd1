"""Compare an adapter with its target: the matrices of the network that its tensors are for, and their shapes.

The modules that its file adapts must be those that its settings name.
"""

from collections.abc import Sequence
from pathlib import Path

from paceline.errors import CheckpointError, shortened
from paceline.models.adapters.adapter_file import ModuleTensors, TensorRole, listed, without_base_layers
from paceline.models.adapters.modules import (
    EMBEDDING,
    LM_HEAD,
    ExpertParameter,
    TargetModule,
    expert_parameters,
    network_matrices,
    target_modules,
)
from paceline.models.adapters.patterns import first_patterns
from paceline.models.adapters.settings import AdapterSettings
from paceline.models.config import ModelConfig
from paceline.models.tensor_names import checkpoint_names, tensor_shapes


class AdapterTargets:
    """What each module of an adapter is in the target.

    Attributes:
        matrices: where products are in the target.
    """

    def __init__(self, path: Path, entries: Sequence[ModuleTensors], settings: AdapterSettings, config: ModelConfig) -> None:
        """Compare all modules and shapes with the target's; nothing is read.

        Raises:
            CheckpointError: some do not fit; all are named.
        """
        self._settings, self._shapes = settings, tensor_shapes(config)
        self._modules, self._stacks = target_modules(config), expert_parameters(config)
        self.matrices = network_matrices(config)
        self._ranks = self._read_ranks(entries)
        unknown, wrong = [], []
        for entry in entries:
            shapes, given = self._expected(entry), entry.tensors.keys()
            for kind, (name, tensor) in entry.tensors.items():
                if kind not in shapes:
                    unknown.append(f"{name} {list(tensor.shape)}")
                elif tensor.shape != shapes[kind]:
                    wrong.append(f"{name} {list(tensor.shape)} instead of {list(shapes[kind])}")
            if given & {TensorRole.DOWN, TensorRole.UP, TensorRole.UP_BIAS}:
                needed = (
                    TensorRole.DOWN,
                    TensorRole.UP,
                    *((TensorRole.UP_BIAS,) if settings.has_low_rank_biases and TensorRole.UP_BIAS in shapes else ()),
                )
                wrong += [f"{entry.in_file} without its {kind.value}" for kind in needed if kind not in given]
            wrong += self._beyond_rank(entry)
        if not unknown and not wrong:
            return
        problems = [f"a {config.family} model with this config.json does not have {listed(unknown)}"] * bool(unknown)
        problems += [f"it holds {listed(wrong)}"] * bool(wrong)
        base = "" if settings.base is None else f", {shortened(settings.base)}"
        raise CheckpointError(f"{path} is no adapter of this model: {'; '.join(problems)}; use it with the model it was made for{base}")

    def target(self, entry: ModuleTensors) -> TargetModule | ExpertParameter:
        """The matrices that a module of the adapter is for."""
        found = self._found(entry)
        assert found is not None  # else there was an error
        return found

    def rank(self, entry: ModuleTensors) -> tuple[int, float]:
        """The rank of a module's low-rank matrices, and what their product is multiplied by."""
        rank, alpha = self._ranks[entry.in_file]
        return rank, self._settings.scale(rank, alpha)

    def matched_name(self, entry: ModuleTensors) -> str:
        """The name that patterns are compared with; where a module's parameter is adapted, that of the parameter."""
        stack, plain = self._stack_name(entry), without_base_layers(entry.in_file)
        return plain if stack is None or entry.name in self._stacks else f"{plain}.{stack.rpartition('.')[2]}"

    def _read_ranks(self, entries: Sequence[ModuleTensors]) -> dict[str, tuple[int, float]]:
        """The rank and alpha of every module, by its name in the file."""
        settings = self._settings
        names = {entry.in_file: self.matched_name(entry) for entry in entries if TensorRole.DOWN in entry.tensors}
        ranks = first_patterns(list(settings.rank_pattern), list(names.values()), settings.path)
        alphas = first_patterns(list(settings.alpha_pattern), list(names.values()), settings.path)
        return {
            in_file: (
                settings.rank_pattern[ranks[name]] if name in ranks else settings.rank,
                settings.alpha_pattern[alphas[name]] if name in alphas else settings.alpha,
            )
            for in_file, name in names.items()
        }

    def _beyond_rank(self, entry: ModuleTensors) -> list[str]:
        """That a module's rank is beyond both sides of its matrix, where it is; PEFT gives small routers more than their few rows."""
        target = self._found(entry)
        if target is None or entry.in_file not in self._ranks or (rank := self._ranks[entry.in_file][0]) <= max(target.shape):
            return []
        return [f"{entry.in_file} of rank {rank}, a matrix of {list(target.shape)} takes at most {max(target.shape)}"]

    def _stack_name(self, entry: ModuleTensors) -> str | None:
        """The parameter of experts that a module's matrices adapt, told by their columns and rows."""
        if entry.name in self._stacks:
            return entry.name
        down, up = entry.shape(TensorRole.DOWN), entry.shape(TensorRole.UP)
        if down is None or up is None or entry.name in self._modules:
            return None
        found = [f"{entry.name}.{part}" for part in ("gate_up_proj", "up_proj", "down_proj")]
        return next((name for name in found if name in self._stacks and self._stacks[name].shape == (up[0:1] + down[1:2])), None)

    def _found(self, entry: ModuleTensors) -> TargetModule | ExpertParameter | None:
        stack = self._stack_name(entry)
        return self._modules.get(entry.name) if stack is None else self._stacks[stack]

    def _expected(self, entry: ModuleTensors) -> dict[TensorRole, tuple[int, ...]]:
        """The shapes that tensors of a module must have; only those that it can have."""
        target = self._found(entry)
        if target is None:
            return {}
        rows, columns = target.shape
        rank = self._ranks.get(entry.in_file, (self._settings.rank,))[0]
        if isinstance(target, ExpertParameter):
            return {TensorRole.DOWN: (rank * len(target.experts), columns), TensorRole.UP: (rows, rank * len(target.experts))}
        part = next(iter(target.parts))
        if entry.is_embedding:
            return {TensorRole.DOWN: (rank, rows), TensorRole.UP: (columns, rank)} if part == EMBEDDING else {}
        shapes: dict[TensorRole, tuple[int, ...]] = {}
        if part != EMBEDDING:
            shapes = {TensorRole.DOWN: (rank, columns), TensorRole.UP: (rows, rank), TensorRole.UP_BIAS: (rows,)}
        if part in (EMBEDDING, LM_HEAD):
            shapes[TensorRole.WHOLE] = target.shape
        if all(f"{matrix.name}.bias" in self._shapes for name in target.parts for matrix in self.matrices[name]):
            shapes[TensorRole.BIAS] = (rows,)
        return shapes


_EXPERTS = ".experts."
_ROUTERS = (".gate", ".router", ".router.proj", ".router.layer")  # modules of their own kind in newer models, which PEFT then leaves out


def check_targets(
    path: Path, entries: Sequence[ModuleTensors], targets: AdapterTargets, settings: AdapterSettings, config: ModelConfig
) -> None:
    """Compare the modules that a file adapts with those that its settings name.

    Raises:
        CheckpointError: some are only in one of the two.
    """
    adapted = [entry for entry in entries if TensorRole.DOWN in entry.tensors]
    names = {targets.matched_name(entry): entry for entry in adapted}
    of_modules = settings.targets.select(list(names))
    of_parameters = tuple(f".{one}" for one in settings.target_parameters)
    wanted = {*of_modules, *(name for name in names if f".{name}".endswith(of_parameters) or f".{name}.weight".endswith(of_parameters))}
    tied = LM_HEAD if settings.ties and config.tied_embeddings else None
    others = [name for name, entry in names.items() if name not in wanted and entry.name != tied]
    if others:
        raise CheckpointError(
            f"{path} adapts {listed(others, 'module')} that {settings.path} does not name as targets: one of the two files is "
            "another adapter's"
        )
    missing = _missing(adapted, targets, settings, config)
    if missing:
        raise CheckpointError(
            f"{path} adapts nothing in {listed(missing, 'module')} that {settings.path} names and this model has: the adapter was made "
            "for another model, or its file is not whole"
        )


def check_low_rank_biases(path: Path, entries: Sequence[ModuleTensors], settings: AdapterSettings) -> None:
    """That a file holds biases of low-rank matrices only where its settings ask for them: PEFT leaves others out without a word.

    Raises:
        CheckpointError: it holds others.
    """
    unread = [entry.tensors[TensorRole.UP_BIAS][0] for entry in entries if TensorRole.UP_BIAS in entry.tensors]
    if unread and not settings.has_low_rank_biases:
        raise CheckpointError(
            f"{path} holds {listed(unread)} that {settings.path} does not ask for: set lora_bias there to true if the adapter was trained "
            "with them, else export it again without them"
        )


def check_saved(path: Path, entries: Sequence[ModuleTensors], settings: AdapterSettings, config: ModelConfig) -> None:
    """That a file holds every module which its settings call replaced as a whole; names that the model does not have say nothing.

    Raises:
        CheckpointError: one is missing.
    """
    saved = settings.targets.saved
    if not saved:
        return
    held = {entry.name for entry in entries if TensorRole.WHOLE in entry.tensors}
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


def _missing(adapted: Sequence[ModuleTensors], targets: AdapterTargets, settings: AdapterSettings, config: ModelConfig) -> list[str]:
    """Modules of the target that the settings name and the file leaves out; experts, which models hold in several ways, do not count."""
    in_layers = next((entry for entry in adapted if entry.name.startswith("model.layers.")), None)
    if in_layers is None:
        return []
    before = without_base_layers(in_layers.in_file).partition("layers.")[0]
    covered = {name for entry in adapted if not isinstance(target := targets.target(entry), ExpertParameter) for name in target.parts}
    candidates = {
        f"{before}{name.removeprefix('model.')}": set(module.parts)
        for name, module in target_modules(config).items()
        if name.startswith("model.layers.") and _EXPERTS not in name and not name.endswith(_ROUTERS)
    }
    return [name for name in settings.targets.select(list(candidates)) if not candidates[name] <= covered]
