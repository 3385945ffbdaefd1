"""One answer beside plain decoding's: token ids, rows of logits, log-probabilities, text and end."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from paceline.engine.input_processor import InputProcessor
from paceline.outputs import RequestOutput
from paceline.proof.exactness.findings import Finding, Kind, Status
from paceline.proof.exactness.near_ties import Place, decide
from paceline.proof.exactness.references import Reference, References
from paceline.proof.exactness.rows import RowWatch, largest_difference
from paceline.sampling.logprobs import TokenLogprobs


@dataclass(frozen=True, slots=True)
class Compared:
    """Outcome for one request.

    Attributes:
        num_tokens: output tokens compared, the first one that differs included.
        num_rows: rows of logits compared.
        finding: the first difference; None = all is equal.
    """

    num_tokens: int
    num_rows: int
    finding: Finding | None


class Comparison:
    """Compares answers with references.

    Args:
        noise_bound: of logits; 0 where numerics are exact, and then every difference is a bug.
    """

    def __init__(self, input_processor: InputProcessor, references: References, noise_bound: float, *, is_exact: bool) -> None:
        self._input_processor, self._references = input_processor, references
        self._bound, self._is_exact = noise_bound, is_exact

    def compare(self, output: RequestOutput, watch: RowWatch, reference: Reference, *, case: int, request: int, run: int) -> Compared:
        """What an answer has in common with the plain one.

        Args:
            watch: its rows.
            case, request, run: where it stands, for the finding.
        """
        place = partial(Finding, case=case, request=request, run=run, bound=self._bound)
        plain = reference.output
        same = _num_equal(output.token_ids, plain.token_ids)
        has_ended = same == min(len(output.token_ids), len(plain.token_ids))
        num_rows, row_at, difference = self._compare_rows(watch, reference, same if has_ended else same + 1)
        num_tokens = same if has_ended else same + 1
        finding: Finding | None = None
        if not has_ended:
            finding = self._of_tokens(output, watch, reference, same, row_at, place)
        elif len(output.token_ids) != len(plain.token_ids) or output.finish_reason != plain.finish_reason:
            finding = place(
                kind=Kind.END, status=Status.BUG, position=same,
                details=f"{_end(output)}; plain: {_end(plain)}",
            )  # fmt: skip
        elif row_at is not None:
            token = plain.token_ids[row_at]
            finding = place(
                kind=Kind.ROWS, status=Status.BUG, position=row_at, plain_token=token, token=token, rows_differ_by=difference,
                details="the tokens agree, the target's logits do not",
            )  # fmt: skip
        else:
            is_processed = reference.params.logprobs_mode == "processed"
            finding = self._of_logprobs(output, plain, place, is_processed=is_processed) or _of_text(output, plain, place)
        return Compared(num_tokens, num_rows, finding)

    def _compare_rows(self, watch: RowWatch, reference: Reference, length: int) -> tuple[int, int | None, float | None]:
        """Rows compared, the first position whose rows differ, and by how much where that is known."""
        if self._is_exact:
            both = [index for index in range(length) if index in watch.checksums and index in reference.checksums]
            return len(both), next((index for index in both if watch.checksums[index] != reference.checksums[index]), None), None
        both = [index for index in sorted(reference.rows) if index in watch.rows and index < length and index != watch.diverged_at]
        for index in both:
            difference = largest_difference(watch.rows[index], reference.rows[index])
            if not difference < self._bound:
                return len(both), index, difference
        return len(both), None, None

    def _of_tokens(
        self, output: RequestOutput, watch: RowWatch, reference: Reference, at: int, row_at: int | None, place: "partial[Finding]"
    ) -> Finding:
        """The finding of the first token that differs."""
        plain = reference.output
        token, plain_token = output.token_ids[at], plain.token_ids[at]
        own_row, plain_row = watch.rows.get(at), self._references.row(reference, at)
        here = partial(
            place, kind=Kind.TOKENS, position=at, plain_token=plain_token, token=token,
            plain_logprob=_logprob(plain.logprobs, at), logprob=_logprob(output.logprobs, at), step=_step(output, at),
            plain_piece=self._input_processor.tokenizer.piece(plain_token), piece=self._input_processor.tokenizer.piece(token),
        )  # fmt: skip
        if own_row is None or plain_row is None:
            return here(status=Status.BUG, details="no row of the target was seen where this token was chosen")
        apart = largest_difference(own_row, plain_row)
        prefix = (*reference.prompt_token_ids, *plain.token_ids[:at])
        where = Place(reference.params, prefix, len(reference.prompt_token_ids))
        drawn = where.drawn(own_row, self._input_processor)
        decision = decide(plain_row, token, where, self._input_processor, self._bound)
        here = partial(here, rows_differ_by=apart, margin=decision.margin)
        if self._is_exact:
            rows = f"rows differ from position {row_at} on" if row_at is not None else "the rows are the same, the choice is not"
            return here(status=Status.BUG, details=f"numerics are exact: any difference is a bug; {rows}")
        if row_at is not None:
            return here(status=Status.BUG, details=f"rows differ by more than the noise bound already at position {row_at}")
        if not apart < self._bound:
            return here(status=Status.BUG, details="the rows differ by more than the noise bound")
        if drawn != token:
            return here(status=Status.BUG, details=f"its own row gives token {drawn}")
        if not decision.is_near:
            return here(status=Status.BUG, details="rows differ by noise only, and this is no near-tie")
        return here(status=Status.NEAR_TIE, bound=decision.bound, details="rows differ by noise only, and noise decided")

    def _of_logprobs(self, output: RequestOutput, plain: RequestOutput, place: "partial[Finding]", *, is_processed: bool) -> Finding | None:
        """What log-probabilities say of the same tokens."""
        pairs = [(Kind.LOGPROBS, output.logprobs, plain.logprobs), (Kind.PROMPT_LOGPROBS, output.prompt_logprobs, plain.prompt_logprobs)]
        if is_processed and not self._is_exact:  # noise may move a border, and with it every probability
            del pairs[0]
        for kind, own, other in pairs:
            if (own is None) != (other is None) or len(own or ()) != len(other or ()):
                return place(kind=kind, status=Status.BUG, details=f"{len(own or ())} log-probabilities, plain {len(other or ())}")
            for index, (one, reference) in enumerate(zip(own or (), other or (), strict=True)):
                if not self._agree(one, reference):
                    return place(
                        kind=kind, status=Status.BUG, position=index,
                        plain_token=reference and reference.token_id, token=one and one.token_id,
                        plain_logprob=reference and reference.logprob, logprob=one and one.logprob,
                        details="log-probability, rank or the best tokens differ",
                    )  # fmt: skip
        return None

    def _agree(self, one: TokenLogprobs | None, other: TokenLogprobs | None) -> bool:
        """Whether two are the same: to the bit, or where numerics are fast as far as noise goes."""
        if self._is_exact or one is None or other is None:
            return one == other
        return one.token_id == other.token_id and (one.logprob == other.logprob or abs(one.logprob - other.logprob) < 2.0 * self._bound)


def _num_equal(one: Sequence[int], other: Sequence[int]) -> int:
    return next((index for index, (left, right) in enumerate(zip(one, other, strict=False)) if left != right), min(len(one), len(other)))


def _logprob(logprobs: Sequence[TokenLogprobs] | None, index: int) -> float | None:
    """None also where it is no number of JSON."""
    if logprobs is None or index >= len(logprobs) or not math.isfinite(logprobs[index].logprob):
        return None
    return logprobs[index].logprob


def _of_text(output: RequestOutput, plain: RequestOutput, place: "partial[Finding]") -> Finding | None:
    if output.text == plain.text:
        return None
    at = _num_equal([*map(ord, output.text)], [*map(ord, plain.text)])
    return place(kind=Kind.TEXT, status=Status.BUG, details=f"the same tokens, but the texts differ from character {at} on")


def _step(output: RequestOutput, index: int) -> dict[str, Any] | None:
    """The step that emitted an output token."""
    found = next((one for one in output.steps or () if one.start <= index < one.start + len(one.token_ids)), None)
    return None if found is None else found.as_dict()


def _end(output: RequestOutput) -> str:
    return f"{len(output.token_ids)} tokens, then {output.finish_reason}"
