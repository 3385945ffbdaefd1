"""A user's options for drafters: a mapping, each entry read by some kinds of heads."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from paceline.drafters.head_kinds import HeadKind
from paceline.drafters.medusa.trees import GROWN_TREES, STATIC_TREES
from paceline.drafters.pairs.config import PairVariant
from paceline.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Option:
    """One option.

    Attributes:
        read_by: kinds of heads.
        wanted: what it takes, for errors.
        read: the value from what was given, which may be the text of a command line.

    Raises:
        ValueError, TypeError: by `read`, for a value it does not take.
    """

    read_by: Sequence[HeadKind]
    wanted: str
    read: Callable[[object], object]


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadOptions:
    """A user's options for heads.

    Attributes:
        medusa_tree: see `MedusaDrafter`; None = its default.
        variant: conventions that an EAGLE or MTP head's files lack or have wrong; None = found by calibration.
        num_ids: an MTP head guesses so many ids alone, the first ones unless `ids_of` says which; None = all, or a usual number.
        ids_of: a text, whose most frequent ids these are; None = there is none.
    """

    medusa_tree: str | None = None
    variant: PairVariant | None = None
    num_ids: int | None = None
    ids_of: Path | None = None

    @classmethod
    def of(cls, given: Mapping[str, object]) -> "HeadOptions":
        """From options by their names.

        Raises:
            ConfigError: one does not exist or has a value it does not take.
        """
        values: dict[str, object] = {}
        for name, value in given.items():
            if name not in OPTIONS:
                known = ", ".join(f"{known} ({_kinds(option)})" for known, option in OPTIONS.items())
                raise ConfigError(f"drafter_options: {name!r} is unknown; there are {known}")
            try:
                values[name] = OPTIONS[name].read(value)
            except (TypeError, ValueError):
                raise ConfigError(f"drafter_options: {name} is {value!r}: use {OPTIONS[name].wanted}") from None
        own = {field: values.pop(name) for name, field in _FIELDS.items() if name in values}
        variant = PairVariant(**values) if values else None  # type: ignore[arg-type]  # every other option is one of its fields
        return cls(variant=variant, **own)  # type: ignore[arg-type]

    @property
    def given(self) -> list[str]:
        """Names of the options that were set."""
        return [name for name in OPTIONS if getattr(self if name in _FIELDS else self.variant, _FIELDS.get(name, name), None) is not None]

    def variant_for(self, kind: HeadKind) -> PairVariant | None:
        """The conventions set that apply to a kind of head; None if there are none."""
        if self.variant is None:
            return None
        others = {name: None for name in OPTIONS if name not in _FIELDS and kind not in OPTIONS[name].read_by}
        variant = replace(self.variant, **others)
        return None if variant == PairVariant() else variant

    def guessed_ids(self, vocab_size: int) -> int | None:
        """How many ids an MTP head guesses of a target with so many; None = all.

        Raises:
            ConfigError: the target has fewer than were asked for.
        """
        if self.num_ids is None:
            return None if self.ids_of is None else min(USUAL_IDS, vocab_size)
        if self.num_ids > vocab_size:
            raise ConfigError(
                f"drafter_options: {NUM_IDS} is {self.num_ids} and the target has {vocab_size} ids: "
                f"{f'use at most {vocab_size}, or ' if vocab_size >= LEAST_IDS else ''}leave it out to guess all ids"
            )
        return min(-(-self.num_ids // _SIDE_BY_SIDE) * _SIDE_BY_SIDE, vocab_size)

    def check_read(self, drafters: Iterable[str]) -> None:
        """Refuse options that none of `drafters` (names) reads: they would do nothing.

        Raises:
            ConfigError: there is one.
        """
        names = list(drafters)
        for name in self.given:
            if not any(kind.value in names for kind in OPTIONS[name].read_by):
                raise ConfigError(
                    f"drafter_options: {name!r} is for {_kinds(OPTIONS[name])} heads, and the drafter is {', '.join(names) or 'none'}: "
                    "leave it out, or choose such a head with drafter"
                )


def _kinds(option: Option) -> str:
    *others, last = (kind.value for kind in option.read_by)
    return f"{', '.join(others)} and {last}" if others else last


def _one_of(names: Sequence[str]) -> Callable[[object], str]:
    def read(value: object) -> str:
        if not isinstance(value, str) or value not in names:
            raise ValueError(value)
        return value

    return read


def _read_layers(value: object) -> tuple[int, ...]:
    parts = value.split(",") if isinstance(value, str) else value
    if not isinstance(parts, Sequence) or not parts or any(isinstance(part, bool | float) for part in parts):
        raise ValueError(value)
    return tuple(int(part) for part in parts)


def _read_flag(value: object) -> bool:
    if isinstance(value, bool):
        return value
    if value not in ("true", "false"):
        raise ValueError(value)
    return value == "true"


def _read_base(value: object) -> float:
    base = float(value) if isinstance(value, str | int | float) and not isinstance(value, bool) else 0.0
    if not 0.0 < base < float("inf"):
        raise ValueError(value)
    return base


def _read_id(value: object) -> int:
    token_id = int(value) if isinstance(value, str | int) and not isinstance(value, bool) else -1
    if token_id < 0:
        raise ValueError(value)
    return token_id


def _read_num_ids(value: object) -> int:
    count = _read_id(value)
    if count < LEAST_IDS:
        raise ValueError(value)
    return count


def _read_path(value: object) -> Path:
    if not isinstance(value, str | Path) or not str(value).strip():
        raise ValueError(value)
    return Path(value).expanduser()


TREE, NUM_IDS, IDS_OF = "tree", "num_ids", "ids_of"
LEAST_IDS = 256
USUAL_IDS = 16384  # of a text
_NUM_IDS_WANTED = f"a number of ids from {LEAST_IDS} to the size of the target's vocabulary, or leave it out to guess all ids"
_SIDE_BY_SIDE = 16  # outputs in the kernels: numbers of ids are rounded up to a multiple of it
_FIELDS = {TREE: "medusa_tree", NUM_IDS: "num_ids", IDS_OF: "ids_of"}
TREES = (*GROWN_TREES, *STATIC_TREES)
_LATER = (HeadKind.EAGLE3, HeadKind.PEAGLE)
OPTIONS: Mapping[str, Option] = {
    TREE: Option((HeadKind.MEDUSA,), f"one of {', '.join(TREES)}", _one_of(TREES)),
    "boundaries": Option(_LATER, "the target's layer boundaries in ascending order, such as 2,16,29", _read_layers),
    "norm_before_residual": Option(_LATER, "true or false", _read_flag),
    "rope_theta": Option((HeadKind.EAGLE, *_LATER), "the base of the rotations, such as 10000", _read_base),
    "normed_recurrence": Option((HeadKind.EAGLE, HeadKind.EAGLE3, HeadKind.MTP), "true or false", _read_flag),
    "mask_token_id": Option((HeadKind.PEAGLE,), "a token id", _read_id),
    NUM_IDS: Option((HeadKind.MTP,), _NUM_IDS_WANTED, _read_num_ids),
    IDS_OF: Option((HeadKind.MTP,), "a text file", _read_path),
}
"""All options by name; those that are no fields of `HeadOptions` are fields of `PairVariant`."""
