"""Options of single draft methods (`--drafter-options`): one table, each entry with the kinds of heads that read it."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from paceline.drafters.head_kinds import HeadKind
from paceline.drafters.medusa.trees import GROWN_TREES, STATIC_TREES
from paceline.errors import ConfigError

MIN_DRAFT_VOCAB = 256
CORPUS_DRAFT_VOCAB = 16384  # default size of a draft vocabulary taken from a corpus
TREES = (*GROWN_TREES, *STATIC_TREES)
_KERNEL_OUTPUT_GROUP = 16  # matrix rows that the kernels compute together


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadOptions:
    """A user's options for heads; None = not set. Each field is an option of the same name.

    Attributes:
        tree: Medusa: how its trees are chosen (`MedusaDrafter`).
        boundaries: EAGLE-3: the target's layer boundaries that the head reads (boundary b enters layer b).
        norm_before_residual: EAGLE-3: the residual stream begins with the normed feature.
        final_norm: EAGLE-3: the vocabulary matrix is applied to normed hidden states.
        normed_recurrence: the next feature is the output after the final norm.
        rope_theta: base of the rotary embedding.
        mask_token_id: P-EAGLE: the token of masked pairs.
        draft_vocab_size: MTP: how many ids the module drafts; the first ones, or the most frequent ones of the corpus.
        draft_vocab_corpus: MTP: a text file that the draft vocabulary is counted in.
    """

    tree: str | None = None
    boundaries: tuple[int, ...] | None = None
    norm_before_residual: bool | None = None
    final_norm: bool | None = None
    normed_recurrence: bool | None = None
    rope_theta: float | None = None
    mask_token_id: int | None = None
    draft_vocab_size: int | None = None
    draft_vocab_corpus: Path | None = None

    @classmethod
    def parse(cls, given: Mapping[str, object]) -> "HeadOptions":
        """Parse options by their names; values may be the text of a command line.

        Raises:
            ConfigError: an option does not exist or has an invalid value.
        """
        values: dict[str, object] = {}
        for name, value in given.items():
            if name not in OPTIONS:
                known = ", ".join(f"{known} ({_reader_names(option)})" for known, option in OPTIONS.items())
                raise ConfigError(f"drafter_options: {name!r} is unknown; there are {known}")
            try:
                values[name] = OPTIONS[name].parse(value)
            except (TypeError, ValueError):
                raise ConfigError(f"drafter_options: {name} is {value!r}: use {OPTIONS[name].expected}") from None
        return cls(**values)  # type: ignore[arg-type]  # OPTIONS has the fields

    def num_draft_ids(self, vocab_size: int) -> int | None:
        """Return how many of a target's ids an MTP module drafts; None = all.

        Raises:
            ConfigError: the target has fewer ids.
        """
        if self.draft_vocab_size is None:
            return None if self.draft_vocab_corpus is None else min(CORPUS_DRAFT_VOCAB, vocab_size)
        if self.draft_vocab_size > vocab_size:
            raise ConfigError(
                f"drafter_options: draft_vocab_size is {self.draft_vocab_size} and the target has {vocab_size} ids: "
                f"{f'use at most {vocab_size}, or ' if vocab_size >= MIN_DRAFT_VOCAB else ''}leave it out to draft all ids"
            )
        return min(-(-self.draft_vocab_size // _KERNEL_OUTPUT_GROUP) * _KERNEL_OUTPUT_GROUP, vocab_size)

    def check_all_used_by(self, drafters: Iterable[str]) -> None:
        """Check that each option that is set is read by one of the drafters.

        Args:
            drafters: their names.

        Raises:
            ConfigError: one is read by none.
        """
        names = list(drafters)
        for name, option in OPTIONS.items():
            if getattr(self, name) is not None and not any(kind.value in names for kind in option.read_by):
                raise ConfigError(
                    f"drafter_options: {name!r} is for {_reader_names(option)} heads, and the drafter is {', '.join(names) or 'none'}: "
                    "leave it out, or choose such a head with drafter"
                )


@dataclass(frozen=True, slots=True)
class Option:
    """One option.

    Attributes:
        read_by: kinds of heads.
        expected: the values it takes, for errors.
        parse: makes the value from what was given; raises ValueError or TypeError if that is invalid.
    """

    read_by: Sequence[HeadKind]
    expected: str
    parse: Callable[[object], object]


def _reader_names(option: Option) -> str:
    *others, last = (kind.value for kind in option.read_by)
    return f"{', '.join(others)} and {last}" if others else last


def _parse_tree(value: object) -> str:
    if not isinstance(value, str) or value not in TREES:
        raise ValueError(value)
    return value


def _parse_layers(value: object) -> tuple[int, ...]:
    parts = value.split(",") if isinstance(value, str) else value
    if not isinstance(parts, Sequence) or not parts or any(isinstance(part, bool | float) for part in parts):
        raise ValueError(value)
    return tuple(int(part) for part in parts)


def _parse_flag(value: object) -> bool:
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


def _parse_id(value: object, least: int = 0) -> int:
    token_id = int(value) if isinstance(value, str | int) and not isinstance(value, bool) else -1
    if token_id < least:
        raise ValueError(value)
    return token_id


def _parse_path(value: object) -> Path:
    if not isinstance(value, str | Path) or not str(value).strip():
        raise ValueError(value)
    return Path(value).expanduser()


_EAGLE3 = (HeadKind.EAGLE3, HeadKind.PEAGLE)
_EXPECTED_VOCAB_SIZE = f"a number of ids from {MIN_DRAFT_VOCAB} to the size of the target's vocabulary, or leave it out to draft all ids"
OPTIONS: Mapping[str, Option] = {
    "tree": Option((HeadKind.MEDUSA,), f"one of {', '.join(TREES)}", _parse_tree),
    "boundaries": Option(_EAGLE3, "the target's layer boundaries in ascending order, such as 2,16,29", _parse_layers),
    "norm_before_residual": Option(_EAGLE3, "true or false", _parse_flag),
    "final_norm": Option(_EAGLE3, "true or false", _parse_flag),
    "normed_recurrence": Option((HeadKind.EAGLE, HeadKind.EAGLE3, HeadKind.MTP), "true or false", _parse_flag),
    "rope_theta": Option((HeadKind.EAGLE, *_EAGLE3), "the base of the rotary embedding, such as 10000", _parse_rope_theta),
    "mask_token_id": Option((HeadKind.PEAGLE,), "a token id", _parse_id),
    "draft_vocab_size": Option((HeadKind.MTP,), _EXPECTED_VOCAB_SIZE, lambda value: _parse_id(value, MIN_DRAFT_VOCAB)),
    "draft_vocab_corpus": Option((HeadKind.MTP,), "a text file", _parse_path),
}
"""All options by name: the fields of `HeadOptions`."""
