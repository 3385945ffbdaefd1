"""Whether the tensors of an adapter fit a target: which of its matrices they are for, and in which shapes."""

from collections.abc import Sequence
from pathlib import Path

from paceline.errors import CheckpointError, shortened
from paceline.models.adapters.entries import Entry, Kind, listed, without_stacks
from paceline.models.adapters.modules import EMBEDDING, LM_HEAD, Module, Stack, modules_of, places_of, stacks_of
from paceline.models.adapters.patterns import endings_of
from paceline.models.adapters.settings import AdapterSettings
from paceline.models.config import ModelConfig
from paceline.models.tensor_names import tensor_shapes


class Fit:
    """What each module of an adapter is in the target.

    Attributes:
        places: where products are in the target.
    """

    def __init__(self, path: Path, entries: Sequence[Entry], settings: AdapterSettings, config: ModelConfig) -> None:
        """Compare all modules and shapes with the target's; nothing is read.

        Raises:
            CheckpointError: some do not fit; all are named.
        """
        self._settings, self._shapes = settings, tensor_shapes(config)
        self._modules, self._stacks = modules_of(config), stacks_of(config)
        self.places = places_of(config)
        self._ranks = self._read_ranks(entries)
        unknown, wrong = [], []
        for entry in entries:
            shapes, given = self._expected(entry), entry.tensors.keys()
            for kind, (name, tensor) in entry.tensors.items():
                if kind not in shapes:
                    unknown.append(f"{name} {list(tensor.shape)}")
                elif tensor.shape != shapes[kind]:
                    wrong.append(f"{name} {list(tensor.shape)} instead of {list(shapes[kind])}")
            if given & {Kind.DOWN, Kind.UP, Kind.UP_BIAS}:
                needed = (Kind.DOWN, Kind.UP, *((Kind.UP_BIAS,) if settings.has_low_rank_biases and Kind.UP_BIAS in shapes else ()))
                wrong += [f"{entry.in_file} without its {kind.value}" for kind in needed if kind not in given]
            wrong += self._beyond_rank(entry)
        if not unknown and not wrong:
            return
        problems = [f"a {config.family} model with this config.json does not have {listed(unknown)}"] * bool(unknown)
        problems += [f"it holds {listed(wrong)}"] * bool(wrong)
        base = "" if settings.base is None else f", {shortened(settings.base)}"
        raise CheckpointError(f"{path} is no adapter of this model: {'; '.join(problems)}; use it with the model it was made for{base}")

    def target(self, entry: Entry) -> Module | Stack:
        """The matrices that a module of the adapter is for."""
        found = self._found(entry)
        assert found is not None  # else there was an error
        return found

    def rank(self, entry: Entry) -> tuple[int, float]:
        """The rank of a module's low-rank matrices, and what their product is multiplied by."""
        rank, alpha = self._ranks[entry.in_file]
        return rank, self._settings.scale(rank, alpha)

    def matched_name(self, entry: Entry) -> str:
        """The name that patterns are compared with; where a module's parameter is adapted, that of the parameter."""
        stack, plain = self._stack_name(entry), without_stacks(entry.in_file)
        return plain if stack is None or entry.name in self._stacks else f"{plain}.{stack.rpartition('.')[2]}"

    def _read_ranks(self, entries: Sequence[Entry]) -> dict[str, tuple[int, float]]:
        """The rank and alpha of every module, by its name in the file."""
        settings = self._settings
        names = {entry.in_file: self.matched_name(entry) for entry in entries if Kind.DOWN in entry.tensors}
        ranks = endings_of(list(settings.rank_pattern), list(names.values()), settings.path)
        alphas = endings_of(list(settings.alpha_pattern), list(names.values()), settings.path)
        return {
            in_file: (
                settings.rank_pattern[ranks[name]] if name in ranks else settings.rank,
                settings.alpha_pattern[alphas[name]] if name in alphas else settings.alpha,
            )
            for in_file, name in names.items()
        }

    def _beyond_rank(self, entry: Entry) -> list[str]:
        """That a module's rank is beyond both sides of its matrix, where it is; PEFT gives small routers more than their few rows."""
        target = self._found(entry)
        if target is None or entry.in_file not in self._ranks or (rank := self._ranks[entry.in_file][0]) <= max(target.shape):
            return []
        return [f"{entry.in_file} of rank {rank}, a matrix of {list(target.shape)} takes at most {max(target.shape)}"]

    def _stack_name(self, entry: Entry) -> str | None:
        """The parameter of experts that a module's matrices adapt, told by their columns and rows."""
        if entry.name in self._stacks:
            return entry.name
        down, up = entry.shape(Kind.DOWN), entry.shape(Kind.UP)
        if down is None or up is None or entry.name in self._modules:
            return None
        found = [f"{entry.name}.{part}" for part in ("gate_up_proj", "up_proj", "down_proj")]
        return next((name for name in found if name in self._stacks and self._stacks[name].shape == (up[0:1] + down[1:2])), None)

    def _found(self, entry: Entry) -> Module | Stack | None:
        stack = self._stack_name(entry)
        return self._modules.get(entry.name) if stack is None else self._stacks[stack]

    def _expected(self, entry: Entry) -> dict[Kind, tuple[int, ...]]:
        """The shapes that tensors of a module must have; only those that it can have."""
        target = self._found(entry)
        if target is None:
            return {}
        rows, columns = target.shape
        rank = self._ranks.get(entry.in_file, (self._settings.rank,))[0]
        if isinstance(target, Stack):
            return {Kind.DOWN: (rank * len(target.experts), columns), Kind.UP: (rows, rank * len(target.experts))}
        part = next(iter(target.parts))
        if entry.is_embedding:
            return {Kind.DOWN: (rank, rows), Kind.UP: (columns, rank)} if part == EMBEDDING else {}
        shapes: dict[Kind, tuple[int, ...]] = {}
        if part != EMBEDDING:
            shapes = {Kind.DOWN: (rank, columns), Kind.UP: (rows, rank), Kind.UP_BIAS: (rows,)}
        if part in (EMBEDDING, LM_HEAD):
            shapes[Kind.WHOLE] = target.shape
        if all(f"{place.name}.bias" in self._shapes for name in target.parts for place in self.places[name]):
            shapes[Kind.BIAS] = (rows,)
        return shapes
