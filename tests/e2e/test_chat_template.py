"""A chat template is a stranger's program: it gets little time and memory, a process of its own, and no way to fail but one."""

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from paceline import isolated
from paceline.errors import BackendUnavailableError, CheckpointError, RequestError
from paceline.tokenizer import chat_template
from paceline.tokenizer.chat_template import MAX_MEMORY_BYTES, ChatTemplate, max_rendered_chars

PLAIN = "{{ bos_token }}{% for one in messages %}{{ one.role }}: {{ one.content }}\n{% endfor %}"
PLAIN += "{% if add_generation_prompt %}model: {% endif %}"
HELLO = [{"role": "user", "content": "hello"}]
MAX_SECONDS = 8.0  # where a process may compute for one, on a machine that does other things

HOSTILE = {
    "endless loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% for c in range(99999) %}" + 3 * "{% endfor %}",
    "a wide range": "{% for a in range(10**9) %}{% for b in range(10**9) %}x{% endfor %}{% endfor %}",
    "a large constant": "{% set power = 10**(10**8) %}",
    "a long text": "{{ 'x' * 10**10 }}",
    "a deep indent": "{{ 'x'|indent(10**10) }}",
    "a wide centre": "{{ 'x'|center(10**10) }}",
    "a wide number": "{{ '%9999999999d'|format(1) }}",
    "a wide field": "{{ '{:>9999999999}'.format(1) }}",
    "doubling": "{% set n = namespace(s='x') %}{% for i in range(99) %}{% set n.s = n.s + n.s %}{% endfor %}",
    "doubling lists": "{% set n = namespace(s=['x']) %}{% for i in range(99) %}{% set n.s = n.s + n.s %}{% endfor %}",
    "a long output": "{% for i in range(99999) %}{{ 'x' * 10000 }}{% endfor %}",
    "macros": "{% macro again() %}{{ again() }}{% endmacro %}{{ again() }}",
    "depth": "{{ " + "(" * 50_000 + "1" + ")" * 50_000 + " }}",
    "a deep list": "{% set n = namespace(s=[]) %}{% for i in range(90000) %}{% set n.s = [n.s] %}{% endfor %}{{ n.s }}",
    "division": "{{ 1 / 0 }}",
    "the sandbox": "{{ ().__class__.__bases__[0].__subclasses__() }}",
    "underscores": "{% set n = namespace(__class__=1) %}",
    "nothing": "{{ no.such.thing }}",
    "types": "{{ 'a' + 1 }}",
    "no key": "{{ {}['a'].b }}",
    "its own words": "{{ raise_exception('only users may speak') }}",
    "not a word": "{{ raise_exception('x' * 100000000) }}",
    "no template": "{% for %}",
    "no such tag": "{% include '/etc/passwd' %}{% nothing %}",
    "the clock": "{{ strftime_now('%c' * 10**8) }}",
}
LIKE_OTHERS = (  # ends at a limit, or in an error of the template language, that another of them ends in
    "a deep indent", "a wide centre", "a wide number", "doubling", "the clock", "not a word", "types", "no key", "underscores"
)  # fmt: skip
NAMED_LIMITS = {
    "endless loops": "computed longer than 1 seconds",
    "a large constant": "cannot be compiled: it computed longer than 1 seconds",
    "a long text": "needed more than the 512 MB",
    "a long output": "text has more than",
}


@pytest.fixture(autouse=True)
def little_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template, "MAX_CPU_S", 1)


@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.long if name in LIKE_OTHERS else []) for name in HOSTILE])
def test_hostile_chat_template_fails_in_bounded_time_and_memory(name: str) -> None:
    template = ChatTemplate(HOSTILE[name], {"bos_token": "<s>"})
    start = time.perf_counter()
    with pytest.raises(RequestError, match="chat template") as caught:
        template.render(HELLO, add_generation_prompt=True)
    assert time.perf_counter() - start < MAX_SECONDS
    assert caught.value.parameter == "messages"
    assert len(str(caught.value)) < 4100
    assert NAMED_LIMITS.get(name, "") in str(caught.value)


def test_invalid_chat_template_is_a_checkpoint_error() -> None:
    ChatTemplate(PLAIN, {}).check_compiles()
    for name in ("no template", "depth"):
        with pytest.raises(CheckpointError, match="chat template cannot be compiled"):
            ChatTemplate(HOSTILE[name], {}).check_compiles()


def test_chat_template_output_limit_grows_with_messages_and_context() -> None:
    doubled = ChatTemplate("{{ messages[0].content }}{{ messages[0].content }}", {})
    long = [{"role": "user", "content": "x" * 1_000_000}]
    assert len(doubled.render(long, add_generation_prompt=False, max_model_len=64)) == 2_000_000
    of_its_own = ChatTemplate("{{ 'x' * 200000 }}", {})
    assert len(of_its_own.render(HELLO, add_generation_prompt=False, max_model_len=8192)) == 200_000
    with pytest.raises(RequestError, match=f"text has more than {max_rendered_chars(len(json.dumps(HELLO)), 2048)} characters"):
        of_its_own.render(HELLO, add_generation_prompt=False, max_model_len=2048)


def test_chat_template_renders_again_after_a_failed_conversation() -> None:
    source = (
        "{% if messages[0].content == 'loop' %}"
        + HOSTILE["a long text"]
        + "{% elif messages[0].content == 'no' %}{{ raise_exception('no') }}{% endif %}"
    )
    template = ChatTemplate(source + PLAIN, {"bos_token": "<s>"})
    for _ in range(2):
        assert template.render(HELLO, add_generation_prompt=True) == "<s>user: hello\nmodel: "
        for bad in ("loop", "no"):
            with pytest.raises(RequestError):
                template.render([{"role": "user", "content": bad}], add_generation_prompt=True)


def test_killed_chat_template_process_fails_one_conversation() -> None:
    template = ChatTemplate("{% if messages|length > 1 %}" + HOSTILE["endless loops"] + "{% endif %}", {})
    template.check_compiles()
    killer = threading.Timer(0.2, os.kill, (pid_of(template), signal.SIGKILL))
    killer.start()
    with pytest.raises(RequestError, match="its process ended with code -9"):
        template.render(HELLO * 2, add_generation_prompt=False)
    assert template.render(HELLO, add_generation_prompt=False) == ""


def pid_of(template: ChatTemplate) -> int:
    assert template.isolated.pid is not None
    return template.isolated.pid


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_chat_template_process_ends_with_the_parent_process() -> None:
    program = f"""
import os, sys
from paceline.tokenizer.chat_template import ChatTemplate
template = ChatTemplate({PLAIN!r}, {{"bos_token": ""}})
template.check_compiles()
print(template.isolated.pid, flush=True)
if sys.argv[1] == "killed":
    os.kill(os.getpid(), 9)
"""
    for how in ("ends", "killed"):
        done = subprocess.run([sys.executable, "-c", program, how], capture_output=True, text=True, check=False)
        assert (done.returncode, done.stderr) == (0 if how == "ends" else -9, "")
        wait_until(lambda pid=int(done.stdout): not is_alive(pid))


def wait_until(holds: Callable[[], bool]) -> None:
    until = time.monotonic() + 10.0
    while not holds():
        assert time.monotonic() < until
        time.sleep(0.01)


def test_chat_template_rendered_by_threads_gives_each_its_own_text() -> None:
    template = ChatTemplate(PLAIN, {"bos_token": ""})
    found: dict[int, str] = {}

    def render(number: int) -> None:
        for _ in range(20):
            found[number] = template.render([{"role": "user", "content": f"{number} " * 2000}], add_generation_prompt=False)

    threads = [threading.Thread(target=render, args=[number]) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {number: f"user: {f'{number} ' * 2000}\n" for number in range(8)}


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_forked_process_starts_its_own_chat_template_process() -> None:
    template = ChatTemplate(PLAIN, {"bos_token": ""})
    template.check_compiles()
    pid = pid_of(template)
    context = multiprocessing.get_context("fork")
    answers = context.Queue()

    def child() -> None:
        for _ in range(3):
            answers.put(template.render([{"role": "user", "content": "in the child"}], add_generation_prompt=False))
        answers.put(str(pid_of(template)))

    with template.isolated._lock:  # as a thread would that renders at this moment
        process = context.Process(target=child)
        process.start()
    for _ in range(20):
        assert template.render(HELLO, add_generation_prompt=False) == "user: hello\n"
    assert [answers.get(timeout=30) for _ in range(3)] == ["user: in the child\n"] * 3
    own = int(answers.get(timeout=30))
    process.join(30)
    assert own != pid == pid_of(template)
    assert is_alive(pid)
    wait_until(lambda: not is_alive(own))


def test_chat_template_process_cannot_write_files_and_has_a_memory_limit() -> None:
    template = ChatTemplate(PLAIN, {"bos_token": ""})
    template.check_compiles()
    limits = Path(f"/proc/{pid_of(template)}/limits").read_text()
    rows = {line[:26].strip(): line[26:].split()[:2] for line in limits.splitlines()}
    assert rows["Max address space"] == [str(MAX_MEMORY_BYTES)] * 2
    assert rows["Max file size"] == rows["Max core file size"] == ["0", "0"]


def test_chat_template_renders_in_a_millisecond() -> None:
    template = ChatTemplate(PLAIN, {"bos_token": ""})
    times = []
    for _ in range(100):
        start = time.perf_counter()
        template.render(HELLO, add_generation_prompt=True)
        times.append(time.perf_counter() - start)
    assert times[0] < 2.0  # 0.1 on a quiet machine
    assert sorted(times)[20] < 1e-3


def test_chat_template_without_a_python_executable_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    for program in ("/no/such/python", "", "/bin/true"):
        monkeypatch.setattr(isolated.sys, "executable", program)
        with pytest.raises(BackendUnavailableError, match="cannot be started"):
            ChatTemplate(PLAIN, {}).render(HELLO, add_generation_prompt=False)
    monkeypatch.undo()
    monkeypatch.setattr(isolated.sys, "frozen", True, raising=False)
    with pytest.raises(BackendUnavailableError, match="it is one program with paceline"):
        ChatTemplate(PLAIN, {}).render(HELLO, add_generation_prompt=False)


def test_chat_template_gets_other_types_as_json_values() -> None:
    template = ChatTemplate("{{ messages|tojson }}", {})
    value = {"role": "user", "content": ("a", np.float32(0.5), object(), {"x": None}), "name": None, "thinking": "hm"}
    assert template.render([value], add_generation_prompt=False) == (
        '[{"thinking": "hm", "role": "user", "content": ["a", 0.5, "<object>", {"x": null}], "reasoning_content": "hm"}]'
    )


@pytest.mark.parametrize("messages", [["hello"], [{"a": {(1, 2): 3}}], [None]], ids=str)
def test_non_json_messages_are_a_request_error(messages: list[object]) -> None:
    with pytest.raises(RequestError, match="messages must be JSON values"):
        ChatTemplate(PLAIN, {}).render(messages, add_generation_prompt=False)  # type: ignore[arg-type]
    circular: dict[str, object] = {"role": "user"}
    circular["content"] = circular
    with pytest.raises(RequestError, match="messages must be JSON values"):
        ChatTemplate(PLAIN, {}).render([circular], add_generation_prompt=False)
