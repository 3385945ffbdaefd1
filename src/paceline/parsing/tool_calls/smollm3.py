"""<tool_call> with JSON, as Hermes, or Python between <code> and </code>: SmolLM3."""

from paceline.parsing.formats import ToolCallFormat
from paceline.parsing.python_calls import CallListReader
from paceline.parsing.tool_calls import hermes

CODE, CODE_END = "<code>", "</code>"
# other code than calls is text: nothing here runs it
MARKERS = {**hermes.FORMAT.anywhere, CODE: CallListReader((CODE_END,), only_known=True, is_code=True).read}
FORMAT = ToolCallFormat(MARKERS, (hermes.OPEN, CODE), (hermes.OPEN, hermes.CLOSE), hermes.calls_grammar, hermes.OPEN)
