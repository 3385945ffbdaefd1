"""The options of `--drafter-options`. Each option applies to some kinds of heads only."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from paceline.drafters.head_kinds import HeadKind
from paceline.drafters.medusa.trees import DYNAMIC_TREES, STATIC_TREES
from paceline.errors import ConfigError

MIN_DRAFT_VOCAB_SIZE = 256
DEFAULT_CORPUS_VOCAB_SIZE = 16384  # draft_vocab_size if the user gives only draft_vocab_corpus
MEDUSA_TREES = (*DYNAMIC_TREES, *STATIC_TREES)
_NUM_PANEL_OUTPUTS = 16  # number of outputs (rows of a weight matrix) that a kernel computes at a time


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadOptions:
    """The user's `--drafter-options`; None = the user did not set the option."""

    tree: str | None = None  # Medusa: how trees are chosen, see `MedusaDrafter`
    boundaries: tuple[int, ...] | None = None  # EAGLE-3: layer boundaries that the head reads; boundary b is the input of layer b
    norm_before_residual: bool | None = None  # EAGLE-3: the first layer's residual is the normalised feature
    final_norm: bool | None = None  # EAGLE-3: the hidden state is normalised before the lm_head
    normed_recurrence: bool | None = None  # EAGLE, MTP: the predicted feature that the head reads is normalised (final norm)
    rope_theta: float | None = None  # EAGLE: base of the rotary embedding
    mask_token_id: int | None = None  # P-EAGLE: input token of the positions whose token is not known yet
    draft_vocab_size: int | None = None  # MTP: number of ids to draft: the lowest, or the most frequent of `draft_vocab_corpus`
    draft_vocab_corpus: Path | None = None  # MTP: text file whose most frequent ids are drafted

    @classmethod
    def parse(cls, options: Mapping[str, object]) -> "HeadOptions":
        """Parse options by name. Values are Python objects, or strings from the command line.

        Raises:
            ConfigError: an option does not exist or has an invalid value.
        """
        values: dict[str, object] = {}
        for name, value in options.items():
            if name not in OPTIONS:
                known = ", ".join(f"{known} ({_head_kind_names(option)})" for known, option in OPTIONS.items())
                raise ConfigError(f"drafter_options: {name!r} is unknown; there are {known}")
            try:
                values[name] = OPTIONS[name].parse(value)
            except (TypeError, ValueError):
                raise ConfigError(f"drafter_options: {name} is {value!r}: use {OPTIONS[name].expected_values}") from None
        return cls(**values)  # type: ignore[arg-type]  # OPTIONS has the fields

    def num_draft_ids(self, vocab_size: int) -> int | None:
        """Return the size of an MTP module's draft vocabulary, rounded up to a size that kernels compute efficiently; None = all ids.

        Raises:
            ConfigError: `draft_vocab_size` is above `vocab_size`, the size of the target's vocabulary.
        """
        if self.draft_vocab_size is None:
            return None if self.draft_vocab_corpus is None else min(DEFAULT_CORPUS_VOCAB_SIZE, vocab_size)
        if self.draft_vocab_size > vocab_size:
            raise ConfigError(
                f"drafter_options: draft_vocab_size is {self.draft_vocab_size} and the target has {vocab_size} ids: "
                f"{f'use at most {vocab_size}, or ' if vocab_size >= MIN_DRAFT_VOCAB_SIZE else ''}leave it out to draft all ids"
            )
        return min(-(-self.draft_vocab_size // _NUM_PANEL_OUTPUTS) * _NUM_PANEL_OUTPUTS, vocab_size)

    def check_all_used_by(self, drafters: Iterable[str]) -> None:
        """Check that each option that the user set applies to one of the drafters in use, given by name.

        Raises:
            ConfigError: an option applies to none of the drafters.
        """
        names = list(drafters)
        for name, option in OPTIONS.items():
            if getattr(self, name) is not None and not any(kind.value in names for kind in option.head_kinds):
                raise ConfigError(
                    f"drafter_options: {name!r} is for {_head_kind_names(option)} heads, and the drafter is {', '.join(names) or 'none'}: "
                    "leave it out, or choose such a head with drafter"
                )


@dataclass(frozen=True, slots=True)
class HeadOption:
    head_kinds: Sequence[HeadKind]  # kinds of heads that the option applies to
    expected_values: str  # description of the allowed values, for error messages
    parse: Callable[[object], object]  # converts the user's value; raises ValueError or TypeError if it is invalid


def _head_kind_names(option: HeadOption) -> str:
    *other_names, last_name = (kind.value for kind in option.head_kinds)
    return f"{', '.join(other_names)} and {last_name}" if other_names else last_name


def _parse_tree(value: object) -> str:
    if not isinstance(value, str) or value not in MEDUSA_TREES:
        raise ValueError(value)
    return value


def _parse_layer_ids(value: object) -> tuple[int, ...]:
    values = value.split(",") if isinstance(value, str) else value
    if not isinstance(values, Sequence) or not values or any(isinstance(layer, bool | float) for layer in values):
        raise ValueError(value)
    return tuple(int(layer) for layer in values)


def _parse_bool(value: object) -> bool:
    if isinstance(value, bool):
        return value
    if value not in ("true", "false"):
        raise ValueError(value)
    return value == "true"


def _parse_rope_theta(value: object) -> float:
    base = float(value) if isinstance(value, str | int | float) and not isinstance(value, bool) else 0.0
    if not 0.0 < base < float("inf"):
        raise ValueError(value)
    return base


def _parse_integer(value: object, minimum: int = 0) -> int:
    number = int(value) if isinstance(value, str | int) and not isinstance(value, bool) else -1
    if number < minimum:
        raise ValueError(value)
    return number


def _parse_path(value: object) -> Path:
    if not isinstance(value, str | Path) or not str(value).strip():
        raise ValueError(value)
    return Path(value).expanduser()


_EAGLE3_KINDS = (HeadKind.EAGLE3, HeadKind.PEAGLE)
_DRAFT_VOCAB_SIZES = f"a number of ids from {MIN_DRAFT_VOCAB_SIZE} to the size of the target's vocabulary, or leave it out to draft all ids"
OPTIONS: Mapping[str, HeadOption] = {
    "tree": HeadOption((HeadKind.MEDUSA,), f"one of {', '.join(MEDUSA_TREES)}", _parse_tree),
    "boundaries": HeadOption(_EAGLE3_KINDS, "the target's layer boundaries in ascending order, such as 2,16,29", _parse_layer_ids),
    "norm_before_residual": HeadOption(_EAGLE3_KINDS, "true or false", _parse_bool),
    "final_norm": HeadOption(_EAGLE3_KINDS, "true or false", _parse_bool),
    "normed_recurrence": HeadOption((HeadKind.EAGLE, HeadKind.EAGLE3, HeadKind.MTP), "true or false", _parse_bool),
    "rope_theta": HeadOption((HeadKind.EAGLE, *_EAGLE3_KINDS), "the base of the rotary embedding, such as 10000", _parse_rope_theta),
    "mask_token_id": HeadOption((HeadKind.PEAGLE,), "a token id", _parse_integer),
    "draft_vocab_size": HeadOption((HeadKind.MTP,), _DRAFT_VOCAB_SIZES, lambda value: _parse_integer(value, MIN_DRAFT_VOCAB_SIZE)),
    "draft_vocab_corpus": HeadOption((HeadKind.MTP,), "a text file", _parse_path),
}
"""All options by name: the fields of `HeadOptions`."""
