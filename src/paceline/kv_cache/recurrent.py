"""States of layers that keep something of a fixed size for a whole text: the last inputs of a convolution, and recurrent matrices.

A state is that behind the first rows of a text, a multiple of the grid's. The committed rows behind these are pending: of each there is a
record, what the layers' updates need of it. A pass brings the state forward by pending rows and goes on from there; rows of a tree start
from their parents. So a rejection costs nothing, and no state is copied for a row.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from paceline.errors import CapacityError
from paceline.kv_cache.layer_memory import LayerMemory
from paceline.kv_cache.prefix_index import Link
from paceline.kv_cache.row_plan import Commit, RowPlan

KNOWN_ROWS = 16
"""A plan with so many known rows leaves no record of those that a state can be behind: they are kept or cancelled together, and the state
behind them is made apart."""
NO_RECORD = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class StateLimits:
    """How a memory of states is used.

    Attributes:
        stride: rows between the states that are kept for others to go on from; a multiple of the block size. Besides these a text has
            one behind the last block of its prompt and one behind the last it filled.
        max_kept: such states at most; of more the one used longest ago is dropped. 0 = none are kept.
    """

    stride: int = 512
    max_kept: int = 16


DEFAULT_STATES = StateLimits()


class StateWork(NamedTuple):
    """What a pass does to the states of one sequence; its updates are those of the pending rows, then of its own.

    Attributes:
        state: where it begins; None = at zero.
        records: [number, record_size].
        pending: records of the committed rows that `state` has not taken in, in their order.
        num_folded: of them, those it takes in now, in place.
        rows: the record that each row of the plan leaves, or `NO_RECORD`.
        saves: (count, state): the state behind the first `count` pending and known rows is written there; ascending.
        has_run: [1], to be set to 1 behind the pass.
    """

    state: Any
    records: Any
    pending: Sequence[int]
    num_folded: int
    rows: Sequence[int]
    saves: Sequence[tuple[int, Any]]
    has_run: NDArray[np.int32]


@dataclass(slots=True)
class _Kept:
    """What others can begin with: a state, the rows it has taken in, and records of those behind them, or None.

    `is_prompt`: it is behind known rows.
    """

    state: Any
    length: int
    records: Any = None
    is_prompt: bool = False


@dataclass(slots=True)
class _Text:
    """One sequence. `length`: rows that `state` has taken in.

    Attributes:
        num_known: known rows of the plan under way that leave no records.
        saves: of the plan under way: behind how many rows of the text, and where to.
        links: of the text's full blocks, by their index, as far as the state is not behind them.
        crossed: states behind blocks that nobody has named yet, by their index.
        last: the link of the last block whose state is kept only until there is a later one.
        last_is_prompt: whether that block is full of known rows.
        is_whole: no change of `state`, `length` and `pending` is under way. An interrupt within one ends the request, and what it leaves
            must be nobody's.
    """

    state: Any = None
    length: int = 0
    records: Any = None
    pending: list[int] = field(default_factory=list)
    free: list[int] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)
    num_folded: int = 0
    num_known: int = 0
    saves: list[tuple[int, Any]] = field(default_factory=list)
    has_run: NDArray[np.int32] = field(default_factory=lambda: np.zeros(1, np.int32))
    links: dict[int, Link] = field(default_factory=dict)
    crossed: dict[int, _Kept] = field(default_factory=dict)
    last: Link | None = None
    last_is_prompt: bool = False
    is_whole: bool = True


class RecurrentStates(LayerMemory):
    """The states of all recurrent layers of a network, for every sequence.

    Args:
        state_size, record_size: numbers of a state, and of what a row leaves.
        make: an array of zeros of a shape, of whatever the runtime computes with: only indexing is used here.
        grid: states are those behind multiples of so many rows, and take in as many at a time; a divisor of `block_size`, `KNOWN_ROWS`
            at most.
    """

    def __init__(
        self, state_size: int, record_size: int, block_size: int, make: Callable[[tuple[int, ...]], Any], limits: StateLimits, grid: int = 1
    ) -> None:
        self.limits, self._grid = limits, grid
        self.state_size, self.record_size = state_size, record_size
        self._block_size, self._make = block_size, make
        self._texts: dict[int, _Text] = {}
        self._spare: list[Any] = []
        self._kept: OrderedDict[Link, _Kept] = OrderedDict()  # in the order of their last use

    @property
    def num_states(self) -> int:
        """States that somebody has, spare ones left out."""
        texts = self._texts.values()
        of_texts = sum((text.state is not None) + len(text.saves) + len(text.crossed) for text in texts)
        return of_texts + len(self._kept)

    @property
    def num_bytes(self) -> int:
        records = sum(0 if text.records is None else int(text.records.nbytes) for text in self._texts.values())
        records += sum(int(kept.records.nbytes) for kept in self._kept.values() if kept.records is not None)
        return records + sum(int(state.nbytes) for state in self._states())

    def work(self, sequence_id: int) -> StateWork:
        """What the pass that was reserved does; asked for again, what is left of it."""
        text = self._texts[sequence_id]
        self._settle(text)
        known = [(end - text.length, state) for end, state in text.saves]
        return StateWork(text.state, text.records, text.pending, text.num_folded, text.rows, known, text.has_run)

    def reserve(self, plan: RowPlan) -> None:
        """Raises CapacityError: there is no memory for another state; nothing was changed."""
        text = self._texts.setdefault(plan.sequence_id, _Text())
        self._settle(text)
        if not text.is_whole or text.length + len(text.pending) != plan.committed_len:
            raise RuntimeError(f"the state of a sequence is not that behind its {plan.committed_len} committed rows")
        firm = plan.committed_len if plan.num_firm is None else plan.num_firm
        num_known = plan.num_known if plan.num_known >= KNOWN_ROWS and firm == plan.committed_len else 0
        num_known = max(0, self._last_border(plan.committed_len + num_known) - plan.committed_len)
        try:
            if num_known:
                num_folded = 0
                self._plan_saves(text, plan.committed_len + num_known, end=plan.committed_len + num_known)
            else:
                num_folded = self._last_border(min(max(0, firm - text.length), len(text.pending)))
                if text.state is None:
                    text.state = self._new_state(is_zero=True)
                self._plan_saves(text, text.length + num_folded)
            rows = self._take_records(text, plan.num_rows - num_known)
        except MemoryError as error:
            self._drop_saves(text)
            raise CapacityError("there is no memory for the states of recurrent layers: lower max_num_seqs") from error
        text.num_folded, text.num_known = num_folded, num_known
        text.rows = [NO_RECORD] * num_known + rows

    def keep_path(self, plan: RowPlan, commit: Commit) -> None:
        text = self._texts[plan.sequence_id]
        self._settle(text)
        num_known, kept = text.num_known, [text.rows[row] for row in commit.rows]
        if num_known > len(kept):
            raise RuntimeError(f"{len(kept)} of {num_known} known rows are to be kept: they stay together")
        kept = kept[num_known:]  # of another path than the first, known rows have records too
        text.is_whole = False
        before, pending = text.pending, text.pending
        if num_known:
            (_, behind), left = text.saves.pop(), text.state
            text.state, text.length, text.pending = behind, plan.committed_len + num_known, kept
            self._give_back(left)
            self._made(text)
            text.free += before
        else:
            text.pending = pending + kept
        text.free += [record for record in text.rows if record != NO_RECORD and record not in kept]
        text.rows, text.num_known, text.num_folded = [], 0, 0
        text.is_whole = True

    def cancel(self, plan: RowPlan) -> None:
        text = self._texts.get(plan.sequence_id)
        if text is not None:
            self._settle(text)
            text.free += [record for record in text.rows if record != NO_RECORD]
            text.rows, text.num_known, text.num_folded = [], 0, 0
            self._drop_saves(text)

    def can_cut(self, sequence_id: int, length: int) -> bool:
        text = self._texts.get(sequence_id)
        if text is not None:
            self._settle(text)
        return length == 0 or (text is not None and text.length <= length <= text.length + len(text.pending))

    def num_reachable(self, links: Sequence[Link]) -> int:
        return next((count for count in range(len(links), 0, -1) if links[count - 1] in self._kept), 0)

    def restart(self, sequence_id: int, length: int, links: Sequence[Link]) -> None:
        if length == 0:
            self.release(sequence_id)
        elif self.can_cut(sequence_id, length):
            text = self._texts[sequence_id]
            text.free += text.pending[length - text.length :]
            del text.pending[length - text.length :]
            for index in [index for index in text.links if (index + 1) * self._block_size > length]:
                del text.links[index]
        else:
            link = links[length // self._block_size - 1]
            self._kept.move_to_end(link)
            kept = self._kept[link]
            try:
                state = self._new_state()
                state[...] = kept.state
            except MemoryError:  # then nobody else can begin with it
                state = self._kept.pop(link).state
            text = _Text(state, kept.length)
            if kept.records is not None:
                text.pending = self._take_records(text, len(kept.records))
                text.records[text.pending] = kept.records
            self.release(sequence_id)
            self._texts[sequence_id] = text

    def remember(self, sequence_id: int, first: int, links: Sequence[Link]) -> None:
        text = self._texts[sequence_id]
        for index, link in enumerate(links, first):
            if index in text.crossed:
                self._keep(text, index, link, text.crossed.pop(index))
            elif (index + 1) * self._block_size > text.length:
                text.links[index] = link
        for index in list(text.crossed):  # blocks that nobody will name any more
            self._give_back(text.crossed.pop(index).state)

    def forget(self, link: Link) -> None:
        self._drop(link)
        for text in self._texts.values():
            for index in [index for index, own in text.links.items() if own == link]:
                del text.links[index]

    def release(self, sequence_id: int) -> None:
        text = self._texts.pop(sequence_id, None)
        if text is not None:
            self._settle(text)
            self._drop_saves(text)
            self._keep_last(text)
            for state in (text.state, *(kept.state for kept in text.crossed.values())):
                self._give_back(state)

    def check(self) -> None:
        """Raise RuntimeError unless every record of every text is pending, of a row, or free, and no state has two owners."""
        for text in self._texts.values():
            records = sorted([*text.pending, *text.free, *(record for record in text.rows if record != NO_RECORD)])
            if records != list(range(0 if text.records is None else len(text.records))):
                raise RuntimeError("records of a text are lost, or used twice")
        owned = [id(state) for state in self._states()]
        if len(set(owned)) < len(owned):
            raise RuntimeError("a state has two owners")

    def _last_border(self, length: int) -> int:
        """Of the grid, in so many rows."""
        return length // self._grid * self._grid

    def _states(self) -> Iterator[Any]:
        yield from self._spare
        yield from (kept.state for kept in self._kept.values())
        for text in self._texts.values():
            if text.state is not None:
                yield text.state
            yield from (kept.state for kept in text.crossed.values())
            yield from (state for _, state in text.saves)

    def _settle(self, text: _Text) -> None:
        """Take note of a pass that has run."""
        if text.has_run[0]:
            text.is_whole = False
            count, text.num_folded = text.num_folded, 0
            text.has_run[0] = 0
            text.length += count
            text.free += text.pending[:count]
            del text.pending[:count]
            text.is_whole = True
            if not text.num_known:
                self._made(text)

    def _made(self, text: _Text) -> None:
        """The states that were to be saved are there."""
        saves, text.saves = text.saves, []
        for end, state in saves:
            index = end // self._block_size - 1
            link, kept = text.links.get(index), _Kept(state, end, is_prompt=text.num_known > 0)
            if link is None:
                text.crossed[index] = kept
            else:
                self._keep(text, index, link, kept)
        for index in [index for index in text.links if (index + 1) * self._block_size <= text.length]:
            del text.links[index]

    def _plan_saves(self, text: _Text, last: int, end: int | None = None) -> None:
        """States behind blocks among the rows up to `last`, those at the stride and the last one, and the one behind row `end`."""
        size = self._block_size
        if self.limits.max_kept:
            ends = list(range((text.length // size + 1) * size, last + 1, size))
            for border in ends:
                if border % self.limits.stride == 0 or border == ends[-1]:
                    text.saves.append((border, self._new_state()))
        if end is not None:
            text.saves.append((end, self._new_state()))

    def _drop_saves(self, text: _Text) -> None:
        while text.saves:
            self._give_back(text.saves.pop()[1])

    def _keep(self, text: _Text, index: int, link: Link, kept: _Kept) -> None:
        """Let others begin with a state; of those behind blocks of an answer, or of one's prompt, only the last stays."""
        if link in self._kept or not self.limits.max_kept:
            self._give_back(kept.state)
            return
        if text.last is not None and kept.is_prompt == text.last_is_prompt:
            self._drop(text.last)
        while len(self._kept) >= self.limits.max_kept:
            self._drop(next(iter(self._kept)))
        self._kept[link] = kept
        text.last = None if (index + 1) * self._block_size % self.limits.stride == 0 else link
        text.last_is_prompt = kept.is_prompt

    def _keep_last(self, text: _Text) -> None:
        """Of a text that ends, its state with the records of the rows up to its last full block, where there is no state behind that."""
        index = (text.length + len(text.pending)) // self._block_size - 1
        count, link = (index + 1) * self._block_size - text.length, text.links.get(index)
        if not text.is_whole or count < 1 or link is None or link in self._kept or not self.limits.max_kept:
            return
        try:
            records = self._make((count, self.record_size))
        except MemoryError:
            return
        records[...] = text.records[text.pending[:count]]
        kept, text.state = _Kept(text.state, text.length, records), None
        self._keep(text, index, link, kept)

    def _drop(self, link: Link) -> None:
        if link in self._kept:
            self._give_back(self._kept.pop(link).state)

    def _new_state(self, *, is_zero: bool = False) -> Any:
        if not self._spare:
            return self._make((self.state_size,))
        state = self._spare.pop()
        if is_zero:
            state[...] = 0
        return state

    def _give_back(self, state: Any) -> None:
        if state is not None:
            self._spare.append(state)

    def _take_records(self, text: _Text, count: int) -> list[int]:
        have = 0 if text.records is None else len(text.records)
        if count > len(text.free):
            grown = max(2 * have, have + count - len(text.free), 4)
            records = self._make((grown, self.record_size))
            if have:
                records[:have] = text.records
            text.records = records
            text.free += range(have, grown)
        return [text.free.pop() for _ in range(count)]
