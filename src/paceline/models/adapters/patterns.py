"""Select the modules that the settings of an adapter name.

Settings may hold regular expressions. They are untrusted, and a short one can take exponential time, so a separate process with limits on
time and memory matches them.
"""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import compress
from pathlib import Path

from paceline.errors import CheckpointError, shortened
from paceline.isolated import Failure, IsolatedError, Limits, run

ALL_LINEAR = "all-linear"
_HEAD = "lm_head"
_PLAIN_NAME = re.compile(r"\^?[\w.-]{1,500}")
_LAYER_INDEX = re.compile(r".*?\.[^.]*\.(\d{1,9})\.")
_MAX_PATTERN_CHARS = 200_000
_TIMEOUT_S = 10.0
_MEMORY_BYTES = 1 << 30
_MATCH_FUNCTION = "paceline.models.adapters.patterns:match_all"


@dataclass(frozen=True, slots=True)
class ModuleSelector:
    """The modules that an adapter changes, selected as PEFT does.

    Attributes:
        path: path of the settings file, for errors.
        names: target_modules: suffixes of module names, or a regular expression for full names, or "all-linear".
        excluded: exclude_modules: suffixes or a regular expression for modules that are not changed.
        saved: modules_to_save: suffixes of modules whose whole matrix is replaced.
        layers: layers_to_transform: indices of the changed layers; empty = all layers.
        layers_pattern: names of the module that lists the layers, such as "layers"; empty = any name.
    """

    path: Path
    names: str | tuple[str, ...]
    excluded: str | tuple[str, ...]
    saved: tuple[str, ...]
    layers: tuple[int, ...]
    layers_pattern: tuple[str, ...]

    def select(self, modules: Sequence[str]) -> list[str]:
        """Return which of the modules get low-rank matrices.

        Raises:
            CheckpointError: A regular expression is malformed or takes too long.
        """
        found = self._select_targets(modules)
        if self.excluded:
            excluded = set(self._matching_modules(self.excluded, modules))
            found = [name for name in found if name not in excluded]
        return [name for name in found if not any(f".{suffix}." in f".{name}." for suffix in self.saved)]

    def _select_targets(self, modules: Sequence[str]) -> list[str]:
        if isinstance(self.names, str):
            if self.names.lower() == ALL_LINEAR:
                return [name for name in modules if name.rpartition(".")[2] != _HEAD]
            return self._matching_modules(self.names, modules)
        return [
            name for name in modules
            if name in self.names or (_ends_with(name, self.names) and (not self.layers or self._layer_index(name) in self.layers))
        ]  # fmt: skip

    def _matching_modules(self, patterns: str | tuple[str, ...], modules: Sequence[str]) -> list[str]:
        if isinstance(patterns, str):
            return list(compress(modules, _match_in_process([patterns], modules, self.path)[0]))
        return [name for name in modules if name in patterns or _ends_with(name, patterns)]

    def _layer_index(self, name: str) -> int | None:
        """Return the layer index in a module's name; None if there is none."""
        expressions = [re.compile(rf"(?:.*?\.)?{re.escape(list_name)}\.(\d{{1,9}})\.") for list_name in self.layers_pattern] or [
            _LAYER_INDEX
        ]
        found = next((match for expression in expressions if (match := expression.match(name))), None)
        return None if found is None else int(found[1])


def first_matching_patterns(patterns: Sequence[str], modules: Sequence[str], path: Path) -> dict[str, str]:
    """Return for each module the first of `patterns` that matches the end of its name. Modules without a match are absent.

    Args:
        path: path of the file with the patterns, for errors.

    Raises:
        CheckpointError: A pattern is malformed or takes too long.
    """
    expressions = [pattern for pattern in patterns if _PLAIN_NAME.fullmatch(pattern) is None]
    rows = _match_in_process([rf"(.*\.)?({pattern})" for pattern in expressions], modules, path) if expressions and modules else []
    matched = {pattern: set(compress(modules, row)) for pattern, row in zip(expressions, rows, strict=bool(modules))}
    plain_names = {pattern for pattern in patterns if pattern not in matched}
    found: dict[str, str] = {}
    for name in modules:
        parts = name.split(".")
        candidates = [pattern for pattern in matched if name in matched[pattern]]
        candidates += plain_names.intersection([f"^{name}", *(".".join(parts[start:]) for start in range(len(parts)))])
        if candidates:
            found[name] = min(candidates, key=patterns.index)
    return found


def _ends_with(name: str, endings: tuple[str, ...]) -> bool:
    return name.endswith(tuple(f".{ending}" for ending in endings))


def _match_in_process(patterns: Sequence[str], names: Sequence[str], path: Path) -> list[list[bool]]:
    """Return the result of `match_all`, run in a separate process with limits on time and memory."""
    shown = ", ".join(map(shortened, patterns[:5]))
    if sum(map(len, patterns)) > _MAX_PATTERN_CHARS:
        raise CheckpointError(f"{path} holds regular expressions of more than {_MAX_PATTERN_CHARS} characters: name the modules one by one")
    try:
        rows: list[list[bool]] = run(_MATCH_FUNCTION, json.dumps([patterns, names]), Limits(_TIMEOUT_S, _MEMORY_BYTES))
    except IsolatedError as error:
        if error.failure is Failure.TIME:
            raise CheckpointError(
                f"{path}: matching {shown} with the modules' names takes longer than {_TIMEOUT_S:g} s: name the modules one by one"
            ) from None
        text = f"{path}: {shown} cannot be used as regular expressions ({str(error)[:300]}): name the modules one by one"
        raise CheckpointError(text) from None
    return rows


def match_all(patterns_and_names: tuple[Sequence[str], Sequence[str]]) -> list[list[bool]]:
    """Return a list for each pattern: whether it matches each name."""
    patterns, names = patterns_and_names
    return [[expression.fullmatch(name) is not None for name in names] for expression in map(re.compile, patterns)]
