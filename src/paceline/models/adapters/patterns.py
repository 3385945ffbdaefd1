"""Which modules the settings of an adapter select. Their regular expressions are untrusted.

A short expression can take exponential time. Expressions are matched in a separate process with limits on time and memory.
"""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
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
        path: the settings file, for errors.
        names: suffixes of module names, or one regular expression for full names, or "all-linear".
        excluded: the same for modules that are not changed.
        saved: suffixes of modules that are replaced as a whole (modules_to_save).
        layers: layers_to_transform; empty = all layers.
        layers_pattern: names of the list of layers; empty = any.
    """

    path: Path
    names: str | tuple[str, ...]
    excluded: str | tuple[str, ...]
    saved: tuple[str, ...]
    layers: tuple[int, ...]
    layers_pattern: tuple[str, ...]

    def select(self, modules: Sequence[str]) -> list[str]:
        """Return those of `modules` that are adapted.

        Raises:
            CheckpointError: An expression is malformed or takes too long.
        """
        found = self._select_by_settings(modules)
        if self.excluded:
            excluded = set(self._matching_modules(self.excluded, modules))
            found = [name for name in found if name not in excluded]
        return [name for name in found if not any(f".{one}." in f".{name}." for one in self.saved)]

    def _select_by_settings(self, modules: Sequence[str]) -> list[str]:
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
            fits = _match_matrix([patterns], modules, self.path)[0]
            return [name for name, does_fit in zip(modules, fits, strict=True) if does_fit]
        return [name for name in modules if name in patterns or _ends_with(name, patterns)]

    def _layer_index(self, name: str) -> int | None:
        """Return the layer index in a module's name; None if there is none."""
        expressions = [re.compile(rf"(?:.*?\.)?{re.escape(one)}\.(\d{{1,9}})\.") for one in self.layers_pattern] or [_LAYER_INDEX]
        found = next((match for expression in expressions if (match := expression.match(name))), None)
        return None if found is None else int(found[1])


def first_matching_patterns(patterns: Sequence[str], modules: Sequence[str], path: Path) -> dict[str, str]:
    """Return for each module the first of `patterns` that matches the end of its name. Modules without a match are left out.

    Args:
        path: the file with the patterns, for errors.

    Raises:
        CheckpointError: A pattern is malformed or takes too long.
    """
    others = [pattern for pattern in patterns if _PLAIN_NAME.fullmatch(pattern) is None]
    rows = _match_matrix([rf"(.*\.)?({pattern})" for pattern in others], modules, path) if others and modules else []
    fits = {
        pattern: {name for name, does_fit in zip(modules, row, strict=True) if does_fit} for pattern, row in zip(others, rows, strict=True)
    }
    known = {pattern: number for number, pattern in reversed(list(enumerate(patterns))) if pattern not in fits}
    found: dict[str, str] = {}
    for name in modules:
        candidates = [pattern for pattern in fits if name in fits[pattern]]
        candidates += [ending for ending in (f"^{name}", *_dotted_suffixes(name)) if ending in known]
        if candidates:
            found[name] = min(candidates, key=patterns.index)
    return found


def _ends_with(name: str, endings: tuple[str, ...]) -> bool:
    return name.endswith(tuple(f".{one}" for one in endings))


def _dotted_suffixes(name: str) -> list[str]:
    """Return the suffixes of a dotted name: `a.b.c`, `b.c` and `c` for `a.b.c`."""
    parts = name.split(".")
    return [".".join(parts[start:]) for start in range(len(parts))]


def _match_matrix(patterns: Sequence[str], names: Sequence[str], path: Path) -> list[list[bool]]:
    """Return a row for each pattern: whether it matches each name. A separate process limits time and memory.

    Raises:
        CheckpointError: The patterns are too long, malformed or take too long.
    """
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
    """Return whether each pattern matches each name. Runs in a separate process."""
    patterns, names = patterns_and_names
    return [[expression.fullmatch(name) is not None for name in names] for expression in map(re.compile, patterns)]
