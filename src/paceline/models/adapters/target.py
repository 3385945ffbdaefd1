"""Check an adapter against its target: which matrices its tensors change, and whether names, shapes and settings agree."""

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

_EXPERTS = ".experts."
_ROUTER_SUFFIXES = (".gate", ".router", ".router.proj", ".router.layer")  # PEFT does not adapt routers of newer transformers versions


class AdapterTargets:
    """The matrices of the target that the modules of an adapter change.

    Attributes:
        matrices: matrices of the network that each low-rank update is added to (`network_matrices`).
    """

    def __init__(self, path: Path, modules: Sequence[ModuleTensors], settings: AdapterSettings, config: ModelConfig) -> None:
        """Check all modules of an adapter file. No tensor is read.

        Raises:
            CheckpointError: Names or shapes differ from the target's, or the file does not hold exactly what the settings select.
        """
        self._path, self._adapter_modules, self._settings, self._config = path, modules, settings, config
        self._shapes, self.matrices = tensor_shapes(config), network_matrices(config)
        self._target_modules, self._expert_parameters = target_modules(config), expert_parameters(config)
        if absorbed := [module.name_in_file for module in modules if module.name.endswith(".self_attn.kv_b_proj")]:
            raise CheckpointError(
                f"{path} adapts {name_list(absorbed, 'module')}, which is not supported: keys and values of latent attention are cached "
                "before this projection; merge the adapter into the checkpoint with PEFT, or train it without kv_b_proj"
            )
        self._ranks = self._read_ranks()
        self._changes_tied_head = settings.has_tied_head and config.tied_embeddings
        self._check_names_and_shapes()
        self._check_low_rank_biases()
        self._check_selected_modules()
        self._check_saved_modules()

    def find_target(self, module: ModuleTensors) -> TargetModule | ExpertParameter | None:
        """Return the target's matrix, or parameter with all experts, that a module changes. None only if `__init__` refuses the module."""
        parameter = self._expert_parameter_name(module)
        return self._target_modules.get(module.name) if parameter is None else self._expert_parameters[parameter]

    def rank_and_scale(self, module: ModuleTensors) -> tuple[int, float]:
        """Return the rank of a module, and the factor of its low-rank product."""
        rank, alpha = self._ranks[module.name_in_file]
        return rank, self._settings.scale(rank, alpha)

    def _name_for_selection(self, module: ModuleTensors) -> str:
        """Return the name that `target_modules` and similar settings must match, with the parameter if a module of experts has several."""
        parameter, name = self._expert_parameter_name(module), without_base_layers(module.name_in_file)
        return name if parameter is None or module.name in self._expert_parameters else f"{name}.{parameter.rpartition('.')[2]}"

    def _read_ranks(self) -> dict[str, tuple[int, float]]:
        """Return the rank and alpha of every module, by its name in the file."""
        settings = self._settings
        names = {
            module.name_in_file: self._name_for_selection(module) for module in self._adapter_modules if TensorRole.DOWN in module.tensors
        }
        ranks = first_matching_patterns(list(settings.rank_pattern), list(names.values()), settings.path)
        alphas = first_matching_patterns(list(settings.alpha_pattern), list(names.values()), settings.path)
        return {
            name_in_file: (
                settings.rank_pattern[ranks[name]] if name in ranks else settings.rank,
                settings.alpha_pattern[alphas[name]] if name in alphas else settings.alpha,
            )
            for name_in_file, name in names.items()
        }

    def _expert_parameter_name(self, module: ModuleTensors) -> str | None:
        """Return which parameter with all experts a module adapts, recognised by its shape; None = it adapts a single matrix."""
        if module.name in self._expert_parameters:
            return module.name
        down, up = module.shape(TensorRole.DOWN), module.shape(TensorRole.UP)
        if down is None or up is None or module.name in self._target_modules:
            return None
        names = [f"{module.name}.{part}" for part in ("gate_up_proj", "up_proj", "down_proj")]
        parameters = self._expert_parameters
        return next((name for name in names if name in parameters and parameters[name].shape == (up[0:1] + down[1:2])), None)

    def _expected_shapes(self, module: ModuleTensors) -> dict[TensorRole, tuple[int, ...]]:
        """Return the shapes that a module's tensors must have, for the roles that they may have."""
        target = self.find_target(module)
        if target is None:
            return {}
        rows, columns = target.shape
        rank = self._ranks.get(module.name_in_file, (self._settings.rank,))[0]
        if isinstance(target, ExpertParameter):
            return {TensorRole.DOWN: (rank * len(target.experts), columns), TensorRole.UP: (rows, rank * len(target.experts))}
        part = next(iter(target.parts))
        if module.is_embedding:
            return {TensorRole.DOWN: (rank, rows), TensorRole.UP: (columns, rank)} if part == EMBEDDING else {}
        shapes: dict[TensorRole, tuple[int, ...]] = {}
        if part != EMBEDDING:
            shapes = {TensorRole.DOWN: (rank, columns), TensorRole.UP: (rows, rank), TensorRole.UP_BIAS: (rows,)}
        if part in (EMBEDDING, LM_HEAD):
            shapes[TensorRole.FULL_WEIGHT] = target.shape
        if all(f"{matrix.name}.bias" in self._shapes for name in target.parts for matrix in self.matrices[name]):
            shapes[TensorRole.BIAS] = (rows,)
        return shapes

    def _check_names_and_shapes(self) -> None:
        unknown, wrong = [], []
        for module in self._adapter_modules:
            shapes, roles = self._expected_shapes(module), module.tensors.keys()
            for role, (name, tensor) in module.tensors.items():
                if role not in shapes:
                    unknown.append(f"{name} {list(tensor.shape)}")
                elif tensor.shape != shapes[role]:
                    wrong.append(f"{name} {list(tensor.shape)} instead of {list(shapes[role])}")
            if roles & {TensorRole.DOWN, TensorRole.UP, TensorRole.UP_BIAS}:
                needs_bias = self._settings.has_low_rank_biases and TensorRole.UP_BIAS in shapes
                needed = (TensorRole.DOWN, TensorRole.UP, *([TensorRole.UP_BIAS] if needs_bias else []))
                wrong += [f"{module.name_in_file} without its {role.value}" for role in needed if role not in roles]
            wrong += self._rank_error(module)
        if not unknown and not wrong:
            return
        problems = [f"a {self._config.family} model with this config.json does not have {name_list(unknown)}"] * bool(unknown)
        problems += [f"it holds {name_list(wrong)}"] * bool(wrong)
        base = "" if self._settings.base_model is None else f", {shortened(self._settings.base_model)}"
        raise CheckpointError(
            f"{self._path} is no adapter of this model: {'; '.join(problems)}; use it with the model it was made for{base}"
        )

    def _rank_error(self, module: ModuleTensors) -> list[str]:
        """Return an error if a rank exceeds both sides of the matrix. PEFT gives small routers a rank above their number of rows."""
        target = self.find_target(module)
        if target is None or module.name_in_file not in self._ranks or (rank := self._ranks[module.name_in_file][0]) <= max(target.shape):
            return []
        return [f"{module.name_in_file} of rank {rank}, a matrix of {list(target.shape)} takes at most {max(target.shape)}"]

    def _check_low_rank_biases(self) -> None:
        """Refuse biases of low-rank matrices without `lora_bias` in the settings: PEFT would ignore them silently."""
        names = [module.tensors[TensorRole.UP_BIAS][0] for module in self._adapter_modules if TensorRole.UP_BIAS in module.tensors]
        if names and not self._settings.has_low_rank_biases:
            raise CheckpointError(
                f"{self._path} holds {name_list(names)} that {self._settings.path} does not ask for: set lora_bias there to true if the "
                "adapter was trained with them, else export it again without them"
            )

    def _check_selected_modules(self) -> None:
        """Check that the file adapts exactly the modules that the settings select."""
        path, settings = self._path, self._settings
        adapted = {self._name_for_selection(module): module for module in self._adapter_modules if TensorRole.DOWN in module.tensors}
        parameter_suffixes = tuple(f".{name}" for name in settings.target_parameters)
        selected = {name for name in adapted if f".{name}".endswith(parameter_suffixes) or f".{name}.weight".endswith(parameter_suffixes)}
        selected.update(settings.targets.select(list(adapted)))
        tied_head = LM_HEAD if self._changes_tied_head else None
        unselected = [name for name, module in adapted.items() if name not in selected and module.name != tied_head]
        if unselected:
            raise CheckpointError(
                f"{path} adapts {name_list(unselected, 'module')} that {settings.path} does not name as targets: one of the two files is "
                "another adapter's"
            )
        missing = self._missing_modules(list(adapted.values()))
        if missing:
            raise CheckpointError(
                f"{path} adapts nothing in {name_list(missing, 'module')} that {settings.path} names and this model has: the adapter was "
                "made for another model, or its file is not whole"
            )

    def _missing_modules(self, adapted: Sequence[ModuleTensors]) -> list[str]:
        """Return modules that the settings select and the file lacks. Experts are ignored, because models store them in several ways."""
        in_layer = next((module for module in adapted if module.name.startswith("model.layers.")), None)
        if in_layer is None:
            return []
        prefix = without_base_layers(in_layer.name_in_file).partition("layers.")[0]
        targets = map(self.find_target, adapted)
        covered = {name for target in targets if isinstance(target, TargetModule) for name in target.parts}
        candidates = {
            f"{prefix}{name.removeprefix('model.')}": set(module.parts)
            for name, module in self._target_modules.items()
            if name.startswith("model.layers.") and _EXPERTS not in name and not name.endswith(_ROUTER_SUFFIXES)
        }
        return [name for name in self._settings.targets.select(list(candidates)) if not candidates[name] <= covered]

    def _check_saved_modules(self) -> None:
        """Check that the file holds every module of modules_to_save. Names that the model does not have are ignored."""
        suffixes = self._settings.targets.saved
        if not suffixes:
            return
        held = {module.name for module in self._adapter_modules if TensorRole.FULL_WEIGHT in module.tensors}
        if self._changes_tied_head and held:
            held.add(LM_HEAD)
        paths = [name.split(".") for name in checkpoint_names(self._config).values()]
        modules = (LM_HEAD, *(".".join(path[:end]) for path in paths for end in range(1, len(path))))
        missing = [name for name in dict.fromkeys(modules) if name.endswith(suffixes) and name not in held]
        if missing:
            raise CheckpointError(
                f"{self._path} holds no whole matrix for {name_list(missing, 'module')} that {self._settings.path} names in "
                "modules_to_save: the file is not whole, or it replaces what no adapter can replace here (the embedding and lm_head alone)"
            )
