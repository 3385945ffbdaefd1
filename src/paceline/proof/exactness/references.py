"""What plain decoding answers: each request alone, without drafts and without cached rows. One answer serves all cases of a request."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from paceline.outputs import RequestOutput
from paceline.proof.exactness.rows import RowWatch
from paceline.proof.exactness.subject import Asked, Subject
from paceline.runtimes.base import FloatArray
from paceline.sampling.params import SamplingParams

_EVERY = 5  # of the places of a row that is kept: it is looked at bit by bit where numerics are fast


@dataclass(frozen=True, slots=True)
class Reference:
    """A plain answer.

    Attributes:
        checksums: of the row of each output token; empty where numerics are fast.
        rows: [V] float32 of some output positions; empty where numerics are exact.
    """

    prompt_token_ids: Sequence[int]
    params: SamplingParams
    output: RequestOutput
    checksums: Mapping[int, int]
    rows: Mapping[int, FloatArray]


class References:
    """Plain answers, computed when they are first asked for."""

    def __init__(self, subject: Subject) -> None:
        self._subject = subject
        self._known: dict[tuple[tuple[int, ...], str], Reference] = {}
        self.num_made = 0
        self.num_tokens = 0

    def of(self, prompt_token_ids: Sequence[int], params: SamplingParams) -> Reference:
        """The plain answer to a request."""
        key = tuple(prompt_token_ids), repr(params)
        if key not in self._known:
            self._known[key] = self._make(prompt_token_ids, params)
        return self._known[key]

    def row(self, reference: Reference, index: int) -> FloatArray | None:
        """[V] float32, the row that plain decoding chose output token `index` from, decoded again; None = it is not reached."""
        watch = RowWatch(kept=frozenset([index]))
        self._subject.plain(Asked(reference.prompt_token_ids, reference.params), watch)
        return watch.rows.get(index)

    def forget(self) -> None:
        """Forget all of them, before a round that asks for others."""
        self._known.clear()

    def _make(self, prompt_token_ids: Sequence[int], params: SamplingParams) -> Reference:
        is_exact = self._subject.is_exact
        kept = frozenset() if is_exact else frozenset([params.max_tokens // _EVERY])
        watch = RowWatch(kept=kept, with_checksums=is_exact)
        output = self._subject.plain(Asked(prompt_token_ids, params), watch)
        self.num_made += 1
        self.num_tokens += len(output.token_ids)
        return Reference(prompt_token_ids, params, output, watch.checksums, watch.rows)
