"""Find the modules that the settings of an adapter select.

Settings may hold regular expressions, which are untrusted: even a short expression can take exponential time. A separate process with
limits on time and memory therefore matches them.
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
_LM_HEAD = "lm_head"
_LITERAL_PATTERN = re.compile(r"\^?[\w.-]{1,500}")
_LAYER_INDEX_PATTERN = re.compile(r".*?\.[^.]*\.(\d{1,9})\.")
_MAX_PATTERN_CHARS = 200_000
_MATCHING_TIMEOUT_S = 10.0
_MAX_MATCHING_BYTES = 1 << 30
_MATCH_FUNCTION_NAME = "paceline.models.adapters.patterns:match_patterns"  # the separate process calls this function


@dataclass(frozen=True, slots=True)
class ModuleSelector:
    """The modules that an adapter changes, selected as PEFT does.

    Attributes:
        path: path of the settings file, for errors.
        target_modules: suffixes of module names, or a regular expression for full names, or "all-linear".
        exclude_modules: suffixes of names, or a regular expression for full names, of modules that are not changed.
        modules_to_save: suffixes of names of modules whose whole matrix is replaced.
        layers_to_transform: indices of the changed layers; empty = all layers.
        layers_pattern: names of the module that lists the layers, such as "layers"; empty = any name.
    """

    path: Path
    target_modules: str | tuple[str, ...]
    exclude_modules: str | tuple[str, ...]
    modules_to_save: tuple[str, ...]
    layers_to_transform: tuple[int, ...]
    layers_pattern: tuple[str, ...]

    def select_modules(self, modules: Sequence[str]) -> list[str]:
        """Return the names of the modules that get low-rank matrices.

        Raises:
            CheckpointError: A regular expression is malformed, or takes too long to match.
        """
        found = self._select_targets(modules)
        if self.exclude_modules:
            excluded = set(self._matching_modules(self.exclude_modules, modules))
            found = [name for name in found if name not in excluded]
        return [name for name in found if not any(f".{suffix}." in f".{name}." for suffix in self.modules_to_save)]

    def _select_targets(self, modules: Sequence[str]) -> list[str]:
        if isinstance(self.target_modules, str) and self.target_modules.lower() == ALL_LINEAR:
            return [name for name in modules if name.rpartition(".")[2] != _LM_HEAD]
        found, layers = self._matching_modules(self.target_modules, modules), self.layers_to_transform
        if isinstance(self.target_modules, str) or not layers:
            return found
        return [name for name in found if name in self.target_modules or self._layer_index(name) in layers]

    def _matching_modules(self, patterns: str | tuple[str, ...], modules: Sequence[str]) -> list[str]:
        if isinstance(patterns, str):
            return list(compress(modules, _match_in_process([patterns], modules, self.path)[0]))
        return [name for name in modules if f".{name}".endswith(tuple(f".{suffix}" for suffix in patterns))]

    def _layer_index(self, name: str) -> int | None:
        """Return the layer index in a module's name; None if the name has no index."""
        expressions = [re.compile(rf"(?:.*?\.)?{re.escape(list_name)}\.(\d{{1,9}})\.") for list_name in self.layers_pattern] or [
            _LAYER_INDEX_PATTERN
        ]
        found = next((match for expression in expressions if (match := expression.match(name))), None)
        return None if found is None else int(found[1])


def first_matching_patterns(patterns: Sequence[str], modules: Sequence[str], path: Path) -> dict[str, str]:
    """Return for each module the first of `patterns` that matches the end of its name. Modules without a match are absent.

    Args:
        path: path of the file with the patterns, for errors.

    Raises:
        CheckpointError: A pattern is malformed, or takes too long to match.
    """
    expressions = [pattern for pattern in patterns if _LITERAL_PATTERN.fullmatch(pattern) is None]
    matches = _match_in_process([rf"(.*\.)?({pattern})" for pattern in expressions], modules, path) if expressions and modules else []
    matched = {pattern: set(compress(modules, is_match)) for pattern, is_match in zip(expressions, matches, strict=bool(modules))}
    literal_patterns = {pattern for pattern in patterns if pattern not in matched}
    first_matches: dict[str, str] = {}
    for name in modules:
        parts = name.split(".")
        candidates = [pattern for pattern in matched if name in matched[pattern]]
        candidates += literal_patterns.intersection([f"^{name}", *(".".join(parts[start:]) for start in range(len(parts)))])
        if candidates:
            first_matches[name] = min(candidates, key=patterns.index)
    return first_matches


def _match_in_process(patterns: Sequence[str], names: Sequence[str], path: Path) -> list[list[bool]]:
    """Run `match_patterns` in a separate process with limits on time and memory, and return its result."""
    shown = ", ".join(map(shortened, patterns[:5]))
    if sum(map(len, patterns)) > _MAX_PATTERN_CHARS:
        raise CheckpointError(f"{path} holds regular expressions of more than {_MAX_PATTERN_CHARS} characters: name the modules one by one")
    try:
        matches: list[list[bool]] = run(
            _MATCH_FUNCTION_NAME, json.dumps([patterns, names]), Limits(_MATCHING_TIMEOUT_S, _MAX_MATCHING_BYTES)
        )
    except IsolatedError as error:
        if error.failure is Failure.TIME:
            raise CheckpointError(
                f"{path}: matching {shown} with the modules' names takes longer than {_MATCHING_TIMEOUT_S:g} s: name the modules one by one"
            ) from None
        text = f"{path}: {shown} cannot be used as regular expressions ({str(error)[:300]}): name the modules one by one"
        raise CheckpointError(text) from None
    return matches


def match_patterns(patterns_and_names: tuple[Sequence[str], Sequence[str]]) -> list[list[bool]]:
    """Return a list for each pattern: for every name, whether the pattern matches the whole name."""
    patterns, names = patterns_and_names
    return [[expression.fullmatch(name) is not None for name in names] for expression in map(re.compile, patterns)]
