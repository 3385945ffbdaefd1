"""A conversation as a person or a script has it: what is a message, what is a command, and that nothing typed is lost."""

import contextlib
import functools
import io
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from harness.checkpoints import write_byte_level_tokenizer, write_checkpoint
from harness.fake_llm import TEXT, FakeLLM
from paceline.cli import app
from paceline.cli.chat import Chat, Conversation, DisplayOptions
from paceline.cli.message_input import Entry
from paceline.cli.rendering import Writer
from paceline.cli.reporting import print_notice
from paceline.errors import CapacityError, RequestError
from paceline.outputs import StreamChunk
from paceline.sampling.params import MAX_INT, SamplingParams
from paceline.speculation.request import TokenOrigin

TESTS = Path(__file__).resolve().parents[1]
EDITOR_IS_READY = "\x1b[?12l\x1b[?25h"
GOODBYE = "\x04"
INTERRUPT = "\x03"


def chat(*arguments: str, stdin: str | bytes) -> Result:
    return CliRunner().invoke(app, ["chat", *arguments], input=stdin)


def last_messages(llm: FakeLLM) -> list[str]:
    """The last message of each request to the model."""
    return [messages[-1]["content"] for messages in llm.asked]


# --- from a pipe ---


def test_chat_command_sends_all_earlier_turns(fake_llm: type[FakeLLM]) -> None:
    done = chat("--system", "Be brief.", stdin="Hi\n\nAnd?\n")
    assert (done.exit_code, done.stdout) == (0, f"{TEXT}\n{TEXT}\n")
    first = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    assert fake_llm.made[0].asked == [first, [*first, {"role": "assistant", "content": TEXT}, {"role": "user", "content": "And?"}]]


def test_chat_joins_continued_lines_and_quoted_blocks_into_one_message(fake_llm: type[FakeLLM]) -> None:
    given = 'one \\\ntwo\n"""\nthree\n\n/exit\n"""\n"""four"""\n"""five\nsix"""\na path\\\\\n"""\nto the end\n'
    assert chat(stdin=given).exit_code == 0
    assert last_messages(fake_llm.made[0]) == ["one \ntwo", "three\n\n/exit", "four", "five\nsix", "a path\\\\", "to the end"]


def test_chat_reset_keeps_only_the_system_message(fake_llm: type[FakeLLM]) -> None:
    chat("--system", "Be brief.", stdin="Hi\n/reset\nAnd?\n")
    assert [message["content"] for message in fake_llm.made[0].asked[1]] == ["Be brief.", "And?"]


def test_chat_exit_ends_and_help_lists_the_commands(fake_llm: type[FakeLLM]) -> None:
    done = chat(stdin="/help\n/exit\nnever asked\n")
    assert (done.exit_code, fake_llm.made[0].asked) == (0, [])
    assert all(
        f"\n{command} " in f"\n{done.stderr}" for command in ("/help", "/set", "/system", "/retry", "/save", "/drafts", "/clear", "/exit")
    )


@pytest.mark.parametrize("command", ["/exit", "/quit", "/bye"])
def test_chat_accepts_quit_bye_and_clear_as_commands(fake_llm: type[FakeLLM], command: str) -> None:
    assert chat(stdin=f"Hi\n/reset\nHi\n/clear\nHi\n{command}\nnever asked\n").exit_code == 0
    assert [len(messages) for messages in fake_llm.made[0].asked] == [1, 1, 1]


def test_chat_drafts_command_marks_the_tokens_of_the_last_answer(fake_llm: type[FakeLLM]) -> None:
    done = chat(stdin="/drafts\nHi\n/drafts\n")
    assert done.stdout == f"{TEXT}\n{{The}}[ quick brown] fox[ caf]é\n"
    assert "/drafts: there is no answer yet" in done.stderr
    assert "[accepted draft], bonus token, {plain token}\nngram 4 accepted of 5 drafted\n" in done.stderr


# --- a full context ---


@pytest.mark.parametrize(("option", "first"), [([], "Be brief."), (["--no-keep-system"], "And?")])
def test_chat_drops_the_oldest_turns_of_a_full_context_with_one_notice(fake_llm: type[FakeLLM], option: list[str], first: str) -> None:
    fake_llm.max_model_len = 80  # a token a character: a quarter is kept for the answer
    done = chat("--system", "Be brief.", *option, stdin="Hi\nAnd?\nAnd?\nAnd?\n/save /dev/null\n")
    sent = [[message["content"] for message in messages] for messages in fake_llm.made[0].asked]
    assert sent[0] == ["Be brief.", "Hi"]
    assert sent[1] == ["Be brief.", "Hi", TEXT, "And?"]
    assert sent[2][0] == first
    assert sent[2][-3:] == ["And?", TEXT, "And?"]
    assert all(sum(map(len, one)) <= 60 for one in sent)
    assert done.stderr.count("the context of 80 tokens is full: from now on the oldest turns are not sent to the model") == 1


def test_chat_message_larger_than_the_context_is_sent_alone(fake_llm: type[FakeLLM]) -> None:
    fake_llm.max_model_len = 10
    chat(stdin="Hi\nA message that is too long\n")
    assert [len(messages) for messages in fake_llm.made[0].asked] == [1, 1]


def test_chat_save_includes_turns_dropped_from_the_context(fake_llm: type[FakeLLM], tmp_path: Path) -> None:
    fake_llm.max_model_len = 40
    chat(stdin=f"Hi\nAnd?\nAnd?\n/save {tmp_path / 'said.json'}\n")
    assert len(json.loads((tmp_path / "said.json").read_text())) == 6


# --- lines of a terminal ---


def wrapped(text: str, monkeypatch: pytest.MonkeyPatch, *, pieces: int = 1, columns: int = 20) -> list[str]:
    """Lines that a terminal of some columns gets of a text that comes in pieces of some characters."""
    monkeypatch.setenv("COLUMNS", str(columns))
    screen = Terminal()
    monkeypatch.setattr(sys, "stdout", screen)
    writer = Writer(wraps=True)
    for start in range(0, len(text), pieces):
        writer.write(StreamChunk(text[start : start + pieces], [0], [TokenOrigin.PLAIN]))
    writer.close()
    return screen.getvalue().splitlines()


@pytest.mark.parametrize("pieces", [1, 3, 50])
def test_chat_wraps_lines_at_words_on_a_terminal(monkeypatch: pytest.MonkeyPatch, pieces: int) -> None:
    text = "The quick brown fox jumps over the lazy dog.\n\n    indented, and a-word-longer-than-the-line is cut"
    lines = wrapped(text, monkeypatch, pieces=pieces)
    assert lines[:3] == ["The quick brown fox ", "jumps over the lazy ", "dog."]
    assert lines[3:5] == ["", "    indented, and a-"[:18].rstrip() + " "]
    assert [word for line in lines for word in line.split()] == text.split()


def test_chat_counts_wide_characters_as_two_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    assert wrapped("日本語の文章には空白がありません", monkeypatch, columns=10) == ["日本語の文", "章には空白", "がありませ", "ん"]


def test_chat_does_not_wrap_lines_in_a_pipe(fake_llm: type[FakeLLM], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "10")
    assert chat(stdin="Hi\n").stdout == f"{TEXT}\n"


def test_chat_message_may_start_with_a_path(fake_llm: type[FakeLLM]) -> None:
    chat(stdin="/etc/hosts holds what?\n/usr what is it\n")
    assert last_messages(fake_llm.made[0]) == ["/etc/hosts holds what?", "/usr what is it"]


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("/nonsense", "/nonsense is not a command; /help lists them"),
        ("/sett temperature 1", "/sett is not a command; did you mean /set?"),
        ("/show info", "/show is not a command; /set shows the sampling parameters"),
        ("/regen", "/regen is not a command; did you mean /retry?"),
        ("/set parameter temperature 1", "/set: leave out the word parameter: /set temperature 0.7"),
        ("/set system Be brief", "/set: use /system TEXT"),
        ("/set num_predict 5", "/set: there is no num_predict; did you mean max_tokens?"),
        (
            "/set num_ctx 4096",
            "/set: num_ctx is set when the model is loaded; end, and begin again: paceline chat MODEL --max-model-len",
        ),
        ("/set drafter none", "/set: drafter is set when the model is loaded; end, and begin again: paceline chat MODEL --drafter VALUE"),
        ("/byee", "/byee is not a command; did you mean /bye?"),
        ("/retry now", "/retry takes no argument"),
        ("/retry", "/retry: nothing was said yet"),
        ("/set tempature 1", "/set: there is no tempature; did you mean temperature?"),
        ("/set temperature warm", "temperature: 'warm' is not a number"),
        ("/set top_p 2", "top_p: 2 is out of range"),
        ("/save", "/save needs the name of a file"),
        ("/save /", "/save: / exists; give another name"),
        ("/save ~nobodyhere/x", "/save: ~nobodyhere/x cannot be written"),
    ],
)
def test_invalid_chat_command_is_reported_and_exits_with_2(fake_llm: type[FakeLLM], line: str, says: str) -> None:
    done = chat(stdin=f"{line}\nHi\n")
    assert (done.exit_code, done.stdout) == (2, f"{TEXT}\n")
    assert f"error: {says}" in done.stderr


def test_chat_set_command_shows_and_changes_sampling_parameters(fake_llm: type[FakeLLM]) -> None:
    commands = "/set temperature 0.5\n/set max-tokens 7\n/set stop END\n/set seed 3\n/set ignore_eos true\n"
    done = chat("--top-k", "4", "--temp", "0", stdin=f"{commands}Hi\n/set seed none\n/set stop none\n/set\n")
    assert done.exit_code == 0
    expected = SamplingParams(temperature=0.5, max_tokens=7, stop="END", seed=3, ignore_eos=True, top_k=4)
    assert fake_llm.made[0].params == expected
    shown = dict(re.findall(r"^(\w+) +(\S+)$", done.stderr, re.MULTILINE))
    assert (shown["temperature"], shown["max_tokens"], shown["top_k"], shown["seed"], shown["stop"]) == ("0.5", "7", "4", "none", "none")
    assert "temperature is 0.5\n" in done.stderr


def test_chat_max_tokens_is_the_rest_of_the_context_by_default(fake_llm: type[FakeLLM]) -> None:
    done = chat(stdin="/?\n/set\n/set max_tokens 5\n/set max_tokens -1\nHi\n")
    assert "/retry " in done.stderr
    assert re.search(r"^max_tokens +-1$", done.stderr, re.MULTILINE)
    assert done.stderr.count("max_tokens is ") == 2
    assert "max_tokens is -1\n" in done.stderr
    assert fake_llm.made[0].params == SamplingParams(temperature=0.7, max_tokens=MAX_INT)


def test_chat_system_command_shows_sets_and_removes_the_system_message(fake_llm: type[FakeLLM]) -> None:
    done = chat(stdin='Hi\n/system "Be brief."\nHi\n/system\n/system ""\nHi\n')
    roles = [[message["role"] for message in messages][:1] for messages in fake_llm.made[0].asked]
    assert roles == [["user"], ["system"], ["user"]]
    assert done.stderr.count("system message: Be brief.") == 2
    assert "no system message" in done.stderr


def test_chat_retry_sends_the_last_message_again(fake_llm: type[FakeLLM]) -> None:
    done = chat("--temp", "0", stdin="Hi\nAnd?\n/retry\n/set temperature 1\n/retry\n")
    assert done.exit_code == 0
    assert fake_llm.made[0].asked[1] == fake_llm.made[0].asked[2] == fake_llm.made[0].asked[3]
    assert done.stderr.count("the same answer will come again; /set temperature 0.7 makes it another one") == 1


def test_chat_save_writes_messages_in_request_format(fake_llm: type[FakeLLM], tmp_path: Path) -> None:
    path = tmp_path / "said.json"
    done = chat("--system", "Be brief.", stdin=f"Grüß dich\n/save {path}\nAnd?\n/save {path}\n")
    assert done.exit_code == 0, done.stderr
    saved = json.loads(path.read_text(encoding="utf-8"))
    assert saved[:-1] == fake_llm.made[0].asked[1]
    assert saved[-1] == {"role": "assistant", "content": TEXT}
    assert chat(stdin=f"Hi\n/save {path}\n").exit_code == 2, "another conversation's file"
    path.unlink()
    assert "exists; give another name" in chat(stdin=f"Hi\n/save {path}\n/clear\n/save {path}\n").stderr
    assert len(json.loads(path.read_text(encoding="utf-8"))) == 2


def test_refused_chat_message_is_removed_and_sets_the_exit_code(fake_llm: type[FakeLLM]) -> None:
    fake_llm.fails_at, fake_llm.failure = 0, RequestError("the prompt is too long", parameter="prompt")
    done = chat(stdin="Hi\nAnd?\n/retry\n")
    assert done.exit_code == 2
    assert done.stderr.count("error: the prompt is too long\n") == 3
    assert [[message["content"] for message in asked] for asked in fake_llm.made[0].asked] == [["Hi"], ["And?"], ["And?"]]
    fake_llm.failure = CapacityError("no room")
    assert chat(stdin="Hi\n").exit_code == 1


def test_interrupt_ends_a_chat_that_reads_a_pipe(fake_llm: type[FakeLLM]) -> None:
    fake_llm.fails_at = 1
    done = chat(stdin="Hi\nAnd?\n")
    assert (done.exit_code, done.stdout) == (130, "The\n")
    assert fake_llm.made[0].closed_streams == 1


def test_quiet_option_prints_only_answers_and_notices(fake_llm: type[FakeLLM]) -> None:
    for arguments in (["chat", "-q"], ["run", "--quiet", "Hi"]):
        done = CliRunner().invoke(app, arguments, input="Hi\n")
        assert (done.exit_code, done.stdout, done.stderr) == (0, f"{TEXT}\n", "a notice\n")


def test_chat_without_chat_template_is_refused_before_loading(tmp_path: Path) -> None:
    directory = write_checkpoint(tmp_path, "llama", num_hidden_layers=1, vocab_size=300)
    write_byte_level_tokenizer(directory)
    done = chat("--model", str(directory), "--drafter", "none", stdin="Hi\n")
    assert (done.exit_code, done.stdout) == (2, "")
    last = done.stderr.splitlines()[-1]
    assert last.startswith(f"error: {directory} has no chat template, so it takes no messages: use a model trained for conversations")
    assert last.endswith(f'or complete texts: paceline run {directory} "TEXT"')
    assert done.stderr.count("\n") == 1, "nothing is loaded"


def test_chat_with_an_invalid_template_is_refused_before_input(tmp_path: Path) -> None:
    directory = write_checkpoint(tmp_path, "llama", num_hidden_layers=1, vocab_size=300)
    write_byte_level_tokenizer(directory)
    (directory / "chat_template.jinja").write_text("{% for message in messages %}{{ message.content")
    done = chat("--model", str(directory), "--drafter", "none", stdin="Hi\n")
    assert (done.exit_code, done.stdout) == (1, "")
    last = done.stderr.splitlines()[-1]
    assert last.startswith("error: ")
    assert "chat template" in last


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_statistics_are_wrapped_between_words_on_a_terminal_only(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "7 tokens | 12.0 tokens/s | mean acceptance length 2.33 | acceptance rate 50% (4 of 8 drafted)"
    monkeypatch.setenv("COLUMNS", "30")
    for stream in (Terminal(), io.StringIO()):
        monkeypatch.setattr(sys, "stderr", stream)
        print_notice(text)
        lines = [re.sub(r"\x1b\[[0-9;]*m", "", line).rstrip() for line in stream.getvalue().splitlines()]
        assert " ".join(lines) == text
        assert (max(map(len, lines)) <= 30) is stream.isatty()


# --- at a terminal ---


class Sitter:
    """A user at a terminal with given messages."""

    is_interactive = True

    def __init__(self, *messages: str) -> None:
        self._entries = [Entry(message) for message in messages]

    def next(self) -> Entry:
        if not self._entries:
            raise EOFError
        return self._entries.pop(0)


def test_interrupt_after_an_answer_does_not_end_the_chat(monkeypatch: pytest.MonkeyPatch) -> None:
    FakeLLM.made = []
    llm, told = FakeLLM(), list[str]()

    def say_and_be_interrupted(text: str) -> None:
        told.append(text)
        if len(told) == 1:
            raise KeyboardInterrupt

    for module in (sys.modules[Chat.__module__], sys.modules[Writer.__module__]):
        monkeypatch.setattr(module, "print_notice", say_and_be_interrupted)
    conversation = Conversation(SamplingParams())
    Chat(llm, conversation, Sitter("Hi", "And?"), DisplayOptions()).run()  # type: ignore[arg-type]
    assert [turn["content"] for turn in conversation.turns] == ["Hi", TEXT, "And?", TEXT]
    assert told[1] == "Ctrl-D or /exit ends"


DRIVER = """
import sys
from pathlib import Path
from types import ModuleType
sys.path.insert(0, sys.argv[1])
from harness.fake_llm import EchoLLM
EchoLLM.made, EchoLLM.gate = [], Path(sys.argv[2])
module = ModuleType("paceline.llm")
module.LLM = EchoLLM
sys.modules["paceline.llm"] = module
from paceline.cli import main
sys.argv = ["paceline", "chat", *sys.argv[3:]]
main()
"""
Sit = Callable[..., Any]


def said(message: str) -> str:
    """What the model answers, as a terminal gets it."""
    return f"you said {message!r} to me"


def pasted(text: str) -> str:
    """Text as terminals send it that mark pastes."""
    return f"\x1b[200~{text}\x1b[201~"


@pytest.fixture
def gate(tmp_path: Path) -> Path:
    """As long as it exists answers stop in the middle."""
    return tmp_path / "gate"


@pytest.fixture
def sit(gate: Path) -> Iterator[Sit]:
    """Opens a terminal with a conversation in it."""
    fdpexpect = pytest.importorskip("pexpect.fdpexpect")
    if os.name == "nt":
        pytest.skip("no pseudo-terminals")
    with contextlib.ExitStack() as stack:

        def sit(*arguments: str) -> Any:
            ours, theirs = os.openpty()
            stack.callback(os.close, theirs)
            # the first terminal that the leader of a session opens is its own; what that is set to is printed before and after
            script = 'exec <"$0" >"$0" 2>&1; trap : INT; stty rows 24 cols 80; stty -g; "$@"; echo "status $?"; stty -g'
            line = ["sh", "-c", script, os.ttyname(theirs), sys.executable, "-c", DRIVER, str(TESTS), str(gate), *arguments]
            environment = {**os.environ, "TERM": "xterm", "PROMPT_TOOLKIT_NO_CPR": "1", "NO_COLOR": "1"}
            heeds_interrupts = functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL)  # where the tests run in the background
            running = stack.enter_context(subprocess.Popen(line, env=environment, start_new_session=True, preexec_fn=heeds_interrupts))
            stack.callback(running.kill)
            terminal = fdpexpect.fdspawn(ours, encoding="utf-8", timeout=30)
            stack.callback(terminal.close)
            terminal.expect(r"([0-9a-f:]{20,})\r\n")
            terminal.settings = terminal.match[1]
            terminal.expect_exact(EDITOR_IS_READY)
            return terminal

        yield sit


def leave(terminal: Any) -> None:
    """End the conversation and see that the terminal is as it was."""
    terminal.send(GOODBYE)
    terminal.expect("status 0\r\n")
    terminal.expect(r"([0-9a-f:]{20,})\r\n")
    assert terminal.match[1] == terminal.settings


def test_typed_and_pasted_multi_line_blocks_are_one_message(sit: Sit) -> None:
    terminal = sit()
    for keys, message in (
        (pasted("one\ntwo \\\n/exit"), "one\ntwo \\\n/exit"),
        (pasted('"""Says.\r\n\r\nMore."""\r\ndef f(): ...\\'), '"""Says.\n\nMore."""\ndef f(): ...\\'),
        ("first \\\rsecond", "first \nsecond"),
        ('"""\rthree\r\r/exit"""', "three\n\n/exit"),
        (pasted("/exit"), "/exit"),
        (pasted("/exit\n"), "/exit"),
        ("look: " + pasted("a\nb\n"), "look: a\nb"),
        ("four\x1b\rfive", "four\nfive"),
        ("\x1b[A!", "four\nfive!"),
    ):
        terminal.send(keys + "\r")
        terminal.expect_exact(said(message))
        terminal.expect("tokens a step")
    leave(terminal)


def test_input_typed_during_an_answer_is_kept_for_the_next_prompt(sit: Sit, gate: Path) -> None:
    terminal = sit("-q")
    gate.touch()
    terminal.send("go\r")
    terminal.expect_exact(said("go")[:9])
    terminal.send("later\r" + pasted("p1\np2") + "\r" + "x" * 600)
    time.sleep(0.3)
    gate.unlink()
    terminal.expect_exact(said("go")[9:] + "\r\n")
    assert "later" not in terminal.before
    assert "p1" not in terminal.before
    for message in ("later", "p1\np2"):
        terminal.expect_exact(said(message) + "\r\n")
    terminal.send("!\r")
    terminal.expect_exact(said("x" * 600 + "!")[-10:] + "\r\n")
    leave(terminal)


def test_ctrl_c_during_an_answer_keeps_the_typed_input_and_the_chat(sit: Sit, gate: Path) -> None:
    terminal = sit()
    gate.touch()
    terminal.send("go\r")
    terminal.expect_exact(said("go")[:9])
    terminal.send("kept" + INTERRUPT)
    terminal.expect("interrupted")
    gate.unlink()
    terminal.expect_exact("kept")
    terminal.send("\r")
    terminal.expect_exact(said("kept"))
    terminal.expect_exact(EDITOR_IS_READY)
    terminal.send("half a message" + INTERRUPT)
    terminal.expect_exact("Ctrl-D or /exit ends")
    terminal.send("/nonsense\r")
    terminal.expect_exact("not a command")
    terminal.send("/retry\r")
    terminal.expect_exact(said("kept"))
    leave(terminal)  # status 0: the errors were shown interactively
