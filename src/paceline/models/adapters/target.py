"""Find the matrices of the target that an adapter changes, and check that names, shapes and settings agree."""

from collections.abc import Sequence
from pathlib import Path

from paceline.errors import CheckpointError, name_list, shortened
from paceline.models.adapters.adapter_file import ModuleTensors, TensorRole, strip_base_layer_suffix
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

_ROUTER_SUFFIXES = (".gate", ".router", ".router.proj", ".router.layer")  # may be missing: with newer transformers, PEFT adapts no routers


class AdapterTargets:
    """Maps each module in an adapter file to the matrices of the target that it changes.

    Attributes:
        matrices: the matrices of the network that each matrix of `Adapter` changes, by the name in `Adapter`.
    """

    def __init__(self, path: Path, modules: Sequence[ModuleTensors], settings: AdapterSettings, config: ModelConfig) -> None:
        """Check all modules of an adapter file without reading their tensors.

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
        self._ranks = self._find_ranks_and_alphas()
        self._changes_tied_lm_head = settings.changes_tied_lm_head and config.tied_embeddings
        self._check_names_and_shapes()
        self._check_low_rank_biases()
        self._check_selected_modules()
        self._check_saved_modules()

    def find_target(self, module: ModuleTensors) -> TargetModule | ExpertParameter | None:
        """Return the linear layer, or the parameter that stacks experts, that a module changes; None if adapters cannot change it."""
        parameter = self._expert_parameter_name(module)
        return self._target_modules.get(module.name) if parameter is None else self._expert_parameters[parameter]

    def rank_and_scale(self, module: ModuleTensors) -> tuple[int, float]:
        """Return a module's rank, and the factor of its lora_B @ lora_A."""
        rank, alpha = self._ranks[module.name_in_file]
        return rank, self._settings.scale(rank, alpha)

    def _name_for_selection(self, module: ModuleTensors) -> str:
        """Return the name that settings such as `target_modules` must match. It ends with the parameter if the module has several."""
        parameter, name = self._expert_parameter_name(module), strip_base_layer_suffix(module.name_in_file)
        return name if parameter is None or module.name in self._expert_parameters else f"{name}.{parameter.rpartition('.')[2]}"

    def _find_ranks_and_alphas(self) -> dict[str, tuple[int, float]]:
        """Return rank and alpha of every module with low-rank matrices, by the module's name in the file."""
        settings = self._settings
        names = {
            module.name_in_file: self._name_for_selection(module) for module in self._adapter_modules if TensorRole.LORA_A in module.tensors
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
        """Return the stacked parameter of experts that a module changes, found by name or shape; None = it changes a linear layer."""
        if module.name in self._expert_parameters:
            return module.name
        shape_a, shape_b = module.tensor_shape(TensorRole.LORA_A), module.tensor_shape(TensorRole.LORA_B)
        if shape_a is None or shape_b is None or module.name in self._target_modules:
            return None
        names = [f"{module.name}.{part}" for part in ("gate_up_proj", "up_proj", "down_proj")]
        parameters = self._expert_parameters
        return next((name for name in names if name in parameters and parameters[name].shape == (shape_b[0:1] + shape_a[1:2])), None)

    def _expected_shapes(self, module: ModuleTensors) -> dict[TensorRole, tuple[int, ...]]:
        """Return the required shape of each tensor that a module may have in the file, by role, such as lora_A or bias."""
        target = self.find_target(module)
        if target is None:
            return {}
        rows, columns = target.shape
        rank = self._ranks.get(module.name_in_file, (self._settings.rank,))[0]
        if isinstance(target, ExpertParameter):
            rank *= len(target.rows_by_expert)
            return {TensorRole.LORA_A: (rank, columns), TensorRole.LORA_B: (rows, rank)}
        part = next(iter(target.rows_by_matrix))
        if module.is_embedding:
            return {TensorRole.LORA_A: (rank, rows), TensorRole.LORA_B: (columns, rank)} if part == EMBEDDING else {}
        shapes: dict[TensorRole, tuple[int, ...]] = {}
        if part != EMBEDDING:
            shapes = {TensorRole.LORA_A: (rank, columns), TensorRole.LORA_B: (rows, rank), TensorRole.LORA_B_BIAS: (rows,)}
        if part in (EMBEDDING, LM_HEAD):
            shapes[TensorRole.FULL_WEIGHT] = target.shape
        if all(f"{matrix.name}.bias" in self._shapes for name in target.rows_by_matrix for matrix in self.matrices[name]):
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
            if roles & {TensorRole.LORA_A, TensorRole.LORA_B, TensorRole.LORA_B_BIAS}:
                needs_bias = self._settings.has_low_rank_biases and TensorRole.LORA_B_BIAS in shapes
                needed = (TensorRole.LORA_A, TensorRole.LORA_B, *([TensorRole.LORA_B_BIAS] if needs_bias else []))
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
        """Return an error if the rank exceeds both N and K. It may exceed one of them: PEFT gives small routers such ranks."""
        target = self.find_target(module)
        if target is None or module.name_in_file not in self._ranks or (rank := self._ranks[module.name_in_file][0]) <= max(target.shape):
            return []
        return [f"{module.name_in_file} of rank {rank}, a matrix of {list(target.shape)} takes at most {max(target.shape)}"]

    def _check_low_rank_biases(self) -> None:
        """Refuse biases of lora_B if the settings lack `lora_bias`: PEFT would ignore the biases silently."""
        names = [module.tensors[TensorRole.LORA_B_BIAS][0] for module in self._adapter_modules if TensorRole.LORA_B_BIAS in module.tensors]
        if names and not self._settings.has_low_rank_biases:
            raise CheckpointError(
                f"{self._path} holds {name_list(names)} without lora_bias in {self._settings.path}: set lora_bias to true there if the "
                "adapter was trained with these biases, else export it again without them"
            )

    def _check_selected_modules(self) -> None:
        """Check that the file adapts exactly the modules that the settings select."""
        path, settings = self._path, self._settings
        adapted = {self._name_for_selection(module): module for module in self._adapter_modules if TensorRole.LORA_A in module.tensors}
        parameter_suffixes = tuple(f".{name}" for name in settings.target_parameters)
        selected = {name for name in adapted if f".{name}".endswith(parameter_suffixes) or f".{name}.weight".endswith(parameter_suffixes)}
        selected.update(settings.module_selector.select_modules(list(adapted)))
        tied_head = LM_HEAD if self._changes_tied_lm_head else None
        unselected = [name for name, module in adapted.items() if name not in selected and module.name != tied_head]
        if unselected:
            raise CheckpointError(
                f"{path} adapts {name_list(unselected, 'module')} that {settings.path} does not select: the two files belong to "
                "different adapters"
            )
        missing = self._missing_modules(list(adapted.values()))
        if missing:
            raise CheckpointError(
                f"{path} does not adapt {name_list(missing, 'module')} of this model that {settings.path} selects: the adapter was "
                "made for another model, or its file is incomplete"
            )

    def _missing_modules(self, adapted: Sequence[ModuleTensors]) -> list[str]:
        """Return the modules that the settings select and the file lacks, except experts, which models store in several ways."""
        in_layer = next((module for module in adapted if module.name.startswith("model.layers.")), None)
        if in_layer is None:
            return []
        prefix = strip_base_layer_suffix(in_layer.name_in_file).partition("layers.")[0]
        targets = map(self.find_target, adapted)
        covered = {name for target in targets if isinstance(target, TargetModule) for name in target.rows_by_matrix}
        candidates = {
            f"{prefix}{name.removeprefix('model.')}": set(module.rows_by_matrix)
            for name, module in self._target_modules.items()
            if name.startswith("model.layers.") and ".experts." not in name and not name.endswith(_ROUTER_SUFFIXES)
        }
        return [name for name in self._settings.module_selector.select_modules(list(candidates)) if not candidates[name] <= covered]

    def _check_saved_modules(self) -> None:
        """Check that the file holds every module of modules_to_save. Names that the model does not have are ignored."""
        suffixes = self._settings.module_selector.modules_to_save
        if not suffixes:
            return
        held = {module.name for module in self._adapter_modules if TensorRole.FULL_WEIGHT in module.tensors}
        if self._changes_tied_lm_head and held:
            held.add(LM_HEAD)
        paths = [name.split(".") for name in checkpoint_names(self._config).values()]
        modules = (LM_HEAD, *(".".join(path[:end]) for path in paths for end in range(1, len(path))))
        missing = [name for name in dict.fromkeys(modules) if name.endswith(suffixes) and name not in held]
        if missing:
            raise CheckpointError(
                f"{self._path} holds no whole matrix for {name_list(missing, 'module')} that {self._settings.path} names in "
                "modules_to_save: the file is incomplete, or the modules cannot be replaced (only the embedding and lm_head can)"
            )
