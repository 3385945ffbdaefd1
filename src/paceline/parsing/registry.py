"""The table of formats in which models write tool calls and reasoning, and the two formats of one model.

Formats have the names of vLLM's parsers where vLLM has one. A new format is a file of its own and one entry here.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from paceline.errors import ConfigError, RequestError
from paceline.parsing import answer_tags, reasoning
from paceline.parsing.detection import format_of_template
from paceline.parsing.event_sink import EventSink, call_id, short_call_id
from paceline.parsing.events import Event
from paceline.parsing.formats import ReasoningFormat as ReasoningFormat
from paceline.parsing.formats import ToolCallFormat as ToolCallFormat
from paceline.parsing.json_call_list import JsonCallList
from paceline.parsing.output_parser import Markers, OutputParser
from paceline.parsing.text_stream import StreamParser, TextStream
from paceline.parsing.tool_calls import (
    apertus,
    cohere,
    deepseek,
    deepseek_dsml,
    functionary,
    functiongemma,
    gemma3,
    gemma4,
    gemma4_grammar,
    generic,
    glm,
    granite,
    granite_20b,
    harmony,
    hermes,
    hunyuan3,
    hunyuan_a13b,
    internlm2,
    kimi_k2,
    lfm2,
    llama3_json,
    minicpm5,
    minimax_m2,
    mistral,
    muse_glimmer,
    nemotron_nano,
    olmo3,
    phi4_mini,
    pythonic,
    qwen3_coder,
    seed_oss,
    smollm3,
    xlam,
)
from paceline.parsing.tools import Tool
from paceline.tokenizer.tokenizer import Tokenizer

AUTO, NONE = "auto", "none"
HARMONY, HARMONY_REASONING = "openai", "openai_gptoss"
GENERIC = "generic"


def _json_list(calls: JsonCallList, signs: tuple[str, ...], tokens: tuple[str, ...]) -> ToolCallFormat:
    """Return the format of JSON calls after the first of `tokens`."""
    return ToolCallFormat(calls.markers, signs, tokens, calls.calls_grammar, tokens[0])


HARMONY_TOKENS = (harmony.START, harmony.CHANNEL, harmony.MESSAGE, harmony.CONSTRAIN, *harmony.ENDS)
_OTHER_CALLS = ("!<arg_key>", "!<invoke", "!<tool_calls>")  # formats that write other things after <tool_call>
# in the order of detection: templates of earlier formats may have the signs of later ones
TOOL_CALL_FORMATS = {
    HARMONY: ToolCallFormat(
        Markers(), (harmony.CHANNEL, harmony.MESSAGE), HARMONY_TOKENS, harmony.calls_grammar, text_signs=harmony.TEXT_SIGNS
    ),
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
    "kimi_k2": ToolCallFormat(kimi_k2.MARKERS, (kimi_k2.OPEN, kimi_k2.ARGUMENTS), kimi_k2.TOKENS, kimi_k2.calls_grammar, kimi_k2.OPEN),
    "minimax_m2": ToolCallFormat(
        minimax_m2.MARKERS,
        (minimax_m2.OPEN, minimax_m2.TAGS.function),
        (minimax_m2.OPEN, minimax_m2.CLOSE),
        minimax_m2.calls_grammar,
        minimax_m2.OPEN,
    ),
    "phi4_mini_json": _json_list(phi4_mini.TAGGED, ("<|/tool|>",), phi4_mini.TOKENS),
    "functools": ToolCallFormat(phi4_mini.FUNCTOOLS.markers, ("functools[",), phi4_mini.TOKENS, phi4_mini.FUNCTOOLS.calls_grammar),
    "nemotron_json": _json_list(nemotron_nano.CALLS, (nemotron_nano.OPEN,), (nemotron_nano.OPEN, nemotron_nano.CLOSE)),
    "deepseek_v3": ToolCallFormat(deepseek.MARKERS, (deepseek.OPEN, "```json"), deepseek.TOKENS, deepseek.calls_grammar_v3, deepseek.OPEN),
    "deepseek_v31": ToolCallFormat(deepseek.MARKERS, (deepseek.OPEN,), deepseek.TOKENS, deepseek.calls_grammar_v31, deepseek.OPEN),
    "deepseek_v4": ToolCallFormat(
        deepseek_dsml.MARKERS, (deepseek_dsml.DSML, "tool_calls>"), (deepseek_dsml.DSML,), deepseek_dsml.calls_grammar_v4
    ),
    "deepseek_v32": ToolCallFormat(deepseek_dsml.MARKERS, (deepseek_dsml.DSML,), (deepseek_dsml.DSML,), deepseek_dsml.calls_grammar_v32),
    "cohere_command3": ToolCallFormat(cohere.CALLS.markers, (cohere.OPEN,), (cohere.OPEN, cohere.CLOSE), cohere.calls_grammar, cohere.OPEN),
    "command_r": ToolCallFormat(cohere.COMMAND_R.markers, ("json-formatted list of actions",), (), cohere.COMMAND_R.calls_grammar),
    "internlm": _json_list(internlm2.CALLS, (internlm2.START, internlm2.PLUGIN), internlm2.TOKENS),
    "hy_v3": ToolCallFormat(hunyuan3.MARKERS, (hunyuan3.OPEN, hunyuan3.KEY), hunyuan3.TOKENS, hunyuan3.calls_grammar, hunyuan3.OPEN),
    "jamba": _json_list(hunyuan_a13b.JAMBA_CALLS, (hunyuan_a13b.OPEN, "<|bom|>"), hunyuan_a13b.TOKENS),
    "hunyuan_a13b": ToolCallFormat(
        hunyuan_a13b.MARKERS, (hunyuan_a13b.OPEN,), hunyuan_a13b.TOKENS, hunyuan_a13b.CALLS.calls_grammar, hunyuan_a13b.OPEN
    ),
    "functionary_v31": ToolCallFormat(
        functionary.MARKERS_V31, (functionary.FUNCTION, "!<parameter=", "!<seed:"), (), functionary.calls_grammar_v31
    ),
    "functionary_v32": ToolCallFormat(functionary.MARKERS_V32, (">>>all",), (), functionary.calls_grammar_v32),
    "granite": _json_list(granite.CALLS, (granite.OPEN,), (granite.OPEN,)),
    "qwen3_coder": ToolCallFormat(
        qwen3_coder.MARKERS,
        (qwen3_coder.FUNCTION, qwen3_coder.PARAMETER, "!<seed:"),
        (qwen3_coder.OPEN, qwen3_coder.CLOSE),
        qwen3_coder.calls_grammar,
        qwen3_coder.OPEN,
    ),
    "glm45": ToolCallFormat(glm.MARKERS, (glm.OPEN, glm.KEY), glm.TOKENS, glm.calls_grammar, glm.OPEN),
    "lfm2": ToolCallFormat(lfm2.MARKERS, lfm2.SIGNS, (lfm2.OPEN, lfm2.CLOSE), lfm2.calls_grammar, lfm2.OPEN),
    "functiongemma": ToolCallFormat(
        functiongemma.MARKERS,
        (functiongemma.OPEN,),
        (functiongemma.OPEN, functiongemma.CLOSE, functiongemma.QUOTE),
        functiongemma.calls_grammar,
        functiongemma.OPEN,
    ),
    "gemma3": ToolCallFormat(gemma3.MARKERS, (gemma3.TOOL_CODE,), (), gemma3.calls_grammar),
    "seed_oss": ToolCallFormat(seed_oss.MARKERS, (seed_oss.OPEN,), (seed_oss.OPEN, seed_oss.CLOSE), seed_oss.calls_grammar, seed_oss.OPEN),
    "muse_glimmer": ToolCallFormat(muse_glimmer.MARKERS, (muse_glimmer.OPEN,), muse_glimmer.TOKENS, muse_glimmer.calls_grammar),
    "olmo3": ToolCallFormat(olmo3.MARKERS, (olmo3.OPEN, "!<invoke"), (), olmo3.calls_grammar),
    "minicpm5": ToolCallFormat(minicpm5.MARKERS, minicpm5.SIGNS, (), minicpm5.calls_grammar),
    "apertus": ToolCallFormat(apertus.MARKERS, (apertus.OPEN,), (apertus.OPEN, apertus.CLOSE), apertus.calls_grammar, apertus.OPEN),
    "smollm3": ToolCallFormat(smollm3.MARKERS, (hermes.OPEN, smollm3.CODE), (hermes.OPEN, hermes.CLOSE), hermes.calls_grammar, hermes.OPEN),
    "hermes": ToolCallFormat(hermes.MARKERS, (hermes.OPEN, *_OTHER_CALLS), (hermes.OPEN, hermes.CLOSE), hermes.calls_grammar, hermes.OPEN),
    "llama4_pythonic": ToolCallFormat(pythonic.LLAMA4_MARKERS, pythonic.LLAMA4_SIGNS, pythonic.LLAMA4_TOKENS, pythonic.calls_grammar),
    "pythonic": ToolCallFormat(pythonic.MARKERS, pythonic.SIGNS, (llama3_json.PYTHON_TAG,), pythonic.calls_grammar),
    "granite-20b-fc": _json_list(granite_20b.CALLS, (granite_20b.OPEN,), (granite_20b.OPEN,)),
    "xlam": ToolCallFormat(xlam.MARKERS, ("make calls in a single JSON array",), (), xlam.CALLS.calls_grammar),
    "llama3_json": ToolCallFormat(
        llama3_json.MARKERS, ("<|start_header_id|>", '"parameters"'), (llama3_json.PYTHON_TAG,), llama3_json.calls_grammar
    ),
    GENERIC: ToolCallFormat(generic.MARKERS, (), (), generic.calls_grammar),
}
REASONING_FORMATS = {
    HARMONY_REASONING: ReasoningFormat(Markers(), (harmony.CHANNEL, harmony.MESSAGE), HARMONY_TOKENS),
    "gemma4": ReasoningFormat(reasoning.GEMMA4_MARKERS, reasoning.GEMMA4[:1], reasoning.GEMMA4, "<|channel>thought\n", "<channel|>"),
    "mistral": ReasoningFormat(reasoning.MISTRAL_MARKERS, reasoning.MISTRAL[:1], reasoning.MISTRAL, *reasoning.MISTRAL, reasoning.mistral),
    "seed_oss": ReasoningFormat(
        seed_oss.THINK_MARKERS, seed_oss.THINK[:1], (*seed_oss.THINK, *seed_oss.BUDGET), *seed_oss.THINK, seed_oss.read_reasoning
    ),
    "muse_glimmer": ReasoningFormat(
        muse_glimmer.THINK_MARKERS,
        ("to=self", muse_glimmer.MESSAGE),
        muse_glimmer.TOKENS,
        muse_glimmer.THINK_OPEN,
        muse_glimmer.ENDS[0],
        muse_glimmer.read_reasoning,
    ),
    "apertus": ReasoningFormat(apertus.THINK_MARKERS, apertus.THINK[:1], apertus.THINK, *apertus.THINK, apertus.read_reasoning),
    "cohere_command3": ReasoningFormat(
        answer_tags.COHERE_MARKERS,
        answer_tags.COHERE[:1],
        (*answer_tags.COHERE, *answer_tags.COHERE_ANSWER),
        *answer_tags.COHERE,
        answer_tags.cohere,
    ),
    "granite": ReasoningFormat(answer_tags.GRANITE_MARKERS, answer_tags.GRANITE[:1], (), *answer_tags.GRANITE, answer_tags.read_granite),
    "qwen3": ReasoningFormat(
        reasoning.THINK_MARKERS,
        (reasoning.THINK[1], "!" + answer_tags.RESPONSE[0], "!" + answer_tags.ANSWER[0]),
        reasoning.THINK,
        *reasoning.THINK,
        reasoning.think,
    ),
    "ernie45": ReasoningFormat(
        answer_tags.RESPONSE_MARKERS,
        (reasoning.THINK[1], answer_tags.RESPONSE[0]),
        (*reasoning.THINK, *answer_tags.RESPONSE),
        *reasoning.THINK,
        reasoning.think,
    ),
    "hunyuan_a13b": ReasoningFormat(
        answer_tags.ANSWER_MARKERS,
        (reasoning.THINK[1], answer_tags.ANSWER[0]),
        (*reasoning.THINK, *answer_tags.ANSWER),
        *reasoning.THINK,
        reasoning.think,
    ),
}
TOOL_CALL_SYNONYMS = {
    "harmony": HARMONY,
    "kimi": "kimi_k2",
    "minimax": "minimax_m2",
    "granite3": "granite",
    "xml": "qwen3_coder",
    "qwen3_xml": "qwen3_coder",
    "glm": "glm45",
    "glm47": "glm45",
    "llama3": "llama3_json",
    "llama4_json": "llama3_json",
}
"""Other names of tool-call formats, with the names in the table."""
REASONING_SYNONYMS = {
    "harmony": HARMONY_REASONING,
    **dict.fromkeys(("think", "deepseek_r1", "deepseek_v3", "glm45", "kimi_k2", "minimax_m2", "nemotron_v3", "holo2", "step3"), "qwen3"),
}
"""Other names of reasoning formats, with the names in the table."""
TOOL_CALL_PARSERS = (AUTO, NONE, *TOOL_CALL_FORMATS)
REASONING_PARSERS = (AUTO, NONE, *REASONING_FORMATS)


def check_parser_names(tool_call_parser: str, reasoning_parser: str) -> tuple[str, str]:
    """Return the names in the tables of two parsers, "auto" and "none" included.

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


@dataclass(slots=True)
class OutputStream:
    """Parses one sample whose text arrives in pieces.

    Attributes:
        sink: collects the events; has the numbers of calls.
    """

    sink: EventSink
    parser: StreamParser

    def push(self, text: str) -> list[Event]:
        """Return the events of the next piece of text."""
        self.parser.push(text)
        return self.sink.take()

    def finish(self) -> list[Event]:
        """Return the last events, as no more text comes."""
        self.parser.finish()
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
        for field, name in zip(("tool_call_parser", "reasoning_parser"), check_parser_names(*self._names), strict=True):
            object.__setattr__(self, field, name)

    @property
    def _names(self) -> tuple[str, str]:
        return self.tool_call_parser, self.reasoning_parser

    @classmethod
    def of(cls, tokenizer: Tokenizer, tool_call_parser: str = AUTO, reasoning_parser: str = AUTO) -> "OutputFormat":
        """Return the formats that are named, or that the chat template of a tokenizer shows.

        Raises:
            ConfigError: there is no such parser, or the two do not go together.
        """
        try:
            template = "".join(tokenizer.template_source(has_tools=has_tools) for has_tools in (False, True))
        except RequestError:  # there is no template; requests with messages are refused elsewhere
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
            tool_call_name = format_of_template(TOOL_CALL_FORMATS, template) or (GENERIC if template else NONE)
        if reasoning_name == AUTO:
            reasoning_name = format_of_template(REASONING_FORMATS, template) or NONE
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
        of_calls = TOOL_CALL_FORMATS[self.tool_call_parser].tokens if self._parses_calls(tools) else ()
        return of_calls + (self.reasoning_format.tokens if self.reasoning_format else ())

    def has_opened_reasoning(self, prompt: str) -> bool:
        """Return whether a prompt, or the end of one, begins reasoning."""
        one = self.reasoning_format
        return one is not None and one.opened is not None and prompt.rstrip().endswith(one.open)

    def stream(self, tools: Sequence[Tool], *, sample: int = 0, several: bool = True, in_reasoning: bool = False) -> OutputStream:
        """Return a parser of one sample.

        Args:
            tools: those that the model was shown; without any, calls are text.
            sample: the sample's index in its request.
            several: whether the answer may have more than one call.
            in_reasoning: whether the prompt has begun reasoning.
        """
        sink = self.sink(sample, tools, several=several)
        return OutputStream(sink, self.reading(tools, sink, in_reasoning=in_reasoning))

    def sink(self, sample: int, tools: Sequence[Tool], *, several: bool = True) -> EventSink:
        """Return a collector of the events of a sample."""
        new_id = call_id if self.tool_call_parser == NONE else TOOL_CALL_FORMATS[self.tool_call_parser].new_id
        return EventSink(sample, tools, None if several else 1, new_id)

    def reading(self, tools: Sequence[Tool], sink: EventSink, *, in_reasoning: bool, parses_calls: bool | None = None) -> StreamParser:
        """Return a parser of one sample into a sink.

        Args:
            in_reasoning: whether the prompt has begun reasoning.
            parses_calls: whether calls are parsed; None = if there are tools.
        """
        stream, has_reasoning = TextStream(), self.reasoning_format is not None
        has_calls = self.tool_call_parser != NONE and (bool(tools) if parses_calls is None else parses_calls)
        if (has_calls and self.tool_call_parser == HARMONY) or self.reasoning_parser == HARMONY_REASONING:
            return StreamParser(stream, harmony.HarmonyReader(has_reasoning=has_reasoning, has_calls=has_calls).read(stream, sink))
        one = self.reasoning_format
        parser = OutputParser(
            one.markers if one else Markers(),
            TOOL_CALL_FORMATS[self.tool_call_parser].markers if has_calls else Markers(),
            one.opened if one and in_reasoning else None,
        )
        return StreamParser(stream, parser.read(stream, sink))

    def _parses_calls(self, tools: Sequence[Tool]) -> bool:
        return self.tool_call_parser != NONE and bool(tools)
