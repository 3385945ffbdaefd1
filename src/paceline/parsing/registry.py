"""The table of formats in which models write calls of tools and thoughts, and which of them a model uses.

A new format is a file of its own and a line here.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from paceline.errors import ConfigError, RequestError
from paceline.parsing import reasoning
from paceline.parsing.event_sink import EventSink, call_id, short_call_id
from paceline.parsing.output_parser import Markers, OutputParser, ParseMarkup
from paceline.parsing.text_stream import StreamParser, TextStream
from paceline.parsing.tool_call_grammar import ToolCallGrammar
from paceline.parsing.tool_calls import (
    gemma4,
    gemma4_grammar,
    glm,
    granite,
    harmony,
    hermes,
    kimi_k2,
    llama3_json,
    minimax_m2,
    mistral,
    qwen3_coder,
)
from paceline.parsing.tools import Tool
from paceline.tokenizer.tokenizer import Tokenizer

AUTO, NONE, HARMONY = "auto", "none", "harmony"


class BuildCallGrammar(Protocol):
    """Makes what matches one call of any of `tools`, or several calls."""

    def __call__(self, grammar: ToolCallGrammar, tools: Sequence[Tool], *, several: bool) -> str: ...


@dataclass(frozen=True, slots=True)
class ToolCallFormat:
    """How calls are written.

    Attributes:
        markers: where they begin, and who reads them.
        signs: texts of which a chat template has all where its model writes so, but for those that begin with "!": it has none of these.
        tokens: special tokens that belong to the markup, where the model has them.
        grammar: what matches calls.
        opening: the token that begins each call, or all of them; empty where there is none.
        new_id: makes ids of calls.
    """

    markers: Markers
    signs: tuple[str, ...]
    tokens: tuple[str, ...]
    grammar: BuildCallGrammar
    opening: str = ""
    new_id: Callable[[], str] = call_id


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """How thoughts are written; the first attributes as for calls.

    Attributes:
        open, close: what begins and ends them.
        opened: reads on behind a prompt that ends with `open`; None = there is none.
    """

    markers: Markers
    signs: tuple[str, ...]
    tokens: tuple[str, ...]
    open: str = ""
    close: str = ""
    opened: ParseMarkup | None = None


HARMONY_TOKENS = (harmony.START, harmony.CHANNEL, harmony.MESSAGE, harmony.CONSTRAIN, *harmony.ENDS)
_OTHER_CALLS = ("!<arg_key>", "!<invoke", "!<tool_calls>")  # what others write behind <tool_call>
# in the order in which they are looked for: the signs of later ones may stand in templates of earlier ones
TOOL_CALL_FORMATS = {
    HARMONY: ToolCallFormat(Markers(), (harmony.CHANNEL, harmony.MESSAGE), HARMONY_TOKENS, harmony.calls_grammar),
    "gemma4": ToolCallFormat(
        gemma4.MARKERS, (gemma4.OPEN,), (gemma4.OPEN, gemma4.CLOSE, gemma4.QUOTE), gemma4_grammar.calls_grammar, gemma4.OPEN
    ),
    "mistral": ToolCallFormat(
        mistral.MARKERS,
        (mistral.OPEN,),
        (mistral.OPEN, mistral.ARGS, mistral.CALL_ID),
        mistral.calls_grammar,
        mistral.OPEN,
        new_id=short_call_id,
    ),
    "kimi": ToolCallFormat(kimi_k2.MARKERS, (kimi_k2.OPEN, kimi_k2.ARGUMENTS), kimi_k2.TOKENS, kimi_k2.calls_grammar, kimi_k2.OPEN),
    "minimax": ToolCallFormat(
        minimax_m2.MARKERS,
        (minimax_m2.OPEN, minimax_m2.TAGS.function),
        (minimax_m2.OPEN, minimax_m2.CLOSE),
        minimax_m2.calls_grammar,
        minimax_m2.OPEN,
    ),
    "granite3": ToolCallFormat(granite.MARKERS, (granite.OPEN,), (granite.OPEN,), granite.calls_grammar, granite.OPEN),
    "xml": ToolCallFormat(
        qwen3_coder.MARKERS,
        (qwen3_coder.FUNCTION, qwen3_coder.PARAMETER, "!<seed:"),
        (qwen3_coder.OPEN, qwen3_coder.CLOSE),
        qwen3_coder.calls_grammar,
        qwen3_coder.OPEN,
    ),
    "glm": ToolCallFormat(glm.MARKERS, (glm.OPEN, glm.KEY), glm.TOKENS, glm.calls_grammar, glm.OPEN),
    "hermes": ToolCallFormat(hermes.MARKERS, (hermes.OPEN, *_OTHER_CALLS), (hermes.OPEN, hermes.CLOSE), hermes.calls_grammar, hermes.OPEN),
    "llama3": ToolCallFormat(
        llama3_json.MARKERS, ("<|start_header_id|>", '"parameters"'), (llama3_json.PYTHON_TAG,), llama3_json.calls_grammar
    ),
}
REASONING_FORMATS = {
    HARMONY: ReasoningFormat(Markers(), (harmony.CHANNEL, harmony.MESSAGE), HARMONY_TOKENS),
    "gemma4": ReasoningFormat(reasoning.GEMMA4_MARKERS, reasoning.GEMMA4[:1], reasoning.GEMMA4, "<|channel>thought\n", "<channel|>"),
    "mistral": ReasoningFormat(reasoning.MISTRAL_MARKERS, reasoning.MISTRAL[:1], reasoning.MISTRAL, *reasoning.MISTRAL, reasoning.mistral),
    "think": ReasoningFormat(reasoning.THINK_MARKERS, reasoning.THINK[1:], reasoning.THINK, *reasoning.THINK, reasoning.think),
}
TOOL_CALL_PARSERS = (AUTO, NONE, *TOOL_CALL_FORMATS)
REASONING_PARSERS = (AUTO, NONE, *REASONING_FORMATS)


def check_parser_names(tools: str, think: str) -> None:
    """That formats exist, or are to be found out.

    Raises:
        ConfigError: there is no such format.
    """
    for option, name, choices in (("tool_call_parser", tools, TOOL_CALL_PARSERS), ("reasoning_parser", think, REASONING_PARSERS)):
        if name not in choices:
            raise ConfigError(f"{option} is {name!r}: use one of {', '.join(choices)}")


@dataclass(frozen=True, slots=True)
class OutputFormat:
    """What one model writes.

    Attributes:
        tools, think: names in the tables; "none" = it writes no calls, or no thoughts, that we know how to read.
    """

    tools: str
    think: str

    @classmethod
    def of(cls, tokenizer: Tokenizer, tools: str = AUTO, think: str = AUTO) -> "OutputFormat":
        """Those that were named, or that the chat template shows.

        Raises:
            ConfigError: there is no such format, or two do not go together.
        """
        check_parser_names(tools, think)
        try:
            template = "".join(tokenizer.template_source(has_tools=has_tools) for has_tools in (False, True))
        except RequestError:  # it is no text; whoever sends messages is told
            template = ""
        found_tools, found_think = _found(TOOL_CALL_FORMATS, template), _found(REASONING_FORMATS, template)
        chosen = cls(found_tools if tools == AUTO else tools, found_think if think == AUTO else think)
        if HARMONY in (chosen.tools, chosen.think) and not {chosen.tools, chosen.think} <= {HARMONY, NONE}:
            raise ConfigError(
                f"tool_call_parser is {chosen.tools!r} and reasoning_parser {chosen.think!r}: {HARMONY} goes with itself or {NONE} alone"
            )
        return chosen

    @property
    def think_end(self) -> str | None:
        """What ends thoughts; None where it does not end them by a text."""
        return (REASONING_FORMATS[self.think].close or None) if self.think != NONE else None

    def tokens(self, tools: Sequence[Tool]) -> tuple[str, ...]:
        """Special tokens that the reader of an answer has to see."""
        of_calls = TOOL_CALL_FORMATS[self.tools].tokens if self._reads_calls(tools) else ()
        return of_calls + (REASONING_FORMATS[self.think].tokens if self.think != NONE else ())

    def has_opened_thoughts(self, prompt: str) -> bool:
        """Whether a prompt, of which the end is enough, has begun reasoning."""
        think = REASONING_FORMATS[self.think] if self.think != NONE else None
        return think is not None and think.opened is not None and prompt.rstrip().endswith(think.open)

    def sink(self, sample: int, tools: Sequence[Tool], *, several: bool = True) -> EventSink:
        """Takes down a sample."""
        new_id = call_id if self.tools == NONE else TOOL_CALL_FORMATS[self.tools].new_id
        return EventSink(sample, tools, None if several else 1, new_id)

    def reading(self, tools: Sequence[Tool], sink: EventSink, *, in_reasoning: bool) -> StreamParser:
        """Reads one sample.

        Args:
            in_reasoning: whether the prompt has begun reasoning.
        """
        stream, has_calls, has_thoughts = TextStream(), self._reads_calls(tools), self.think != NONE
        if (has_calls and self.tools == HARMONY) or self.think == HARMONY:
            return StreamParser(stream, harmony.HarmonyReader(has_thoughts=has_thoughts, has_calls=has_calls).read(stream, sink))
        think = REASONING_FORMATS[self.think] if has_thoughts else None
        reader = OutputParser(
            think.markers if think else Markers(),
            TOOL_CALL_FORMATS[self.tools].markers if has_calls else Markers(),
            think.opened if think and in_reasoning else None,
        )
        return StreamParser(stream, reader.read(stream, sink))

    def _reads_calls(self, tools: Sequence[Tool]) -> bool:
        return self.tools != NONE and bool(tools)


def _found(formats: "dict[str, ToolCallFormat] | dict[str, ReasoningFormat]", template: str) -> str:
    def has(sign: str) -> bool:
        return sign[1:] not in template if sign.startswith("!") else sign in template

    return next((name for name, one in formats.items() if all(map(has, one.signs))), NONE)
