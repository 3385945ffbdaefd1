"""<function name="f"><param name="a">x</param></function>, with CDATA if needed: MiniCPM5."""

from paceline.parsing.formats import ToolCallFormat, call_list, including_mark
from paceline.parsing.tagged_calls import TaggedCallFormat

TAGS = TaggedCallFormat(
    function="<function",
    function_end="</function>",
    parameter="<param",
    parameter_end="</param>",
    attribute="name=",
    quote='"',
    is_xml=True,
)
SIGNS = ('<function name="', '<param name="')
_read_joined = including_mark(TAGS.read_function, len(TAGS.attribute))  # some models leave out the space
calls_grammar = call_list(lambda grammar, tool: TAGS.call_grammar(grammar, tool, ""), "\n")
FORMAT = ToolCallFormat(
    {f"{TAGS.function} ": TAGS.read_function, f"{TAGS.function}{TAGS.attribute}": _read_joined}, SIGNS, (), calls_grammar
)
