"""Chat templates make the texts that transformers makes of them: those at hand, and the devices of published ones in our own words."""

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from harness.checkpoints import write_byte_level_tokenizer
from harness.markup_cases import TOOLS, Case, events_of, parsed
from harness.tool_model import TEMPLATE
from paceline.engine.chat_messages import has_tool_calls
from paceline.engine.chat_prompt import chat_prompt
from paceline.engine.input_processor import InputProcessor
from paceline.errors import RequestError
from paceline.parsing.registry import TOOL_CALL_FORMATS, OutputFormat
from paceline.tokenizer.backend import ConvertedTokenizer
from paceline.tokenizer.chat_template import ChatTemplate
from paceline.tokenizer.tokenizer import Tokenizer

transformers = pytest.importorskip("transformers")

NAMES = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}

TEMPLATES = {
    "ChatML": """
{%- if messages[0]['role'] != 'system' %}{{ '<|im_start|>system\\nYou help.<|im_end|>\\n' }}{% endif %}
{% for message in messages %}
    {{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}
{%- endfor %}
{% if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{% endif %}""",
    "turns that alternate": """
{{- bos_token }}
{%- set first = messages[0].content if messages[0].role == 'system' else false %}
{%- for message in (messages[1:] if first else messages) %}
    {%- if (message.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}
    {%- if message.role == 'user' %}
        {%- set system = ('<<SYS>>\\n' ~ first ~ '\\n<</SYS>>\\n\\n') if loop.first and first else '' %}
        {{- '[INST] ' ~ system ~ message.content.strip() ~ ' [/INST]' }}
    {%- elif message.role == 'assistant' %}
        {{- ' ' ~ message.content|trim ~ ' ' ~ eos_token }}
    {%- endif %}
{%- endfor %}""",
    "headers and a date": """
{{- bos_token }}
{%- if not date is defined %}{% set date = strftime_now('%Y') %}{% endif %}
{{- '<|header|>system<|end|>\\nYear: ' + date + '\\n' }}
{%- for message in messages %}
    {%- if not (message.role == 'ipython' or message.role == 'tool' or 'tool_calls' in message) %}
        {{- '<|header|>' + message.role + '<|end|>\\n\\n' + message.content | trim + '<|eot|>' }}
    {%- elif 'tool_calls' in message %}
        {%- for call in message.tool_calls %}
            {%- set call = call.function %}
            {{- '{"name": "' + call.name + '", "parameters": ' }}{{ call.arguments | tojson }}{{ '}' }}
        {%- endfor %}
    {%- elif message.content is mapping or message.content is iterable %}
        {{- message.content | tojson }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|header|>assistant<|end|>\\n\\n' }}{% endif %}""",
    "other role names": """
{{- bos_token }}
{%- for message in messages if message.role != 'system' %}
{%- if message['role'] == 'assistant' %}{% set role = 'model' %}{% else %}{% set role = message['role'] %}{% endif %}
<start_of_turn>{{ role }}
{% if message.content is string %}{{ message.content | trim }}{% else %}
{%- for part in message.content %}
{%- if part.type == 'image' %}<image>{% elif part.type == 'text' %}{{ part.text | trim }}{% endif %}{% endfor %}
{%- endif %}<end_of_turn>
{%- else %}nobody spoke{% endfor %}
{% if add_generation_prompt %}<start_of_turn>model
{% endif %}""",
    "namespaces and thoughts": """
{%- set ns = namespace(last=messages|length - 1, found=false) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if not ns.found and message.role == 'user' and message.content is string %}
        {%- set ns.found = true %}{% set ns.last = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.role == 'assistant' %}
        {%- set content = message.content or '' %}{% set thought = '' %}
        {%- if message.reasoning_content is defined and message.reasoning_content is not none %}
            {%- set thought = message.reasoning_content %}
        {%- elif '</think>' in content %}
            {%- set thought = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {{- 'assistant: ' + (('<think>' + thought.strip('\\n') + '</think>') if loop.index0 > ns.last else '') + content }}
        {%- for call in message.tool_calls or [] %}
            {%- set given = call.function.arguments %}{{ '\\n' + (given if given is string else given|tojson) }}
        {%- endfor %}
    {%- elif message.role == 'tool' %}
        {{- ('<tools>' if loop.first or messages[loop.index0 - 1].role != 'tool' else '') ~ message.content }}
        {{- '</tools>' if loop.last or messages[loop.index0 + 1].role != 'tool' }}
    {%- else %}{{ message.role ~ ': ' ~ message.content ~ '\\n' }}{% endif %}
{%- endfor %}""",
    "filters": """
{% set roles = messages | map(attribute='role') | list %}{{ roles | join(', ') }} {{ roles | unique | list | length }}
{{ messages | selectattr('role', 'equalto', 'user') | map(attribute='content') | first }}
{{ messages | rejectattr('role', 'in', ['user']) | list | length }} {{ 'abc' | upper }} {{ 'a b' | replace(' ', '_') }}
{{ messages[0] | tojson(indent=2) }} {{ {'b': 1, 'a': [1, 2]} | tojson(sort_keys=true, separators=(',', ':')) }}
{{ 'é' | tojson }} {{ 'é' | tojson(ensure_ascii=true) }} {{ 'é' | tojson(true, 1) }} {{ 3.0 | int }} {{ '7' | int + 1 }}
{{ nothing | default('none') }} {{ [3, 1] | sort }} {{ '<&>' | tojson }}
{{ dict(a=1).items() | list }} {{ dict.fromkeys(['x', 'y'], 0) }} {% set d = dict([('k', 'v')]) %}{{ d.k }}""",
    "macros and blocks": """
{%- macro wrapped(message, tag='p') -%}
    <{{ tag }}>{{ message.content }}{% if caller %}{{ caller() }}{% endif %}</{{ tag }}>
{%- endmacro -%}
{% for message in messages %}{% call wrapped(message, tag=message.role) %}!{% endcall %}
{% endfor %}
{% filter upper %}loud{% endfilter %}{% set block %}a {{ bos_token }} b{% endset %}{{ block }}{% raw %}{{ raw }}{% endraw %}{# silent #}
{% with x = 1 %}{{ x }}{% endwith %}{{ x is defined }}""",
    "loops that end": """
{%- for message in messages %}{% if message.role == 'system' %}{% continue %}{% endif %}{{ loop.index }}{{ message.role }}
{%- if loop.index > 2 %}{% break %}{% endif %}
{% endfor %}{% for key, value in messages[0].items() %}{{ key }}={{ value }};{% endfor %}{{ range(3) | list }}
{{ cycler('a', 'b').next() }} {{ lipsum is defined }}
{% for a in [1, 2, 3] recursive %}{{ a }}{{ loop.cycle('x', 'y') }}{{ loop.revindex }}{{ loop.previtem }}{{ loop.nextitem is defined }}
{%- endfor %}""",
    "what the model says": """
{% for message in messages %}{% if message.role == 'assistant' %}{% generation %}{{ message.content }}{{ eos_token }}
{% endgeneration %}{% else %}{{ message.role }}: {{ message.content }}
{% endif %}{% endfor %}""",
    "tools and documents": """{{ tools is none }} {{ documents is none }} {% if tools %}{{ tools | tojson }}{% endif %}
{{ add_generation_prompt }} {{ custom is defined }} {{ custom }}""",
    "whitespace": """   {% if true %}
   indented
     {%- if true -%}   tight   {%- endif %}
{%+ if true %}  kept {% endif +%}
   {% endif %}
end   """,
    "a namespace of lists": """{% set ns = namespace(parts=[], self='me') %}
{% for m in messages %}{% set ns.parts = ns.parts + [m.role[:1]] %}{% endfor %}{{ ns.parts }}{{ ns.self }}""",
    "a refused namespace": """{% set ns = namespace(_private=1) %}""",
    "a refused attribute": """{{ messages.__class__ }}{{ ''.format.__globals__ }}{{ '{0.__class__}'.format(messages) }}""",
    "a missing value": """{{ messages[0].nothing.more }}""",
    "numbers": """{{ 7 // 2 }} {{ 7 % 3 }} {{ 2 ** 10 }} {{ 1 / 3 }} {{ 'x' * 3 }} {{ [1] * 2 }} {{ -1 | abs }} {{ 1e3 }}
{{ true and not false }} {{ 'a' < 'b' }}""",
    "formats": """{{ '%s is %d' | format('x', 3) }} {{ '{} and {x:>4}'.format(1, x=2) }} {{ 'a%sb' % 'c' }} {{ "tab\\tnew" }}
{{ 'ß'.upper() }} {{ 'x'.center(5) }}""",
}

CONVERSATIONS: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": "hello"}],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "  hi\n"}],
    [{"role": "user", "content": "a"}, {"role": "assistant", "content": "<think>\nhm\n</think>\n\nb"}, {"role": "user", "content": "c"}],
    [
        {"role": "system", "content": "é你😀\u2028<&>'\""},
        {"role": "user", "content": "\\ {{ x }} {% y %} \x00\x1b"},
        {"role": "assistant", "content": ""},
    ],
    [{"role": "user", "content": [{"type": "text", "text": "look"}, {"type": "image", "url": "x"}]}],
    [
        {"role": "user", "content": "weather?"},
        {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "get", "arguments": {"days": [1, 2.5, None]}}}]},
        {"role": "tool", "content": "sunny", "name": "get"},
        {"role": "tool", "content": "warm"},
        {"role": "assistant", "content": "Sunny.", "reasoning_content": "the tool says so", "name": None},
        {"role": "assistant", "content": "And warm.", "reasoning": "so it does"},
    ],
    [{"role": "user", "content": "x" * 5000}, {"role": "user", "content": "again"}],
    [{"role": "robot", "content": 3, "flag": True, "nested": {"a": [1, 2]}}],
    [{"content": "nobody"}],
]  # fmt: skip

DESCRIBED = [tool.as_template() for tool in TOOLS]


def templates_at_hand(mini: Path) -> Iterator[tuple[str, str]]:
    """Those of checkpoints that are here."""
    folders = [mini, mini.parents[4].parent / "shared" / "data"]
    for folder in folders:
        for path in sorted(folder.rglob("tokenizer_config.json")):
            template = json.loads(path.read_text(encoding="utf-8")).get("chat_template")
            if isinstance(template, str):
                yield path.parent.name, template
        for path in sorted(folder.rglob("*.jinja")):
            yield path.name, path.read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory: pytest.TempPathFactory) -> Any:
    directory = write_byte_level_tokenizer(tmp_path_factory.mktemp("tokenizer"))
    return transformers.AutoTokenizer.from_pretrained(str(directory), **NAMES)


def theirs(pretrained: Any, source: str, messages: list[dict[str, Any]], *, prompt: bool, **more: Any) -> tuple[str, str | None]:
    """The text that transformers renders, or the template's own error."""
    try:
        return pretrained.apply_chat_template(messages, chat_template=source, tokenize=False, add_generation_prompt=prompt, **more), None
    except Exception as error:
        return "", str(error) if type(error).__name__ == "TemplateError" else "chat template"


def compare(pretrained: Any, source: str) -> int:
    """Every conversation, with and without a prompt for an answer; how many made a text."""
    ours, num_texts = ChatTemplate(source, pretrained.special_tokens_map), 0
    for messages in CONVERSATIONS:
        for prompt, tools, options in ((True, (), {}), (False, (), {}), (True, DESCRIBED, {"enable_thinking": True, "custom": [1]})):
            expected, refusal = theirs(pretrained, source, messages, prompt=prompt, tools=tools or None, **options)
            if refusal is None:
                assert ours.render(messages, tools=tools, options=options, add_generation_prompt=prompt) == expected
                num_texts += 1
            else:
                with pytest.raises(RequestError, match=re.escape(refusal)):
                    ours.render(messages, tools=tools, options=options, add_generation_prompt=prompt)
    return num_texts


@pytest.mark.parametrize("name", TEMPLATES)
def test_chat_template_features_render_as_in_transformers(pretrained: Any, name: str) -> None:
    num_texts = compare(pretrained, TEMPLATES[name])
    assert (num_texts == 0) == (name in ("a refused namespace", "a missing value"))


def test_chat_templates_of_local_checkpoints_render_as_in_transformers(pretrained: Any, mini_dir: Path) -> None:
    found = dict(templates_at_hand(mini_dir))
    assert "target" in found
    for source in found.values():
        assert compare(pretrained, source) > 0


CALL = [
    {"role": "user", "content": "weather?"},
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": "a1B2c3D4e", "type": "function", "function": {"name": "weather", "arguments": {"city": "Köln", "days": 2}}}],
    },
]


def test_tool_calls_rendered_by_chat_templates_are_parsed_back(pretrained: Any, mini_dir: Path) -> None:
    """A model writes calls as its template does; so its format is the one that the template shows."""
    found = {"our own": TEMPLATE, **dict(templates_at_hand(mini_dir))}
    num_read = 0
    for source in found.values():
        tokenizer: Any = SimpleNamespace(template_source=lambda *, has_tools, source=source: source)
        formats = OutputFormat.of(tokenizer)
        if formats.tool_call_parser in ("none", "generic"):
            continue
        text = ChatTemplate(source, pretrained.special_tokens_map).render(CALL, tools=DESCRIBED, add_generation_prompt=False)
        opening = (
            TOOL_CALL_FORMATS[formats.tool_call_parser].opening or {"llama3_json": '{"name"', "openai": " to="}[formats.tool_call_parser]
        )
        written = text[text.rindex(opening, 0, text.rindex("Köln")) :]
        events, num_complete = events_of(Case("", (formats.tool_call_parser, formats.reasoning_parser), "", []), [written])
        assert parsed(events)[0] == ("call", "weather", '{"city": "Köln", "days": 2}')
        num_read += num_complete
    assert num_read >= 1


def test_chat_template_may_append_to_its_own_lists() -> None:
    source = "{% set found = [] %}{% for m in messages %}{% set _ = found.append(m.role) %}{% endfor %}{{ found | map('upper') | tojson }}"
    for _ in range(2):
        assert ChatTemplate(source, {}).render(CONVERSATIONS[1], add_generation_prompt=False) == '["SYSTEM", "USER"]'


def test_chat_template_looping_over_missing_tools_gets_an_empty_list() -> None:
    """Unlike in transformers, where it fails without tools."""
    source = "{% for tool in tools %}{{ tool.function.name }}{% endfor %}{{ messages[0].content }}{{ tools is none }}"
    assert ChatTemplate(source, {}).render([{"role": "user", "content": "hi"}], add_generation_prompt=False) == "hiFalse"
    unaware = "{{ messages[0].content }}{{ tools is none }}"
    assert ChatTemplate(unaware, {}).render([{"role": "user", "content": "hi"}], add_generation_prompt=False) == "hiTrue"


def test_chat_template_gets_tools_also_as_functions() -> None:
    template = ChatTemplate("{{- functions | trim }}|{{ datetime | length > 10 }}", {})
    assert template.mentions_variable("tools")
    shown, has_date = template.render(CONVERSATIONS[0], tools=DESCRIBED[:1], add_generation_prompt=False).split("|")
    assert json.loads(shown) == DESCRIBED[:1]
    assert has_date == "True"
    assert template.render(CONVERSATIONS[0], add_generation_prompt=False).startswith("[]|")


def test_chat_template_special_token_names_are_those_of_the_tokenizer(pretrained: Any) -> None:
    source = "{{ bos_token }}{{ eos_token }}{{ unk_token }}{{ pad_token }}{{ sep_token }}"
    assert ChatTemplate(source, pretrained.special_tokens_map).render(CONVERSATIONS[0], add_generation_prompt=False) == "<s></s><unk><pad>"


CONTROL_TEXTS = ("{}", "a{}b", "{}\n{}", "<{}>")
PROMPT_TEMPLATES = (TEMPLATE, TEMPLATES["ChatML"], TEMPLATES["namespaces and thoughts"], TEMPLATES["turns that alternate"])
PROMPTS: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": "hello  world\n\n12345 <b>x</b>"}],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": " hi é你😀 "}],
    [{"role": "user", "content": "a"}, {"role": "assistant", "content": "<think>\nhm\n</think>\n\nb"}, {"role": "user", "content": ">c<"}],
    [*CALL, {"role": "tool", "tool_call_id": "a1B2c3D4e", "name": "weather", "content": '{"sky": "<clear>"}'}],
]  # fmt: skip


def tokenizers_at_hand(mini: Path) -> Iterator[Path]:
    """Folders and files with a tokenizer that transformers or paceline opens."""
    shared = mini.parents[4].parent / "shared" / "data"
    yield from (path.parent for folder in (mini.parent, shared) for path in sorted(folder.rglob("tokenizer.json")))
    yield from (path.parent for path in sorted(shared.rglob("merges.txt")))
    yield from sorted(shared.rglob("*.gguf"))


@cache
def opened_both(path: Path) -> tuple[Any, Any]:
    """Our tokenizer, and transformers' with the same backend."""
    ours: Any = Tokenizer.open(path)
    other: Any = Tokenizer.open(path)  # transformers changes its backend's settings with every call
    pretrained = other._pretrained
    if path.suffix == ".gguf":
        pretrained = transformers.PreTrainedTokenizerFast(tokenizer_object=pretrained.backend_tokenizer, **pretrained.special_tokens_map)
        special = [ours.piece(token_id) for token_id in sorted(ours.special_token_ids)]
        pretrained.add_special_tokens({"additional_special_tokens": special})
    return ours, pretrained


def prompt_ids(ours: Any, source: str, messages: list[dict[str, Any]], **options: Any) -> list[int]:
    if isinstance(ours._pretrained, ConvertedTokenizer):
        ours._pretrained = replace(ours._pretrained, chat_template={"default": source})
    else:
        ours._pretrained.chat_template = source
    input_processor = InputProcessor(ours, vocab_size=ours.vocab_size, max_model_len=1 << 16, eos_token_ids=())
    return chat_prompt(input_processor, messages, **options).token_ids


def test_chat_prompt_ids_equal_transformers_with_local_tokenizers(mini_dir: Path, large_counts: bool) -> None:
    paths = list(tokenizers_at_hand(mini_dir))
    if len(paths) < 5:
        pytest.skip(f"only {len(paths)} tokenizers are at hand, of shared/data none")
    num_compared = 0
    prompts = [*product(PROMPT_TEMPLATES, PROMPTS)]
    for number, path in enumerate(paths):
        ours, pretrained = opened_both(path)
        for source, messages in prompts if large_counts else prompts[number % 3 :: 3]:
            _, refusal = theirs(pretrained, source, messages, prompt=True)
            shows_calls = "tools" in source or not has_tool_calls(messages)  # else calls are written as text
            if refusal is None and shows_calls:
                with_ids = pretrained.apply_chat_template(messages, chat_template=source, add_generation_prompt=True, return_dict=False)
                assert prompt_ids(ours, source, messages) == with_ids, (path.name, messages)
                num_compared += 1
    assert num_compared > (4 if large_counts else 1) * len(paths)


def test_control_tokens_spelled_out_in_messages_are_encoded_as_text(mini_dir: Path) -> None:
    num_compared = 0
    for path in tokenizers_at_hand(mini_dir):
        ours, pretrained = opened_both(path)
        for token_id in sorted(ours.special_token_ids)[:4]:
            control = ours.piece(token_id)
            if ours.encode(f"{control}the", add_special_tokens=False)[1:] != ours.encode("the", add_special_tokens=False):
                continue  # the beginning of a text gets a space
            source = "{% for message in messages %}" + control + "{{ message.content }}{% endfor %}"
            for text in (text.replace("{}", control) for text in CONTROL_TEXTS):
                plain = pretrained(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]
                found = prompt_ids(ours, source, [{"role": "user", "content": text}, {"role": "assistant", "content": text}])
                assert found == [token_id, *plain, token_id, *plain], (path.name, text)
                num_compared += 1
    assert num_compared >= 8


@pytest.mark.spread(0.3)
@pytest.mark.parametrize("name", ["ChatML", "turns that alternate", "namespaces and thoughts", "other role names"])
@pytest.mark.parametrize("text", ["It is", "It is ", "<think>\nhm", "  It\n\n"])
def test_continued_final_message_is_rendered_as_in_transformers(pretrained: Any, name: str, text: str) -> None:
    messages = [{"role": "user", "content": "Weather?"}, {"role": "assistant", "content": text}]
    expected = pretrained.apply_chat_template(
        messages, chat_template=TEMPLATES[name], continue_final_message=True, return_dict=False, add_generation_prompt=False
    )
    assert prompt_ids(Tokenizer(pretrained), TEMPLATES[name], messages, continue_final_message=True) == expected
