"""Write streamed text to stdout, folded between words and coloured by the origin of its tokens on request, and a closing line."""

import operator
import re
import shutil
import sys
import time
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import groupby
from typing import TYPE_CHECKING

from rich.cells import cell_len
from rich.console import Console
from rich.segment import Segment, Segments
from rich.style import Style
from rich.text import Text

from paceline.cli.reporting import print_notice
from paceline.outputs import RequestOutput, StreamChunk
from paceline.sampling.params import SamplingParams
from paceline.speculation.request import TokenOrigin

if TYPE_CHECKING:
    from paceline.llm import LLM
    from paceline.tokenizer.tokenizer import IncrementalDetokenizer

# Distinguishable without colours: plain, bold, underlined.
STYLES = {TokenOrigin.ACCEPTED: "green", TokenOrigin.BONUS: "bold", TokenOrigin.PLAIN: "yellow underline"}
MARKS = {TokenOrigin.ACCEPTED: ("[", "]"), TokenOrigin.BONUS: ("", ""), TokenOrigin.PLAIN: ("{", "}")}
NAMES = {TokenOrigin.ACCEPTED: "accepted draft", TokenOrigin.BONUS: "bonus token", TokenOrigin.PLAIN: "plain token"}
# A model's text must not move the cursor, set the title or make the terminal type something.
CONTROLS_TO_PICTURES = {code: 0x2400 + code for code in range(32) if chr(code) not in "\n\t"}
CONTROLS_TO_PICTURES |= {0x7F: 0x2421} | dict.fromkeys(range(0x80, 0xA0), 0xFFFD)


Piece = tuple[str, str]
"""A text and its style."""
_UNITS = re.compile(r"\s|[^\s]")


class WordWrap:
    """Folds a stream between words. A word is held back until it is complete, because only then is it known whether it fits the line."""

    def __init__(self) -> None:
        self._column = 0
        self._held: list[Piece] = []
        self._held_width = 0
        self._is_cut = False  # the word's beginning is written already

    def push(self, text: str, style: str) -> Iterator[Piece]:
        """Add text and yield the pieces that can be written."""
        width = shutil.get_terminal_size().columns
        for unit in _UNITS.findall(text):
            if unit.isspace():
                yield from self.flush(width)
                yield from self._space(unit, style, width)
                self._is_cut = False
                continue
            cells = cell_len(unit)
            if self._held_width + cells > width:  # longer than a line: the terminal folds it
                yield from self.flush(width)
                self._is_cut = True
            self._held.append((unit, style))
            self._held_width += cells
            if cells > 1:  # scripts with wide characters have no spaces
                yield from self.flush(width)

    def flush(self, width: int | None = None) -> Iterator[Piece]:
        """Return the held word, on a new line if it does not fit this one."""
        if not self._held:
            return
        limit = shutil.get_terminal_size().columns if width is None else width
        if self._column > 0 and not self._is_cut and self._column + self._held_width > limit:
            self._column = 0
            yield "\n", ""
        yield from self._held
        self._column = (self._column + self._held_width - 1) % limit + 1
        self._held, self._held_width = [], 0

    def _space(self, unit: str, style: str, width: int) -> Iterator[Piece]:
        cells = 8 - self._column % 8 if unit == "\t" else 1
        if unit == "\n" or self._column + cells > width:
            self._column = 0
            yield "\n", ""
        else:
            self._column += cells
            yield unit, style


class Writer:
    """Writes a stream's text to stdout as it is; on a terminal, control characters become visible ones.

    Args:
        wraps: whether lines are folded between words on a terminal.
    """

    def __init__(self, *, wraps: bool = False) -> None:
        self._on_terminal = sys.stdout.isatty()
        self._at_line_start = True
        self._wrap = WordWrap() if wraps and self._on_terminal else None

    def write(self, chunk: StreamChunk) -> None:
        self._put(chunk.text)

    def close(self) -> None:
        """End the last line."""
        if self._wrap is not None:
            self._emit_all(self._wrap.flush())
        if not self._at_line_start:
            self._emit("\n", "")

    def _put(self, text: str, style: str = "") -> None:
        self._emit_all([(text, style)] if self._wrap is None else self._wrap.push(text, style))

    def _emit_all(self, pieces: Iterable[Piece]) -> None:
        """Write pieces; neighbours of one style together."""
        for style, group in groupby(pieces, key=operator.itemgetter(1)):
            self._emit("".join(text for text, _ in group), style)

    def _emit(self, text: str, style: str) -> None:
        if text:
            sys.stdout.write(self._shown(text))
            sys.stdout.flush()
            self._at_line_start = text.endswith("\n")

    def _shown(self, text: str) -> str:
        return text.translate(CONTROLS_TO_PICTURES) if self._on_terminal else text


class DraftWriter(Writer):
    """Writes the same text and shows where each token came from: by style, or by brackets where there are no colours.

    The text is the chunks' own, so a stop string is cut off as it should be; the tokens only determine how long each piece of it is. A
    token that ends inside a character has no piece of its own: the token that completes the character has it.
    """

    def __init__(self, detokenizer: "IncrementalDetokenizer", *, wraps: bool = False) -> None:
        super().__init__(wraps=wraps)
        self._detokenizer = detokenizer
        self._console = Console(file=sys.stdout, highlight=False)
        self._in_colour = _in_colour(self._console)
        self._pieces: deque[tuple[int, TokenOrigin]] = deque()  # characters not yet released, by origin
        self._last: TokenOrigin | None = None
        self._open: TokenOrigin | None = None  # whose bracket is open

    def write(self, chunk: StreamChunk) -> None:
        for token_id, origin in zip(chunk.token_ids, chunk.origins, strict=True):
            self._last = origin
            text = self._detokenizer.push(token_id)
            if text:
                self._pieces.append((len(text), origin))
        for text, origin in self._split(chunk.text):
            self._bracket(origin)
            self._put(text, STYLES[origin] if self._in_colour else "")

    def close(self) -> None:
        self._bracket(None)
        super().close()

    def _split(self, text: str) -> Iterator[tuple[str, TokenOrigin]]:
        """Split released text at token boundaries; a last incomplete character belongs to the last token."""
        while text:
            length, origin = self._pieces.popleft() if self._pieces else (len(text), self._last or TokenOrigin.PLAIN)
            if length > len(text):
                self._pieces.appendleft((length - len(text), origin))
            yield text[:length], origin
            text = text[length:]

    def _emit(self, text: str, style: str) -> None:
        if not style or not text:
            super()._emit(text, style)
            return
        styled = Segment(self._shown(text), Style.parse(style))  # a Text would be wrapped and have its tabs expanded
        self._console.print(Segments([styled]), end="", soft_wrap=True)
        sys.stdout.flush()
        self._at_line_start = text.endswith("\n")

    def _bracket(self, origin: TokenOrigin | None) -> None:
        """Close the bracket of the previous run of tokens and open that of the next."""
        if not self._in_colour and origin is not self._open:
            closing = MARKS[self._open][1] if self._open else ""
            self._put(closing + (MARKS[origin][0] if origin else ""))
            self._open = origin


def writer_for(llm: "LLM", *, show_drafts: bool, wraps: bool = False) -> Writer:
    """Return a writer for one stream of this model."""
    return DraftWriter(llm.tokenizer.detokenizer(), wraps=wraps) if show_drafts else Writer(wraps=wraps)


def legend() -> Text:
    """Return one line that explains how tokens are shown; it names the colours, because it may be read without them."""
    if _in_colour(Console(file=sys.stdout)):
        samples = [(f"{NAMES[origin]} ({style})", style) for origin, style in STYLES.items()]
    else:
        samples = [(f"{MARKS[origin][0]}{NAMES[origin]}{MARKS[origin][1]}", "") for origin in STYLES]
    return Text(", ").join([Text(text, style=style) for text, style in samples])


@dataclass(slots=True)
class Answer:
    """One streamed answer, complete or up to Ctrl-C.

    Attributes:
        output: the finished request; None when it was interrupted.
        decode_s: time since the first token, measured here because an interrupted request reports nothing.
        chunks: of the stream, as they were written.
    """

    output: RequestOutput | None = None
    decode_s: float = 0.0
    chunks: list[StreamChunk] = field(default_factory=list)

    @property
    def text(self) -> str:
        return "".join(chunk.text for chunk in self.chunks)

    @property
    def interrupted(self) -> bool:
        return self.output is None

    def closing_line(self) -> str:
        """Return the number of tokens and their speed in one short line."""
        output = self.output
        if output is None:
            counts = [len(chunk.token_ids) for chunk in self.chunks if chunk.token_ids]
            num_tokens = sum(counts)
            speed = (num_tokens - 1) / self.decode_s if num_tokens > 1 and self.decode_s > 0 else 0.0
            return ", ".join([*_speed(num_tokens, speed, num_tokens / max(1, len(counts))), "interrupted"])
        per_step = output.speculation.mean_acceptance_length if output.drafter != "none" else None
        parts = _speed(output.usage.completion_tokens, output.tokens_per_s, per_step)
        return ", ".join(parts + ["cut at the token limit"] * (output.finish_reason == "length"))


def write_stream(stream: Iterable[StreamChunk], writer: Writer) -> Answer:
    """Write a stream as it comes; Ctrl-C ends it, and what was written until then is the answer."""
    answer = Answer()
    first_token_time: float | None = None
    try:
        for chunk in stream:
            now = time.perf_counter()
            first_token_time = now if first_token_time is None else first_token_time
            answer.decode_s = now - first_token_time
            answer.output = chunk.output
            answer.chunks.append(chunk)
            writer.write(chunk)
    except KeyboardInterrupt:
        answer.output = None
    finally:
        # a generator that is left alone frees its cache blocks only when it is collected
        close = getattr(stream, "close", None)
        if close is not None:
            with suppress(KeyboardInterrupt):
                close()
        writer.close()
    return answer


def print_statistics(llm: "LLM", answer: Answer, params: SamplingParams, *, is_short: bool, is_detailed: bool) -> None:
    """Print the short line after an answer, and the details of a complete one."""
    if is_short:
        print_notice(answer.closing_line())
    if is_detailed and answer.output is not None:
        for line in (details(answer.output, sampled=not params.is_greedy), *llm.explain(answer.output)):
            print_notice(line)


def details(output: RequestOutput, *, sampled: bool) -> str:
    """Return statistics of a finished request's drafts in one line; `sampled` adds the seed."""
    stats = output.speculation
    parts = [f"drafter {output.drafter}"]
    if output.drafter != "none":
        parts.append(f"acceptance rate {stats.acceptance_rate:.0%} ({stats.num_accepted_tokens} of {stats.num_draft_tokens} drafted)")
    parts += [_plain_steps(output), f"finish reason {output.finish_reason}", f"numerics {output.numerics}"]
    if sampled:
        parts.append(f"seed {output.seed}")
    return " | ".join(parts)


def _in_colour(console: Console) -> bool:
    return console.is_terminal and console.color_system is not None and not console.no_color


def _plain_steps(output: RequestOutput) -> str:
    stats = output.speculation
    by_count = sorted(stats.skip_counts.items(), key=operator.itemgetter(1), reverse=True)
    reasons = ", ".join(f"{reason.description}: {count}" for reason, count in by_count)
    return f"plain steps {stats.plain_steps} of {stats.steps}" + (f" ({reasons})" if reasons else "")


def _speed(num_tokens: int, tokens_per_s: float, tokens_per_step: float | None) -> list[str]:
    parts = ["1 token" if num_tokens == 1 else f"{num_tokens} tokens"]
    if tokens_per_s > 0:
        parts.append(f"{tokens_per_s:.{0 if tokens_per_s >= 100 else 1}f} tokens/s")
    return parts if tokens_per_step is None else [*parts, f"{tokens_per_step:.1f} tokens a step"]


def drafters_of(answer: Answer) -> str:
    """Return one line on who drafted the tokens of an answer."""
    drafted, accepted = Counter[str](), Counter[str]()
    for step in (step for chunk in answer.chunks for step in chunk.steps):
        drafted.update(step.sources)
        accepted.update(step.sources[node - 1] for node in step.accepted_nodes)
    shares = [f"{name} {accepted[name]} accepted of {count} drafted" for name, count in drafted.most_common()]
    return ", ".join(shares) or "no tokens were drafted"
