"""Outputs of models as llama.cpp's own parser tests read them, compared with ours.

Known differences have a reason in `DIFFERENCES`; any other one fails.
"""

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from clients.peer_suites import Suite, SuiteCase, llama_cpp_suite
from paceline.errors import RequestError
from paceline.parsing.events import Event
from paceline.parsing.parse_output import ParsedOutput
from paceline.parsing.registry import OutputFormat
from paceline.parsing.tools import Tool
from paceline.tokenizer.chat_template import ChatTemplate

TEMPLATES = {
    "Apertus-8B-Instruct": ("apertus", "apertus"),
    "Apriel-1.6-15b-Thinker-fixed": ("hunyuan_a13b", "apriel"),
    "Bielik-11B-v3.0-Instruct": ("hermes", "qwen3"),
    "ByteDance-Seed-OSS": ("seed_oss", "seed_oss"),
    "Cohere2MoE": ("cohere_command3", "cohere_command3"),
    "CohereForAI-c4ai-command-r-plus-tool_use": ("command_r", "none"),
    "CohereForAI-c4ai-command-r7b-12-2024-tool_use": ("cohere_command3", "cohere_command3"),
    "GLM-4.6": ("glm45", "qwen3"),
    "GLM-4.7-Flash": ("glm45", "qwen3"),
    "GigaChat3-10B-A1.8B": ("gigachat3_message", "none"),
    "GigaChat3.1-10B-A1.8B": ("gigachat3", "none"),
    "HuggingFaceTB-SmolLM3-3B": ("generic", "qwen3"),
    "Kimi-K2-Instruct": ("kimi_k2", "none"),
    "Kimi-K2-Thinking": ("kimi_k2", "qwen3"),
    "Kimi-K3": ("kimi_k3", "kimi_k3"),
    "LFM2-8B-A1B": ("lfm2", "none"),
    "LFM2.5-8B-A1B": ("lfm2", "qwen3"),
    "LFM2.5-Instruct": ("lfm2", "qwen3"),
    "MiMo-VL": ("hermes", "none"),
    "MiniMax-M1": ("minimax_m1", "none"),
    "MiniMax-M2": ("minimax_m2", "qwen3"),
    "MiniMax-M3": ("minimax_m3", "minimax_m3"),
    "Mistral-Small-3.2-24B-Instruct-2506": ("mistral", "none"),
    "NVIDIA-Nemotron-3-Nano-30B-A3B-BF16": ("qwen3_coder", "qwen3"),
    "NVIDIA-Nemotron-Nano-v2": ("nemotron_json", "qwen3"),
    "NousResearch-Hermes-2-Pro-Llama-3-8B-tool_use": ("hermes", "none"),
    "NousResearch-Hermes-3-Llama-3.1-8B-tool_use": ("hermes", "none"),
    "Qwen-QwQ-32B": ("hermes", "qwen3"),
    "Qwen-Qwen2.5-7B-Instruct": ("hermes", "none"),
    "Qwen-Qwen3-0.6B": ("hermes", "qwen3"),
    "Qwen3-Coder": ("qwen3_coder", "none"),
    "Qwen3.5-4B": ("qwen3_coder", "qwen3"),
    "Reka-Edge": ("hermes", "qwen3"),
    "Spark2.5": ("glm45", "qwen3"),
    "StepFun3.5-Flash": ("qwen3_coder", "qwen3"),
    "deepseek-ai-DeepSeek-R1-Distill-Llama-8B": ("deepseek_v3", "qwen3"),
    "deepseek-ai-DeepSeek-R1-Distill-Qwen-32B": ("deepseek_v3", "qwen3"),
    "deepseek-ai-DeepSeek-V3.1": ("deepseek_v31", "qwen3"),
    "deepseek-ai-DeepSeek-V3.2": ("deepseek_v32", "qwen3"),
    "deepseek-ai-DeepSeek-V4-Flash-0731": ("deepseek_v4", "qwen3"),
    "deepseek-ai-DeepSeek-V4": ("deepseek_v4", "qwen3"),
    "fireworks-ai-llama-3-firefunction-v2": ("functools", "none"),
    "google-gemma-2-2b-it": ("generic", "none"),
    "google-gemma-4-31B-it-interleaved": ("gemma4", "gemma4"),
    "google-gemma-4-31B-it": ("gemma4", "gemma4"),
    "ibm-granite-granite-3.3-2B-Instruct": ("granite", "ernie45"),
    "ibm-granite-granite-4.0": ("hermes", "none"),
    "ibm-granite-granite-4.1": ("hermes", "none"),
    "inclusionai-ling-3.0-flash": ("glm45", "qwen3"),
    "llama-cpp-deepseek-r1": ("deepseek_v3", "qwen3"),
    "llama-cpp-rwkv-world": ("generic", "qwen3"),
    "meetkai-functionary-medium-v3.1": ("functionary_v31", "none"),
    "meetkai-functionary-medium-v3.2": ("functionary_v32", "functionary_v32"),
    "meta-llama-Llama-3.1-8B-Instruct": ("llama3_json", "none"),
    "meta-llama-Llama-3.2-3B-Instruct": ("llama3_json", "none"),
    "meta-llama-Llama-3.3-70B-Instruct": ("llama3_json", "none"),
    "microsoft-Phi-3.5-mini-instruct": ("generic", "none"),
    "mistralai-Ministral-3-14B-Reasoning-2512": ("mistral", "mistral"),
    "mistralai-Mistral-Nemo-Instruct-2407": ("mistral", "none"),
    "moonshotai-Kimi-K2": ("kimi_k2", "none"),
    "muse-glimmer": ("muse_glimmer", "muse_glimmer"),
    "openai-gpt-oss-120b": ("openai", "openai_gptoss"),
    "openbmb-MiniCPM5-1B": ("minicpm5", "qwen3"),
    "poolside-Laguna-S-2.1": ("glm45", "qwen3"),
    "poolside-Laguna-XS-2.1": ("glm45", "qwen3"),
    "poolside-Laguna-XS.2": ("glm45", "qwen3"),
    "tencent-Hy3": ("hy_v3_opensource", "hy_v3_opensource"),
    "unsloth-Apriel-1.5": ("hunyuan_a13b", "none"),
    "unsloth-mistral-Devstral-Small-2507": ("mistral", "none"),
    "upstage-Solar-Open-100B": ("solar_open", "solar_open"),
}
"""The formats of tool calls and of reasoning that each of llama.cpp's chat templates shows."""
_END = "ends at a token that ends generation; ours never sees it"
DIFFERENCES = {
    "llama.cpp": {
        r"Apriel-1\.6.*": "begins reasoning after the words of the prompt, which are not the model's",
        r"Cohere.* (I'm|<.START_THINKING).*": "leaves all marks in the text if reasoning is not parsed",
        r"CohereForAI-c4ai-command-r-plus.* <.CHATBOT_TOKEN.*": _END,
        r"inclusionai-ling-3.* .*": _END,
        r"Qwen3\.5-4B.* <think>.*": "drops an opening mark of reasoning that repeats the prompt's",
        r"deepseek-ai-DeepSeek-R1-Distill-Qwen-32B.* I'm.*": "cannot take back a streamed text that turns out to be reasoning",
        r"(meta-llama-Llama-3\.1|mistralai-Ministral-3).* .*(json|JSON).*": "has no code fences around JSON: the grammar allows none",
        r"openai-gpt-oss.* <.channel.>analysis.*I'm.*": "has no markup in the text if reasoning is not parsed",
        r"openai-gpt-oss.* .*I will execute.*": "keeps messages to the model's own tools, as reasoning",
    },
}
"""By project: patterns of a parser or template and a test's title, and what ours does there."""


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


def unexplained(suite: str, found: list[tuple[SuiteCase, str | None]]) -> list[str]:
    """Return the differences that have no reason in `DIFFERENCES`."""
    return [
        f"{case.template}: {case.title!r}: {wrong}"[:500]
        for case, wrong in found
        if wrong is not None
        and not any(re.fullmatch(pattern, f"{case.template} {case.title}", re.DOTALL) for pattern in DIFFERENCES[suite])
    ]


def count(suite: str, found: list[tuple[SuiteCase, str | None]], num_left_out: int, tally: "Counter[str]") -> None:
    tally[f"tests of {suite}'s parsers that we read alike"] += sum(wrong is None for _, wrong in found)
    tally[f"tests of {suite}'s parsers that we read otherwise, for a known reason"] += sum(wrong is not None for _, wrong in found)
    tally[f"tests of {suite}'s parsers that are not run"] += num_left_out


def test_tool_call_parsers_agree_with_the_cases_of_llama_cpp(parsers: Path, tally: "Counter[str]") -> None:
    folder = parsers / "llama.cpp"
    suite = llama_cpp_suite(folder)
    found = list(llama_cpp_differences(folder, suite))
    assert len(found) >= 350
    assert unexplained("llama.cpp", found) == []
    count("llama.cpp", found, suite.num_left_out, tally)


@pytest.mark.parametrize("template", TEMPLATES)
def test_public_chat_template_selects_the_expected_parsers(template: str, parsers: Path) -> None:
    source = (parsers / "llama.cpp/models/templates" / f"{template}.jinja").read_text(encoding="utf-8")
    assert OutputFormat.of_template(source) == OutputFormat(*TEMPLATES[template])


def test_every_public_chat_template_has_an_expected_parser(parsers: Path) -> None:
    found = {path.stem for path in (parsers / "llama.cpp/models/templates").glob("*.jinja")}
    assert found == TEMPLATES.keys()
