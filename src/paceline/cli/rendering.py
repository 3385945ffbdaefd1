"""Write streamed text to stdout, coloured by the origin of its tokens on request, and a closing line with statistics."""

import operator
import sys
import time
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rich.console import Console
from rich.segment import Segment, Segments
from rich.style import Style
from rich.text import Text

from paceline.outputs import RequestOutput, StreamChunk
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


class Writer:
    """Writes a stream's text to stdout as it is; on a terminal, control characters become visible ones."""

    def __init__(self) -> None:
        self._on_terminal = sys.stdout.isatty()
        self._at_line_start = True

    def write(self, chunk: StreamChunk) -> None:
        """Write the text of the chunk."""
        self._print(chunk.text)

    def close(self) -> None:
        """End the last line."""
        if not self._at_line_start:
            self._print("\n")

    def _print(self, text: str) -> None:
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

    def __init__(self, detokenizer: "IncrementalDetokenizer") -> None:
        super().__init__()
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
            self._paint(text, origin)

    def close(self) -> None:
        self._mark(None)
        super().close()

    def _split(self, text: str) -> Iterator[tuple[str, TokenOrigin]]:
        """Split released text at token boundaries; a last incomplete character belongs to the last token."""
        while text:
            length, origin = self._pieces.popleft() if self._pieces else (len(text), self._last or TokenOrigin.PLAIN)
            if length > len(text):
                self._pieces.appendleft((length - len(text), origin))
            yield text[:length], origin
            text = text[length:]

    def _paint(self, text: str, origin: TokenOrigin) -> None:
        if not self._in_colour:
            self._mark(origin)
            self._print(text)
            return
        styled = Segment(self._shown(text), Style.parse(STYLES[origin]))  # a Text would be wrapped and have its tabs expanded
        self._console.print(Segments([styled]), end="", soft_wrap=True)
        sys.stdout.flush()
        self._at_line_start = text.endswith("\n")

    def _mark(self, origin: TokenOrigin | None) -> None:
        """Close the bracket of a run that ends here and open that of the one that begins."""
        if not self._in_colour and origin is not self._open:
            closing = MARKS[self._open][1] if self._open else ""
            self._print(closing + (MARKS[origin][0] if origin else ""))
            self._open = origin


def writer_for(llm: "LLM", *, show_drafts: bool) -> Writer:
    """Return a writer for one stream of this model."""
    return DraftWriter(llm.tokenizer.detokenizer()) if show_drafts else Writer()


def legend() -> Text:
    """Return one line that explains how tokens are shown; it names the colours, because it may be read without them."""
    if _in_colour(Console(file=sys.stdout)):
        samples = [(f"{NAMES[origin]} ({style})", style) for origin, style in STYLES.items()]
    else:
        samples = [(f"{MARKS[origin][0]}{NAMES[origin]}{MARKS[origin][1]}", "") for origin in STYLES]
    return Text(", ").join([Text(text, style=style) for text, style in samples])


@dataclass(slots=True)
class Answer:
    """Output of a stream, complete or up to Ctrl-C.

    Attributes:
        text: everything that was written.
        output: the finished request; None when it was interrupted.
        num_tokens, num_steps, decode_s: counted here, because an interrupted request reports nothing.
    """

    text: str = ""
    output: RequestOutput | None = None
    num_tokens: int = 0
    num_steps: int = 0
    decode_s: float = 0.0

    @property
    def interrupted(self) -> bool:
        return self.output is None

    def closing_line(self, *, sampled: bool) -> str:
        """Return statistics in one line; `sampled` adds the seed."""
        if self.output is not None:
            return closing_line(self.output, sampled=sampled)
        parts = [_count(self.num_tokens, "token")]
        if self.num_tokens > 1 and self.decode_s > 0:
            parts.append(f"{(self.num_tokens - 1) / self.decode_s:.1f} tokens/s")
        if self.num_steps:
            parts.append(f"mean acceptance length {self.num_tokens / self.num_steps:.2f}")
        return " | ".join([*parts, "finish reason interrupted"])


def write_stream(stream: Iterable[StreamChunk], writer: Writer) -> Answer:
    """Write a stream as it comes; Ctrl-C ends it, and what was written until then is the answer."""
    answer = Answer()
    first_token_time: float | None = None
    try:
        for chunk in stream:
            now = time.perf_counter()
            first_token_time = now if first_token_time is None else first_token_time
            answer.decode_s = now - first_token_time
            answer.num_tokens += len(chunk.token_ids)
            answer.num_steps += bool(chunk.token_ids)
            answer.text += chunk.text
            answer.output = chunk.output
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


def closing_line(output: RequestOutput, *, sampled: bool) -> str:
    """Return statistics of a finished request in one line; `sampled` adds the seed."""
    stats = output.speculation
    parts = [_count(output.usage.completion_tokens, "token")]
    if output.tokens_per_s > 0:
        parts.append(f"{output.tokens_per_s:.1f} tokens/s")
    parts.append(f"drafter {output.drafter}")
    if output.drafter != "none":
        parts.append(f"mean acceptance length {stats.mean_acceptance_length:.2f}")
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


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
