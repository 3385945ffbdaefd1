"""Compare an adapter with its target: the matrices that its tensors change, and their shapes.

The file must adapt exactly the modules that the settings select.
"""

from collections.abc import Sequence
from pathlib import Path

from paceline.errors import CheckpointError, name_list, shortened
from paceline.models.adapters.adapter_file import ModuleTensors, TensorRole, without_base_layers
from paceline.models.adapters.modules import (
    EMBEDDING,
    LM_HEAD,
    ExpertParameter,
    TargetModule,
    expert_parameters,
    network_matrices,
    target_modules,
)
from paceline.models.adapters.patterns import first_matching_patterns
from paceline.models.adapters.settings import AdapterSettings
from paceline.models.config import ModelConfig
from paceline.models.tensor_names import checkpoint_names, tensor_shapes


class AdapterTargets:
    """The target's matrices for each module of an adapter.

    Attributes:
        matrices: the network's matrices for each product.
    """

    def __init__(self, path: Path, entries: Sequence[ModuleTensors], settings: AdapterSettings, config: ModelConfig) -> None:
        """Compare all modules and shapes with the target's, from headers alone.

        Raises:
            CheckpointError: Some do not match. The error lists all of them.
        """
        self._settings, self._shapes = settings, tensor_shapes(config)
        self._modules, self._stacks = target_modules(config), expert_parameters(config)
        self.matrices = network_matrices(config)
        self._ranks = self._read_ranks(entries)
        unknown, wrong = [], []
        for entry in entries:
            shapes, given = self._expected_shapes(entry), entry.tensors.keys()
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
            wrong += self._rank_error(entry)
        if not unknown and not wrong:
            return
        problems = [f"a {config.family} model with this config.json does not have {name_list(unknown)}"] * bool(unknown)
        problems += [f"it holds {name_list(wrong)}"] * bool(wrong)
        base = "" if settings.base is None else f", {shortened(settings.base)}"
        raise CheckpointError(f"{path} is no adapter of this model: {'; '.join(problems)}; use it with the model it was made for{base}")

    def module_target(self, entry: ModuleTensors) -> TargetModule | ExpertParameter:
        """Return the target's matrix, or parameter of stacked experts, that a module of the adapter changes."""
        found = self._find_target(entry)
        assert found is not None  # __init__ raised otherwise
        return found

    def rank_and_scale(self, entry: ModuleTensors) -> tuple[int, float]:
        """Return the rank of a module, and the scale of its low-rank product."""
        rank, alpha = self._ranks[entry.in_file]
        return rank, self._settings.scale(rank, alpha)

    def matched_name(self, entry: ModuleTensors) -> str:
        """Return the name to match patterns with: that of the module, or of the parameter if the adapter changes one parameter of it."""
        stack, plain = self._expert_parameter_name(entry), without_base_layers(entry.in_file)
        return plain if stack is None or entry.name in self._stacks else f"{plain}.{stack.rpartition('.')[2]}"

    def _read_ranks(self, entries: Sequence[ModuleTensors]) -> dict[str, tuple[int, float]]:
        """Return the rank and alpha of every module, by its name in the file."""
        settings = self._settings
        names = {entry.in_file: self.matched_name(entry) for entry in entries if TensorRole.DOWN in entry.tensors}
        ranks = first_matching_patterns(list(settings.rank_pattern), list(names.values()), settings.path)
        alphas = first_matching_patterns(list(settings.alpha_pattern), list(names.values()), settings.path)
        return {
            in_file: (
                settings.rank_pattern[ranks[name]] if name in ranks else settings.rank,
                settings.alpha_pattern[alphas[name]] if name in alphas else settings.alpha,
            )
            for in_file, name in names.items()
        }

    def _rank_error(self, entry: ModuleTensors) -> list[str]:
        """Return an error if a rank exceeds both sides of the matrix. PEFT gives small routers a rank above their number of rows."""
        target = self._find_target(entry)
        if target is None or entry.in_file not in self._ranks or (rank := self._ranks[entry.in_file][0]) <= max(target.shape):
            return []
        return [f"{entry.in_file} of rank {rank}, a matrix of {list(target.shape)} takes at most {max(target.shape)}"]

    def _expert_parameter_name(self, entry: ModuleTensors) -> str | None:
        """Return the parameter of experts that a module adapts, recognised by its shape."""
        if entry.name in self._stacks:
            return entry.name
        down, up = entry.shape(TensorRole.DOWN), entry.shape(TensorRole.UP)
        if down is None or up is None or entry.name in self._modules:
            return None
        found = [f"{entry.name}.{part}" for part in ("gate_up_proj", "up_proj", "down_proj")]
        return next((name for name in found if name in self._stacks and self._stacks[name].shape == (up[0:1] + down[1:2])), None)

    def _find_target(self, entry: ModuleTensors) -> TargetModule | ExpertParameter | None:
        stack = self._expert_parameter_name(entry)
        return self._modules.get(entry.name) if stack is None else self._stacks[stack]

    def _expected_shapes(self, entry: ModuleTensors) -> dict[TensorRole, tuple[int, ...]]:
        """Return the shapes that the tensors of a module must have, by role; roles that the module cannot have are absent."""
        target = self._find_target(entry)
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
_ROUTER_SUFFIXES = (".gate", ".router", ".router.proj", ".router.layer")  # newer transformers have router classes; PEFT does not adapt them


def check_targets(
    path: Path, entries: Sequence[ModuleTensors], targets: AdapterTargets, settings: AdapterSettings, config: ModelConfig
) -> None:
    """Compare the modules that a file adapts with those that its settings select.

    Raises:
        CheckpointError: Some are only in one of the two.
    """
    adapted = [entry for entry in entries if TensorRole.DOWN in entry.tensors]
    names = {targets.matched_name(entry): entry for entry in adapted}
    of_modules = settings.targets.select(list(names))
    of_parameters = tuple(f".{one}" for one in settings.target_parameters)
    wanted = {*of_modules, *(name for name in names if f".{name}".endswith(of_parameters) or f".{name}.weight".endswith(of_parameters))}
    tied = LM_HEAD if settings.has_tied_head and config.tied_embeddings else None
    others = [name for name, entry in names.items() if name not in wanted and entry.name != tied]
    if others:
        raise CheckpointError(
            f"{path} adapts {name_list(others, 'module')} that {settings.path} does not name as targets: one of the two files is "
            "another adapter's"
        )
    missing = _missing_modules(adapted, targets, settings, config)
    if missing:
        raise CheckpointError(
            f"{path} adapts nothing in {name_list(missing, 'module')} that {settings.path} names and this model has: the adapter was made "
            "for another model, or its file is not whole"
        )


def check_low_rank_biases(path: Path, entries: Sequence[ModuleTensors], settings: AdapterSettings) -> None:
    """Refuse biases of low-rank matrices that the settings do not announce: PEFT would ignore them silently.

    Raises:
        CheckpointError: The file holds such biases.
    """
    unread = [entry.tensors[TensorRole.UP_BIAS][0] for entry in entries if TensorRole.UP_BIAS in entry.tensors]
    if unread and not settings.has_low_rank_biases:
        raise CheckpointError(
            f"{path} holds {name_list(unread)} that {settings.path} does not ask for: set lora_bias there to true if the adapter was "
            "trained with them, else export it again without them"
        )


def check_saved(path: Path, entries: Sequence[ModuleTensors], settings: AdapterSettings, config: ModelConfig) -> None:
    """Check that a file holds every module of modules_to_save. Names that the model does not have are ignored.

    Raises:
        CheckpointError: One is missing.
    """
    saved = settings.targets.saved
    if not saved:
        return
    held = {entry.name for entry in entries if TensorRole.WHOLE in entry.tensors}
    if settings.has_tied_head and config.tied_embeddings and held:
        held.add(LM_HEAD)
    parts = [name.split(".") for name in checkpoint_names(config).values()]
    names = (LM_HEAD, *(".".join(one[:end]) for one in parts for end in range(1, len(one))))
    missing = [name for name in dict.fromkeys(names) if name.endswith(saved) and name not in held]
    if missing:
        raise CheckpointError(
            f"{path} holds no whole matrix for {name_list(missing, 'module')} that {settings.path} names in modules_to_save: the file is "
            "not whole, or it replaces what no adapter can replace here (the embedding and lm_head alone)"
        )


def _missing_modules(
    adapted: Sequence[ModuleTensors], targets: AdapterTargets, settings: AdapterSettings, config: ModelConfig
) -> list[str]:
    """Return modules of the target that the settings select and the file lacks. Experts are ignored: models store them in several ways."""
    in_layers = next((entry for entry in adapted if entry.name.startswith("model.layers.")), None)
    if in_layers is None:
        return []
    before = without_base_layers(in_layers.in_file).partition("layers.")[0]
    covered = {
        name for entry in adapted if not isinstance(target := targets.module_target(entry), ExpertParameter) for name in target.parts
    }
    candidates = {
        f"{before}{name.removeprefix('model.')}": set(module.parts)
        for name, module in target_modules(config).items()
        if name.startswith("model.layers.") and _EXPERTS not in name and not name.endswith(_ROUTER_SUFFIXES)
    }
    return [name for name in settings.targets.select(list(candidates)) if not candidates[name] <= covered]
