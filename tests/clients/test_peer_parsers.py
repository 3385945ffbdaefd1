"""Outputs of models as llama.cpp's, Ollama's and SGLang's own parsers read them, compared with ours.

llama.cpp's tests come with the sources of llama-cpp-python, SGLang's detectors with its wheel. Ollama's tests are in no package: they run
if its sources are in the folder `ollama` of the environment. Known differences have a reason in `DIFFERENCES`; any other one fails.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from clients.peer_suites import OLLAMA_PARSERS, Suite, SuiteCase
from paceline.errors import RequestError
from paceline.parsing.events import Event
from paceline.parsing.parse_output import ParsedOutput
from paceline.parsing.registry import OutputFormat
from paceline.parsing.tools import Tool
from paceline.tokenizer.chat_template import ChatTemplate

HERE = Path(__file__).parent
Report = Callable[[str, int], None]


@pytest.fixture(scope="module")
def parsers(clients: Path) -> Path:
    folder = clients / "parsers"
    if not folder.exists():
        pytest.skip("the environment of other projects' parsers is not there: make test-clients builds it")
    return folder


def parsed(formats: OutputFormat, case: SuiteCase, *, in_reasoning: bool) -> ParsedOutput:
    """What we make of an output, one character at a time."""
    tools = [Tool(name=name, parameters=schema) for name, schema in case.tools.items()]
    stream = formats.stream(tools, in_reasoning=in_reasoning)
    events: list[Event] = []
    for character in case.output:
        events += stream.push(character)
    return ParsedOutput.of_events(events + stream.finish())


def difference(case: SuiteCase, found: ParsedOutput) -> str | None:
    """What differs from the other project's reading, apart from white space at the borders; None = nothing."""
    calls = [(call.name, call.arguments) for call in found.tool_calls]
    if case.calls is not None and calls != case.calls:
        return f"calls {calls} != {case.calls}"
    if case.content is not None and found.content.strip() != case.content.strip():
        return f"content {found.content!r} != {case.content!r}"
    if case.reasoning is not None and (found.reasoning or "").strip() != case.reasoning.strip():
        return f"reasoning {found.reasoning!r} != {case.reasoning!r}"
    return None


def in_reasoning_after(template: str, formats: OutputFormat, *, thinks: bool | None) -> bool:
    """Whether a prompt by this template ends within reasoning."""
    options = {} if thinks is None else {"enable_thinking": thinks}
    question = [{"role": "user", "content": "Hey"}]
    chat = ChatTemplate(template, {"bos_token": "", "eos_token": ""})
    try:
        return formats.has_opened_reasoning(chat.render(question, options=options, add_generation_prompt=True))
    except RequestError:  # a template that needs tools
        return False


def llama_cpp_differences(folder: Path, suite: Suite) -> Iterator[tuple[SuiteCase, str | None]]:
    known: dict[tuple[str, bool | None], tuple[OutputFormat, bool]] = {}
    for case in suite.cases:
        key = (case.template, case.thinks)
        if key not in known:
            template = (folder / "models/templates" / case.template).read_text()
            formats = OutputFormat.of_template(template)
            known[key] = formats, in_reasoning_after(template, formats, thinks=case.thinks)
        yield case, _llama_cpp_difference(case, *known[key])


def _llama_cpp_difference(case: SuiteCase, formats: OutputFormat, in_reasoning: bool) -> str | None:
    """Return what differs. A test that does not parse reasoning has it in its text, or has none whatever the prompt ends with."""
    found = difference(case, parsed(formats, case, in_reasoning=in_reasoning))
    opening = formats.reasoning_format.open.strip() if formats.reasoning_format else ""
    if case.reasoning is not None or not opening or found is None:
        return found
    content = (case.content or "").removeprefix(opening if in_reasoning else "")
    in_text = difference(replace(case, content=content), parsed(replace(formats, reasoning_parser="none"), case, in_reasoning=False))
    without = difference(case, parsed(formats, case, in_reasoning=False))
    return found if in_text and without else None


def ollama_differences(suite: Suite) -> Iterator[tuple[SuiteCase, str | None]]:
    for case in suite.cases:
        yield case, difference(case, parsed(OutputFormat(*OLLAMA_PARSERS[case.template]), case, in_reasoning=bool(case.thinks)))


def summary(name: str, suite: Suite, found: list[tuple[SuiteCase, str | None]]) -> str:
    """Counts of a suite, and what differs, by template."""
    same = Counter(case.template for case, wrong in found if wrong is None)
    total = Counter(case.template for case, _ in found)
    lines = [f"{name}: {same.total()} of {total.total()} read alike ({suite.num_left_out} tests left out)"]
    for template in sorted(total):
        if same[template] < total[template]:
            lines.append(f"  {template}: {same[template]} of {total[template]}")
            lines += [f"    {case.title!r}: {wrong}"[:400] for case, wrong in found if wrong is not None and case.template == template]
    return "\n".join(lines)
