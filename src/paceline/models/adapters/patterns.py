"""Which modules of a model the settings of an adapter mean. Their regular expressions come from strangers.

A short expression can take for ever. Those that could are matched in a process of their own, which can be ended.
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
_PLAIN = re.compile(r"\^?[\w.-]{1,500}")
_LAYER = re.compile(r".*?\.[^.]*\.(\d{1,9})\.")
_MAX_CHARS = 200_000
_TIMEOUT_S = 10.0
_MEMORY_BYTES = 1 << 30
_MATCH = "paceline.models.adapters.patterns:match_all"


@dataclass(frozen=True, slots=True)
class ModuleSelector:
    """Which modules are adapted, as PEFT decides it.

    Attributes:
        path: the file that says so, for errors.
        names: endings of their names, or a regular expression that fits whole names, or "all-linear".
        excluded: likewise, of those that are not.
        saved: endings of names of modules that are replaced as a whole.
        layers: only in these; none = in all.
        layers_pattern: what stands in front of a layer's number; none = anything.
    """

    path: Path
    names: str | tuple[str, ...]
    excluded: str | tuple[str, ...]
    saved: tuple[str, ...]
    layers: tuple[int, ...]
    layers_pattern: tuple[str, ...]

    def select(self, modules: Sequence[str]) -> list[str]:
        """Those of `modules` that are adapted.

        Raises:
            CheckpointError: an expression is none, or takes too long.
        """
        found = self._chosen(modules)
        if self.excluded:
            excluded = set(self._fitting(self.excluded, modules))
            found = [name for name in found if name not in excluded]
        return [name for name in found if not any(f".{one}." in f".{name}." for one in self.saved)]

    def _chosen(self, modules: Sequence[str]) -> list[str]:
        if isinstance(self.names, str):
            if self.names.lower() == ALL_LINEAR:
                return [name for name in modules if name.rpartition(".")[2] != _HEAD]
            return self._fitting(self.names, modules)
        return [
            name for name in modules
            if name in self.names or (_ends_with(name, self.names) and (not self.layers or self._layer_of(name) in self.layers))
        ]  # fmt: skip

    def _fitting(self, wanted: str | tuple[str, ...], modules: Sequence[str]) -> list[str]:
        if isinstance(wanted, str):
            fits = _match_matrix([wanted], modules, self.path)[0]
            return [name for name, does_fit in zip(modules, fits, strict=True) if does_fit]
        return [name for name in modules if name in wanted or _ends_with(name, wanted)]

    def _layer_of(self, name: str) -> int | None:
        """The number behind the first of the patterns that is in a name."""
        expressions = [re.compile(rf"(?:.*?\.)?{re.escape(one)}\.(\d{{1,9}})\.") for one in self.layers_pattern] or [_LAYER]
        found = next((match for expression in expressions if (match := expression.match(name))), None)
        return None if found is None else int(found[1])


def first_patterns(patterns: Sequence[str], modules: Sequence[str], path: Path) -> dict[str, str]:
    """For each module the first of `patterns` that its name ends with; those of which none does are left out.

    Args:
        path: the file with the patterns, for errors.

    Raises:
        CheckpointError: one is no regular expression, or takes too long.
    """
    others = [pattern for pattern in patterns if _PLAIN.fullmatch(pattern) is None]
    rows = _match_matrix([rf"(.*\.)?({pattern})" for pattern in others], modules, path) if others and modules else []
    fits = {
        pattern: {name for name, does_fit in zip(modules, row, strict=True) if does_fit} for pattern, row in zip(others, rows, strict=True)
    }
    known = {pattern: number for number, pattern in reversed(list(enumerate(patterns))) if pattern not in fits}
    found: dict[str, str] = {}
    for name in modules:
        candidates = [pattern for pattern in fits if name in fits[pattern]]
        candidates += [ending for ending in (f"^{name}", *_endings(name)) if ending in known]
        if candidates:
            found[name] = min(candidates, key=patterns.index)
    return found


def _ends_with(name: str, endings: tuple[str, ...]) -> bool:
    return name.endswith(tuple(f".{one}" for one in endings))


def _endings(name: str) -> list[str]:
    """`a.b.c`, `b.c` and `c`."""
    parts = name.split(".")
    return [".".join(parts[start:]) for start in range(len(parts))]


def _match_matrix(patterns: Sequence[str], names: Sequence[str], path: Path) -> list[list[bool]]:
    """Return a row for each pattern: whether it matches each of the names. A process of its own limits time and memory.

    Raises:
        CheckpointError: the patterns are too long, malformed or take too long.
    """
    shown = ", ".join(map(shortened, patterns[:5]))
    if sum(map(len, patterns)) > _MAX_CHARS:
        raise CheckpointError(f"{path} holds regular expressions of more than {_MAX_CHARS} characters: name the modules one by one")
    try:
        rows: list[list[bool]] = run(_MATCH, json.dumps([patterns, names]), Limits(_TIMEOUT_S, _MEMORY_BYTES))
    except IsolatedError as error:
        if error.failure is Failure.TIME:
            raise CheckpointError(
                f"{path}: matching {shown} with the modules' names takes longer than {_TIMEOUT_S:g} s: name the modules one by one"
            ) from None
        text = f"{path}: {shown} cannot be used as regular expressions ({str(error)[:300]}): name the modules one by one"
        raise CheckpointError(text) from None
    return rows


def match_all(patterns_and_names: tuple[Sequence[str], Sequence[str]]) -> list[list[bool]]:
    """Whether each pattern matches each name. Runs in a process of its own."""
    patterns, names = patterns_and_names
    return [[expression.fullmatch(name) is not None for name in names] for expression in map(re.compile, patterns)]
