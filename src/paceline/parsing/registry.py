"""Lists the formats of tool calls and reasoning, and combines the two formats of a model.

Formats have the names of vLLM's parsers where vLLM has one. A new format is a file of its own and one entry here.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from paceline.errors import ConfigError, RequestError
from paceline.parsing import reasoning
from paceline.parsing.events import Event, EventSink, call_id
from paceline.parsing.formats import Format, ParseMarkup, ReasoningFormat
from paceline.parsing.reasoning import ReasoningReader
from paceline.parsing.text_stream import WHITESPACE, MalformedError, Parse, TextStream
from paceline.parsing.tool_calls import (
    apertus,
    cohere,
    deepseek,
    deepseek_dsml,
    functionary,
    functiongemma,
    gemma3,
    gemma4,
    generic,
    gigachat3,
    glm,
    granite,
    granite_20b,
    harmony,
    hermes,
    hunyuan3,
    hunyuan_a13b,
    internlm2,
    kimi_k2,
    kimi_k3,
    lfm2,
    llama3_json,
    minicpm5,
    minimax_m2,
    minimax_m3,
    mistral,
    muse_glimmer,
    nemotron_nano,
    olmo3,
    phi4_mini,
    pythonic,
    qwen3_coder,
    seed_oss,
    smollm3,
    solar_open,
    step3,
    xlam,
)
from paceline.parsing.tools import Tool
from paceline.tokenizer.tokenizer import Tokenizer

AUTO, NONE = "auto", "none"
HARMONY, HARMONY_REASONING, GENERIC = "openai", "openai_gptoss", "generic"
# The first format whose signs are all in a template is the model's. Several may match, so formats with unique marks come first. Those that
# share <tool_call>, <function= and the like follow, the most specific one first.
TOOL_CALL_FORMATS = {
    HARMONY: harmony.FORMAT,
    "gemma4": gemma4.FORMAT,
    "mistral": mistral.FORMAT,
    "kimi_k2": kimi_k2.FORMAT,
    "minimax_m2": minimax_m2.FORMAT,
    "minimax_m3": minimax_m3.FORMAT,
    "kimi_k3": kimi_k3.FORMAT,
    "solar_open": solar_open.FORMAT,
    "gigachat3": gigachat3.FORMAT,
    "gigachat3_message": gigachat3.MESSAGE_FORMAT,
    "step3": step3.FORMAT,
    "phi4_mini_json": phi4_mini.TAGGED_FORMAT,
    "functools": phi4_mini.FUNCTOOLS_FORMAT,
    "nemotron_json": nemotron_nano.FORMAT,
    "deepseek_v3": deepseek.FORMAT_V3,
    "deepseek_v31": deepseek.FORMAT_V31,
    "deepseek_v4": deepseek_dsml.FORMAT_V4,
    "deepseek_v32": deepseek_dsml.FORMAT_V32,
    "cohere_command3": cohere.FORMAT,
    "command_r": cohere.COMMAND_R_FORMAT,
    "internlm": internlm2.FORMAT,
    "hy_v3": hunyuan3.FORMAT,
    "hy_v3_opensource": hunyuan3.SUFFIX_FORMAT,
    "minimax_m1": hunyuan_a13b.MINIMAX_M1_FORMAT,
    "jamba": hunyuan_a13b.JAMBA_FORMAT,
    "hunyuan_a13b": hunyuan_a13b.FORMAT,
    "functionary_v31": functionary.FORMAT_V31,
    "functionary_v32": functionary.FORMAT_V32,
    "granite": granite.FORMAT,
    "qwen3_coder": qwen3_coder.FORMAT,
    "glm45": glm.FORMAT,
    "lfm2": lfm2.FORMAT,
    "functiongemma": functiongemma.FORMAT,
    "gemma3": gemma3.FORMAT,
    "seed_oss": seed_oss.FORMAT,
    "muse_glimmer": muse_glimmer.FORMAT,
    "olmo3": olmo3.FORMAT,
    "minicpm5": minicpm5.FORMAT,
    "apertus": apertus.FORMAT,
    "smollm3": smollm3.FORMAT,
    "hermes": hermes.FORMAT,
    "llama4_pythonic": pythonic.LLAMA4_FORMAT,
    "pythonic": pythonic.FORMAT,
    "granite-20b-fc": granite_20b.FORMAT,
    "xlam": xlam.FORMAT,
    "llama3_json": llama3_json.FORMAT,
    GENERIC: generic.FORMAT,
}
REASONING_FORMATS = {
    HARMONY_REASONING: harmony.REASONING_FORMAT,
    "gemma4": gemma4.REASONING_FORMAT,
    "mistral": mistral.REASONING_FORMAT,
    "seed_oss": seed_oss.REASONING_FORMAT,
    "muse_glimmer": muse_glimmer.REASONING_FORMAT,
    "apertus": apertus.REASONING_FORMAT,
    "cohere_command3": cohere.REASONING_FORMAT,
    "granite": granite.REASONING_FORMAT,
    "minimax_m3": minimax_m3.REASONING_FORMAT,
    "kimi_k3": kimi_k3.REASONING_FORMAT,
    "solar_open": solar_open.REASONING_FORMAT,
    "hy_v3_opensource": hunyuan3.SUFFIX_REASONING_FORMAT,
    "functionary_v32": functionary.ANSWER_FORMAT,
    "apriel": reasoning.APRIEL_FORMAT,
    "ernie45": reasoning.ERNIE45_FORMAT,
    "hunyuan_a13b": hunyuan_a13b.REASONING_FORMAT,
    "qwen3": reasoning.THINK_FORMAT,
}
TOOL_CALL_SYNONYMS = {
    "harmony": HARMONY, "kimi": "kimi_k2", "minimax": "minimax_m2", "granite3": "granite", "xml": "qwen3_coder",
    "qwen3_xml": "qwen3_coder", "glm": "glm45", "glm47": "glm45", "llama3": "llama3_json", "llama4_json": "llama3_json",
}  # fmt: skip
"""Other names of tool-call formats, with the names in the table."""
REASONING_SYNONYMS = {
    "harmony": HARMONY_REASONING,
    **dict.fromkeys(("think", "deepseek_r1", "deepseek_v3", "glm45", "kimi_k2", "minimax_m2", "nemotron_v3", "holo2", "step3"), "qwen3"),
}
"""Other names of reasoning formats, with the names in the table."""
_NO_MARKUP = Format({}, (), ())
TOOL_CALL_PARSERS = (AUTO, NONE, *TOOL_CALL_FORMATS)
REASONING_PARSERS = (AUTO, NONE, *REASONING_FORMATS)


def check_parser_names(tool_call_parser: str, reasoning_parser: str) -> tuple[str, str]:
    """Check the names of two parsers and return them, a synonym as the name it stands for.

    Raises:
        ConfigError: there is no such parser.
    """
    tool_call_name = TOOL_CALL_SYNONYMS.get(tool_call_parser, tool_call_parser)
    reasoning_name = REASONING_SYNONYMS.get(reasoning_parser, reasoning_parser)
    if tool_call_name not in TOOL_CALL_PARSERS:
        raise ConfigError(f"tool_call_parser is {tool_call_parser!r}: use one of {', '.join(TOOL_CALL_PARSERS)}")
    if reasoning_name not in REASONING_PARSERS:
        raise ConfigError(f"reasoning_parser is {reasoning_parser!r}: use one of {', '.join(REASONING_PARSERS)}")
    return tool_call_name, reasoning_name


def _format_of_template(formats: Mapping[str, Format], template: str) -> str | None:
    """Return the name of the first format that a chat template shows."""
    return next((name for name, one in formats.items() if one.is_shown_by(template)), None)


@dataclass(frozen=True, slots=True)
class OutputParser:
    """Parses a whole answer.

    White space between markup, and between markup and text, is markup.

    Args:
        reasoning, calls: the formats of either.
        opened: parses reasoning that the prompt has begun; None = it has not.
    """

    reasoning: Format
    calls: Format
    opened: ParseMarkup | None = None

    def read(self, stream: TextStream, sink: EventSink) -> Parse[None]:
        """Parse to the end of the text."""
        follows_markup = self.opened is not None and (yield from self._parse(self.opened, stream, sink))
        while True:
            parser = yield from self._parser_of_first(stream, sink, follows_markup=follows_markup)
            if parser is None:
                parsers = self._parsers_anywhere(sink)
                marker = yield from stream.emit_until(tuple(parsers), sink.text, held=WHITESPACE if parsers else "")
                if marker is None:
                    return
                stream.at += len(marker)
                parser = parsers[marker]
            follows_markup = yield from self._parse(parser, stream, sink)

    def _parser_of_first(self, stream: TextStream, sink: EventSink, *, follows_markup: bool) -> Parse[ParseMarkup | None]:
        """Pass the mark before the text and return its parser. White space is passed with it; after markup it is passed in any case."""
        parsers = self._parsers_anywhere(sink)
        if not sink.has_text and not sink.num_calls:
            parsers |= {} if follows_markup else self.reasoning.first
            parsers |= self.calls.first if sink.can_call else {}
        if not parsers and not follows_markup:
            return None
        yield from stream.skip()
        marker = yield from stream.one_of(tuple(parsers))
        if follows_markup:
            stream.mark_emitted()
        if marker is None:
            stream.at = stream.num_emitted
            return None
        stream.at += len(marker)
        return parsers[marker]

    def _parsers_anywhere(self, sink: EventSink) -> dict[str, ParseMarkup]:
        return {**self.reasoning.anywhere, **(self.calls.anywhere if sink.can_call else {})}

    def _parse(self, parser: ParseMarkup, stream: TextStream, sink: EventSink) -> Parse[bool]:
        """Return whether markup was parsed; otherwise its text was emitted."""
        begin = stream.position
        try:
            if isinstance(parser, ReasoningReader):
                yield from parser(stream, sink, dict(self.calls.anywhere) if sink.can_call else {})
            else:
                yield from parser(stream, sink)
            return True
        except MalformedError:
            stream.pass_to(begin)  # a parser may go back to the mark, which is text now
            sink.text(stream.unemitted)
            return False
        finally:
            stream.mark_emitted()


@dataclass(slots=True)
class OutputStream:
    """Parses one sample whose text arrives in pieces.

    Attributes:
        sink: collects the events; has the numbers of calls.
        stream, reading: the text, and the parser that reads it.
        is_done: whether the parser has read all text.
    """

    sink: EventSink
    stream: TextStream
    reading: Parse[None]
    is_done: bool = field(default=False, init=False)

    def push(self, text: str) -> list[Event]:
        """Return the events of the next piece of text."""
        self.stream.add(text)
        return self._resume() if text else []

    def finish(self) -> list[Event]:
        """Return the last events, as no more text comes."""
        self.stream.has_ended = True
        return self._resume()

    def _resume(self) -> list[Event]:
        if not self.is_done:
            self.is_done = next(self.reading, True) is True
        return self.sink.take()


@dataclass(frozen=True, slots=True)
class OutputFormat:
    """The formats of one model.

    Attributes:
        tool_call_parser, reasoning_parser: names in the tables; "none" = calls or reasoning are not parsed.

    Raises:
        ConfigError: there is no such parser.
    """

    tool_call_parser: str
    reasoning_parser: str

    def __post_init__(self) -> None:
        names = check_parser_names(self.tool_call_parser, self.reasoning_parser)
        for attribute, name in zip(("tool_call_parser", "reasoning_parser"), names, strict=True):
            object.__setattr__(self, attribute, name)

    @classmethod
    def of(cls, tokenizer: Tokenizer, tool_call_parser: str = AUTO, reasoning_parser: str = AUTO) -> "OutputFormat":
        """Return the formats that are named, or that the chat template of a tokenizer shows.

        Raises:
            ConfigError: there is no such parser, or the two do not go together.
        """
        try:
            template = "".join(tokenizer.template_source(has_tools=has_tools) for has_tools in (False, True))
        except RequestError:  # no template: `Tokenizer.render_chat` refuses messages
            template = ""
        return cls.of_template(template, tool_call_parser, reasoning_parser)

    @classmethod
    def of_template(cls, template: str, tool_call_parser: str = AUTO, reasoning_parser: str = AUTO) -> "OutputFormat":
        """Return the formats that are named, or that a chat template shows; a template without a known format has the generic one.

        Raises:
            ConfigError: as for `of`.
        """
        tool_call_name, reasoning_name = check_parser_names(tool_call_parser, reasoning_parser)
        if tool_call_name == AUTO:
            tool_call_name = _format_of_template(TOOL_CALL_FORMATS, template) or (GENERIC if template else NONE)
        if reasoning_name == AUTO:
            reasoning_name = _format_of_template(REASONING_FORMATS, template) or NONE
        if (tool_call_name == HARMONY and reasoning_name not in (HARMONY_REASONING, NONE)) or (
            reasoning_name == HARMONY_REASONING and tool_call_name not in (HARMONY, NONE)
        ):
            raise ConfigError(
                f"tool_call_parser {tool_call_name!r} and reasoning_parser {reasoning_name!r} do not go together: "
                f"use {HARMONY!r} with {HARMONY_REASONING!r}, or {NONE!r} for either"
            )
        return cls(tool_call_name, reasoning_name)

    @property
    def reasoning_format(self) -> ReasoningFormat | None:
        """The format of reasoning; None if reasoning is not parsed."""
        return REASONING_FORMATS.get(self.reasoning_parser)

    @property
    def reasoning_end(self) -> str | None:
        """The mark after reasoning; None if there is none."""
        return (self.reasoning_format.close or None) if self.reasoning_format else None

    def tokens(self, tools: Sequence[Tool]) -> tuple[str, ...]:
        """Return the special tokens that the parser of an answer needs to see."""
        of_calls = TOOL_CALL_FORMATS[self.tool_call_parser].tokens if tools and self.tool_call_parser != NONE else ()
        return of_calls + (self.reasoning_format.tokens if self.reasoning_format else ())

    def has_opened_reasoning(self, prompt: str) -> bool:
        """Return whether a prompt, or the end of one, begins reasoning."""
        one = self.reasoning_format
        return one is not None and one.opened is not None and prompt.rstrip().endswith(one.open)

    def stream(
        self,
        tools: Sequence[Tool],
        *,
        several: bool = True,
        in_reasoning: bool = False,
        parses_calls: bool | None = None,
    ) -> OutputStream:
        """Return a parser of one sample.

        Args:
            tools: those that the model was shown.
            several: whether the answer may have more than one call.
            in_reasoning: whether the prompt has begun reasoning.
            parses_calls: whether calls are parsed; None = if there are tools.
        """
        calls = TOOL_CALL_FORMATS.get(self.tool_call_parser)
        sink = EventSink(tools, None if several else 1, calls.new_id if calls else call_id)
        if not (tools if parses_calls is None else parses_calls):
            calls = None
        stream, one = TextStream(), self.reasoning_format
        if self.reasoning_parser == HARMONY_REASONING or (calls and self.tool_call_parser == HARMONY):
            reader = harmony.HarmonyReader(has_reasoning=one is not None, has_calls=calls is not None)
            return OutputStream(sink, stream, reader.read(stream, sink))
        parser = OutputParser(one or _NO_MARKUP, calls or _NO_MARKUP, one.opened if one and in_reasoning else None)
        return OutputStream(sink, stream, parser.read(stream, sink))
