"""What differs from plain decoding, and how to see it again."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any


class Status(StrEnum):
    """Classification of a difference between two outputs. Its members are strings, which JSON can hold."""

    BUG = "bug"
    NEAR_TIE = "near-tie"


class Kind(StrEnum):
    """Where a difference was seen first."""

    TOKENS = "tokens"
    ROWS = "rows"  # the target's logits, though the tokens agree
    LOGPROBS = "logprobs"
    PROMPT_LOGPROBS = "prompt logprobs"
    TEXT = "text"
    END = "end"  # one ended where the other went on, or for another reason
    ERROR = "error"  # plain decoding answered, this raised
    CACHE = "cache"  # the cache's books are wrong after the case
    LOAD = "load"  # numerics are said to be exact, and passes of 1 and of 8 rows differ


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One difference.

    Attributes:
        case: number of the case; None = found when the model was loaded.
        request: index of the request in the case; None = of no single one.
        run: 0, or 1 for what ran behind cached rows of run 0.
        position: output index of the first place that differs; None = no single one.
        plain_token, token: what plain decoding and the case have there.
        plain_piece, piece: these tokens as the tokenizer spells them; a model's text, not to be trusted.
        plain_logprob, logprob: what each says of its own token there, if asked for.
        rows_differ_by: largest |difference| of the two rows of logits there; None = not known.
        margin: score that the token lacks in plain decoding's row; None where no token differs.
        bound: what margin and rows may differ by; 0 where numerics are exact.
        step: what was guessed in the step that chose the token; None = not known.
        details: what else is to be known, as text.
    """

    kind: Kind
    status: Status
    details: str
    case: int | None = None
    request: int | None = None
    run: int = 0
    position: int | None = None
    plain_token: int | None = None
    token: int | None = None
    plain_piece: str | None = None
    piece: str | None = None
    plain_logprob: float | None = None
    logprob: float | None = None
    rows_differ_by: float | None = None
    margin: float | None = None
    bound: float = 0.0
    step: Mapping[str, Any] | None = None

    def as_dict(self) -> dict[str, Any]:
        """For JSON, which has no infinite numbers: they are null, such as the margin of a token that cannot be drawn."""
        values = {name: finite(getattr(self, name)) for name in self.__dataclass_fields__}
        return {**values, "kind": self.kind.value, "status": self.status.value}


def finite(value: Any) -> Any:
    """The value, None in place of a number that is not finite."""
    return None if isinstance(value, float) and not math.isfinite(value) else value
