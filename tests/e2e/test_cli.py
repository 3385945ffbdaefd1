"""The command line as a person or a script meets it: stdout, stderr, exit codes."""

import json
import os
import re
import signal
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner, Result

import paceline
from harness.fake_llm import TEXT, FakeLLM
from paceline.cli import app, main
from paceline.cli.options import METAVARS, NO_MODEL, PANELS, Settings, flags_of
from paceline.cli.reporting import print_error, print_notice, reported_errors
from paceline.cli.standard_streams import _fill_descriptor
from paceline.config import EngineConfig, SpeculationConfig
from paceline.errors import (
    BackendUnavailableError,
    CapacityError,
    CheckpointError,
    ConfigError,
    IncompatibleDrafterError,
    PacelineError,
    RequestError,
)
from paceline.sampling.params import MAX_INT, SamplingParams

REPOSITORY = Path(__file__).resolve().parents[2]
HEAVY = {"torch", "transformers", "tokenizers", "scipy", "fastapi", "uvicorn", "prometheus_client"}


def _invoke(*arguments: str, stdin: str | bytes | None = None) -> Result:
    return CliRunner().invoke(app, list(arguments), input=stdin)


def _paceline(*arguments: str, stdin: str = "", **environment: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-m", "paceline", *arguments],
        cwd=REPOSITORY,
        input=stdin,
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, **environment},
    )


# --- what goes where ---


def test_run_prints_only_the_text_on_stdout(fake_llm: type[FakeLLM]) -> None:
    done = _invoke("run", "Once")
    assert (done.exit_code, done.stdout) == (0, TEXT + "\n")
    assert "a notice" in done.stderr
    assert "a banner" in done.stderr


CLOSING_LINE = "7 tokens, 12.0 tokens/s, 2.3 tokens a step, cut at the token limit"


def test_run_ends_with_one_line_of_statistics(fake_llm: type[FakeLLM]) -> None:
    assert _invoke("run", "Once").stderr.splitlines()[-1] == CLOSING_LINE


def test_run_explain_adds_details_after_the_statistics(fake_llm: type[FakeLLM]) -> None:
    details = (
        "drafter ngram | acceptance rate 50% (4 of 8 drafted) | plain steps 1 of 3 (the prompt's last pass: 1) | finish reason length | "
        "numerics exact"
    )
    assert _invoke("run", "Once", "--explain").stderr.splitlines()[-3:] == [CLOSING_LINE, details, "an explanation"]
    assert _invoke("run", "Once", "--explain", "--temp", "0.7").stderr.splitlines()[-2] == f"{details} | seed 77"


def test_run_json_prints_one_object_only(fake_llm: type[FakeLLM]) -> None:
    done = _invoke("run", "Once", "--json")
    assert done.exit_code == 0
    assert done.stdout.count("\n") == 1
    answer = json.loads(done.stdout)
    assert list(answer) == [
        "text", "token_ids", "prompt_token_ids", "finish_reason", "usage", "timing", "seed", "numerics", "drafter", "speculation",
        "model", "version",
    ]  # fmt: skip
    assert (answer["text"], answer["model"], answer["version"]) == (TEXT, "mini", paceline.__version__)
    assert answer["speculation"]["mean_acceptance_length"] == 2.3333


def test_show_drafts_without_colours_marks_runs_with_brackets(fake_llm: type[FakeLLM]) -> None:
    done = _invoke("run", "Once", "--show-drafts")
    assert done.stdout == "{The}[ quick brown] fox[ caf]é\n"
    assert "[accepted draft], bonus token, {plain token}" in done.stderr


def test_show_drafts_on_a_terminal_uses_three_text_styles(fake_llm: type[FakeLLM], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    done = CliRunner().invoke(app, ["run", "Once", "--show-drafts"], color=True)
    assert done.stdout.startswith("\x1b[4;33mThe\x1b[0m\x1b[32m quick\x1b[0m\x1b[32m brown\x1b[0m\x1b[1m fox\x1b[0m")
    assert "accepted draft (green)" in done.stderr


def test_no_color_variable_overrides_force_color(fake_llm: type[FakeLLM], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("NO_COLOR", "1")
    assert CliRunner().invoke(app, ["run", "Once", "--show-drafts"], color=True).stdout == "{The}[ quick brown] fox[ caf]é\n"


def test_show_drafts_ends_where_a_stop_string_cut_the_text(fake_llm: type[FakeLLM]) -> None:
    """A stop string cuts inside a token."""
    fake_llm.text = "The quick br"
    assert _invoke("run", "Once", "--show-drafts").stdout == "{The}[ quick br]\n"


# --- options of the engine ---


def test_run_completes_the_prompt_unchanged(fake_llm: type[FakeLLM]) -> None:
    _invoke("run", "Once ")
    assert fake_llm.made[0].asked == ["Once "]


@pytest.mark.parametrize("arguments", [[], ["-"]])
def test_run_without_prompt_reads_standard_input_unchanged(fake_llm: type[FakeLLM], arguments: list[str]) -> None:
    _invoke("run", *arguments, stdin="Es war\r\neinmal ä\n".encode())
    assert fake_llm.made[0].asked == ["Es war\r\neinmal ä\n"]


def test_run_chat_and_system_options_send_messages(fake_llm: type[FakeLLM]) -> None:
    user = {"role": "user", "content": "Hi"}
    _invoke("run", "Hi", "--chat")
    _invoke("run", "Hi", "--system", "Be brief.", "--json")
    assert [llm.asked for llm in fake_llm.made] == [[[user]], [[{"role": "system", "content": "Be brief."}, user]]]


def test_run_options_reach_the_engine_and_sampling_parameters(fake_llm: type[FakeLLM]) -> None:
    options = "--model m --threads 3 --kv-cache-gb 0.5 --offline --num-speculative-tokens 7 --drafter ngram --drafter d"
    options += " --tree-width 2 --kv-cache-dtype f16 --no-prefix-caching --acceptance rejection"
    options += " --draft-adapter e --drafter-options tree=accuracy --drafter-options boundaries=2,8,13"
    sampling = "--max-tokens 9 --temperature 0.5 --top-k 4 --top-p 0.9 --min-p 0.1 --seed 5 --stop A --stop B --ignore-eos"
    penalties = "--repetition-penalty 1.1 --frequency-penalty -0.5 --presence-penalty 0.25"
    assert _invoke("run", "x", *options.split(), *sampling.split(), *penalties.split()).exit_code == 0
    (llm,) = fake_llm.made
    given = {
        "model": "m", "threads": 3, "kv_cache_dtype": "f16", "kv_cache_gb": 0.5, "enable_prefix_caching": False, "offline": True,
        "drafter": ("ngram", "d"), "num_speculative_tokens": 7, "tree_width": 2, "draft_adapter": "e", "acceptance": "rejection",
        "drafter_options": {"tree": "accuracy", "boundaries": "2,8,13"},
    }  # fmt: skip
    assert llm.arguments == asdict(EngineConfig()) | asdict(SpeculationConfig()) | given
    assert llm.params == SamplingParams(
        max_tokens=9, temperature=0.5, top_k=4, top_p=0.9, min_p=0.1, seed=5, stop=("A", "B"), ignore_eos=True,
        repetition_penalty=1.1, frequency_penalty=-0.5, presence_penalty=0.25,
    )  # fmt: skip


def test_run_defaults_equal_those_of_the_python_api(fake_llm: type[FakeLLM], monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[Settings] = []
    monkeypatch.setattr("paceline.cli.loading.load", lambda settings: taken.append(settings) or fake_llm())  # type: ignore[func-returns-value]
    _invoke("run", "x")
    assert taken == [Settings(EngineConfig(), SamplingParams(), SpeculationConfig())]


# --- what goes wrong ---


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ConfigError("wrong"), 2),
        (RequestError("wrong"), 2),
        (IncompatibleDrafterError("wrong"), 2),
        (CheckpointError("wrong"), 1),
        (CapacityError("wrong"), 1),
        (BackendUnavailableError("wrong"), 1),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else "",
)
def test_command_error_is_one_line_with_an_exit_code(fake_llm: type[FakeLLM], error: PacelineError, code: int) -> None:
    fake_llm.load_failure = error
    done = _invoke("run", "Once")
    assert (done.exit_code, done.stdout, done.stderr) == (code, "", "error: wrong\n")


def test_command_error_with_line_breaks_is_one_line(fake_llm: type[FakeLLM]) -> None:
    fake_llm.load_failure = CheckpointError("no\nsuch [file] " + "x" * 300)
    assert _invoke("run", "Once").stderr == "error: no such [file] " + "x" * 300 + "\n"


def test_debug_option_prints_the_traceback(fake_llm: type[FakeLLM]) -> None:
    fake_llm.load_failure = ConfigError("wrong")
    done = _invoke("run", "Once", "--debug")
    assert "Traceback" in done.stderr
    assert done.stderr.endswith("error: wrong\n")


def test_unexpected_exception_is_reported_in_one_line(fake_llm: type[FakeLLM]) -> None:
    fake_llm.fails_at, fake_llm.failure = 1, RuntimeError("out of luck")
    done = _invoke("run", "Once")
    assert (done.exit_code, done.stdout) == (1, "The\n")
    assert done.stderr.splitlines()[-1] == "error: RuntimeError: out of luck (unexpected; --debug prints where)"


def test_interrupted_run_prints_the_partial_text(fake_llm: type[FakeLLM]) -> None:
    fake_llm.fails_at = 2
    done = _invoke("run", "Once")
    assert (done.exit_code, done.stdout) == (130, "The quick brown fox\n")
    assert re.fullmatch(r"4 tokens, [\d,.]+ tokens/s, 2.0 tokens a step, interrupted", done.stderr.splitlines()[-1])
    assert fake_llm.made[0].closed_streams == 1


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ("--temperature -1", "temperature: -1.0 is out of range"),
        ("--temperature nan", "temperature: nan is out of range"),
        ("--max-tokens 0", "max_tokens: 0 is out of range"),
        ("--max-tokens -5", "max_tokens: -5 is out of range"),
        ("--top-p 0", "top_p: 0.0 is out of range"),
        ("--top-k -3", "top_k: -3 is out of range"),
        ("--min-p 2", "min_p: 2.0 is out of range"),
        ("--repetition-penalty 0", "repetition_penalty: 0.0 is out of range"),
        ("--seed -1", "seed: -1 is out of range"),
        ("--seed 99999999999999999999", "seed: 99999999999999999999 is out of range"),
        ("--stop=", "stop: '' cannot end the output"),
        ("--numerics exactly", "numerics is 'exactly': use one of exact, fast"),
        ("--dtype int3", "dtype is 'int3'"),
        ("--device tpu", "device is 'tpu'"),
        ("--threads 0", "threads is 0"),
        ("--max-model-len 1", "max_model_len is 1"),
        ("--kv-cache-gb -2", "kv_cache_gb is -2.0"),
        ("--num-speculative-tokens 0", "num_speculative_tokens is 0"),
        ("--num-speculative-tokens many", "num_speculative_tokens is 'many'"),
        ("--drafter-options tree", "--drafter-options is 'tree': use NAME=VALUE"),
        ("--tree-width 99", "tree_width is 99"),
        ("--drafter=", "drafter is ''"),
        ("--json --show-drafts", "give one of them"),
    ],
)
def test_run_refuses_out_of_range_values_before_loading(fake_llm: type[FakeLLM], options: str, says: str) -> None:
    done = _invoke("run", "x", *options.split())
    assert (done.exit_code, done.stdout) == (2, "")
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1
    assert says in done.stderr
    assert fake_llm.made == []


def test_advice_names_options_instead_of_settings(capsys: pytest.CaptureFixture[str]) -> None:
    print_error("too long: shorten the prompt, lower max_tokens or raise kv_cache_gb")
    print_notice("the context is 64 tokens; raise max_model_len")
    assert capsys.readouterr().err.splitlines() == [
        "error: too long: shorten the prompt, lower --max-tokens or raise --kv-cache-gb",
        "the context is 64 tokens; raise --max-model-len",
    ]


@pytest.mark.parametrize("options", ["--top-k many", "--no-such-option", "x y z"])
def test_unknown_or_malformed_option_exits_with_2(fake_llm: type[FakeLLM], options: str) -> None:
    done = _invoke("run", *options.split())
    assert (done.exit_code, done.stdout) == (2, "")


@pytest.mark.parametrize("arguments", [[""], ["-"], [], ["--chat", ""], ["--system", "Be brief.", ""]], ids=repr)
def test_run_refuses_an_empty_prompt_before_loading(fake_llm: type[FakeLLM], arguments: list[str]) -> None:
    done = _invoke("run", *arguments, stdin="")
    assert (done.exit_code, done.stdout) == (2, "")
    assert done.stderr == "error: the prompt is empty: give a text, as an argument or on standard input\n"
    assert fake_llm.made == []


def test_run_refuses_a_prompt_that_is_not_utf8(fake_llm: type[FakeLLM]) -> None:
    assert "standard input is not UTF-8 text at byte 2" in _invoke("run", stdin=b"ab\xff").stderr
    assert "prompt is not UTF-8 text at character 1" in _invoke("run", "a\udcff").stderr
    assert fake_llm.made == []


# --- in a process of its own ---

LIST_MODULES = """
import contextlib, json, sys
from paceline.cli import main
for line in sys.argv[1:]:
    sys.argv = ["paceline", *line.split()]
    with contextlib.suppress(SystemExit):
        main()
    print("\\n" + json.dumps([line, sorted({name.split(".")[0] for name in sys.modules})]))
"""


def test_help_and_usage_errors_import_no_heavy_library() -> None:
    lines = ["--version", "--help", "run --help", "chat --help", "serve --help", "run x --temperature -1", "run --no-such-option"]
    done = subprocess.run([sys.executable, "-c", LIST_MODULES, *lines], cwd=REPOSITORY, capture_output=True, text=True, check=True)
    loaded = dict(json.loads(shown) for shown in done.stdout.splitlines() if shown.startswith("["))
    assert {line: set(names) & HEAVY for line, names in loaded.items()} == {line: set() for line in lines}


@pytest.mark.parametrize("flag", ["-V", "--version"])
def test_version_option_prints_the_version(flag: str) -> None:
    done = _invoke(flag)
    assert (done.exit_code, done.stdout) == (0, f"paceline {paceline.__version__}\n")


def test_shell_completion_completes_commands_and_options() -> None:
    assert "--install-completion" in _invoke("--help").stdout
    for words, expected in (("paceline ru", "run"), ("paceline run --num-s", "--num-speculative-tokens")):
        asked = {"_PACELINE_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(len(words.split()) - 1)}
        program = "import sys; from paceline.cli import main; sys.argv = ['paceline']; main()"
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, env={**os.environ, **asked})
        assert done.stdout.split() == [expected]


def flag_of(name: str) -> str:
    return flags_of(name)[-1]


def test_help_lists_common_options_and_help_all_lists_all() -> None:
    short, long = (_invoke("run", flag).stdout for flag in ("--help", "--help-all"))
    assert re.findall(r"─ (\w+) ─", short) == ["Arguments", "Options"]
    assert len(re.findall(r"^│ --", short, re.MULTILINE)) == 13
    assert "--top-k" not in short
    assert "run --help-all lists all options" in short
    assert "--top-k" in long


@pytest.mark.parametrize(
    ("arguments", "model", "asked"),
    [
        (["Once"], "mini", "Once"),
        (["m", "Once"], "m", "Once"),
        (["-m", "m", "Once"], "m", "Once"),
        (["-m", "m", "mini"], "m", "mini"),
        (["-m", "m", "-p", "Once"], "m", "Once"),
        (["m", "-p", "Once"], "m", "Once"),
        (["m.gguf"], "m.gguf", "from stdin"),
        (["owner/name"], "owner/name", "from stdin"),
        (["mini"], "mini", "from stdin"),
        (["tests"], "tests", "from stdin"),
        (["m", "-"], "m", "from stdin"),
        (["yes or/no"], "mini", "yes or/no"),
    ],
    ids=" ".join,
)
def test_run_accepts_model_and_text_as_arguments_or_options(
    fake_llm: type[FakeLLM], monkeypatch: pytest.MonkeyPatch, arguments, model, asked
) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.chdir(REPOSITORY)
    done = _invoke("run", *arguments, stdin="from stdin")
    assert done.exit_code == 0, done.output
    assert (fake_llm.made[0].arguments.get("model", "mini"), fake_llm.made[0].asked) == (model, [asked])
    assert (NO_MODEL in done.stderr) is (model == "mini" and "mini" not in arguments)


@pytest.mark.parametrize("command", ["run", "chat", "doctor", "prove", "bench"])
def test_model_given_as_argument_and_option_is_refused(command: str) -> None:
    done = _invoke(command, "one", *(["text"] if command == "run" else []), "--model", "two")
    assert (done.exit_code, done.stderr) == (2, "error: two models are given, 'one' and --model 'two': give one of them\n")


def test_text_given_as_argument_and_option_is_refused(fake_llm: type[FakeLLM]) -> None:
    done = _invoke("run", "m", "Once", "--prompt", "Twice")
    assert (done.exit_code, fake_llm.made) == (2, [])
    assert "the text is given twice" in done.stderr


@pytest.mark.parametrize(
    ("option", "meant"),
    [
        ("--tempature", "--temperature"),
        ("--n-predict", "--max-tokens"),
        ("--max-new-tokens", "--max-tokens"),
        ("--max-token", "--max-tokens"),
        ("--gpu-memory-utilization", "--kv-cache-gb"),
        ("--speculative-model", "--drafter"),
        ("-s", "--seed"),
        ("--draft-max", "--num-speculative-tokens"),
    ],
)
def test_unknown_option_error_suggests_the_nearest_name(fake_llm: type[FakeLLM], option: str, meant: str) -> None:
    done = _invoke("run", "x", option, "1")
    assert (done.exit_code, done.stdout) == (2, "")
    assert done.stderr == f"error: there is no option {option}: did you mean {meant}?\n"


def test_command_line_without_arguments_shows_the_commands() -> None:
    done = _invoke()
    assert isinstance(done.exception, SystemExit)
    assert [command for command in ("chat", "run", "serve", "doctor") if f"│ {command} " not in done.output] == []


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["chta"], "No such command 'chta'. Did you mean 'chat'?"),
        (["my.gguf"], "No such command 'my.gguf'. Did you mean paceline chat my.gguf?"),
        (["run", "mini", "two", "words"], "(words): put a text with spaces in quotes; "),
        (["run", "mini", "-n"], "'-n' requires an argument; "),
        (["run", "--top-k", "many"], "--top-k is 'many': use a whole number; "),
        (["run", "--temp", "hot"], "--temperature is 'hot': use a number; "),
        (["run", "x", "-ngl", "99"], "no option -ngl: leave it out: all layers are computed on the CPU"),
        (["run", "x", "-ngl=99"], "no option -ngl: leave it out"),
        (["run", "x", "--n-gpu-layers", "99"], "no option --n-gpu-layers: leave it out"),
        (["run", "x", "-no-cnv"], "no option -no-cnv: paceline run completes a text"),
        (["run", "x", "-nope"], "no option -nope; "),
        (["run", "x", "-fa", "on"], "no option -fa: leave it out"),
        (["run", "-hf", "o/n"], "no option -hf: give the id of the Hub as MODEL"),
        (["run", "x", "--format", "json"], "no option --format: paceline serve takes a schema with each request; "),
        (["run", "x", "--zzzzz"], "no option --zzzzz; "),
        (["run", "x", "-mm", "x.gguf"], "no option -mm: only texts are read"),
        (["bench", "mini", "--quick"], "no option --quick: paceline prove has --quick, paceline bench and train have --minutes"),
        (["chat", "mini", "-p", "Hi"], 'no option -p: paceline run MODEL "TEXT" completes a text'),
        (["list"], "No such command 'list': models are files and directories that you name"),
        (["pull", "llama3"], "No such command 'pull': paceline run owner/name gets a model"),
        (["-m", "my.gguf", "-p", "Hi", "-n", "32"], '-m is given without a command: paceline run MODEL "TEXT" completes a text'),
        (["--temp", "0"], "--temp is given without a command: "),
        (["frobnicate"], "No such command 'frobnicate'. Commands: chat, run, serve, "),
    ],
)
def test_usage_error_is_one_line(fake_llm: type[FakeLLM], arguments: list[str], says: str) -> None:
    done = _invoke(*arguments)
    assert (done.exit_code, done.stdout, fake_llm.made) == (2, "", [])
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1
    assert says in done.stderr


def test_short_options_are_those_of_llama_cpp(fake_llm: type[FakeLLM]) -> None:
    done = _invoke("run", *["-m", "m", "-p", "Once", "-n", "9", "-t", "3", "-c", "100", "-md", "d", "--temp", "0.5"])
    assert done.exit_code == 0, done.output
    (llm,) = fake_llm.made
    assert [llm.arguments[name] for name in ("model", "threads", "max_model_len", "drafter")] == ["m", 3, 100, "d"]
    assert llm.params == SamplingParams(max_tokens=9, temperature=0.5)


def test_word_after_an_option_is_its_value_even_if_it_looks_like_an_option(fake_llm: type[FakeLLM]) -> None:
    assert _invoke("run", "-m", "m", "-p", "-ngl", "-n9", "-qt2").exit_code == 0
    (llm,) = fake_llm.made
    assert (llm.asked, llm.params.max_tokens, llm.arguments["threads"]) == (["-ngl"], 9, 2)


def test_single_word_notice_says_that_it_is_the_text(fake_llm: type[FakeLLM]) -> None:
    notice = "is taken as the text and not as a model"
    assert f"'llama3.2:1b' {notice}" in _invoke("run", "llama3.2:1b").stderr
    assert notice not in _invoke("run", "m", "Once").stderr + _invoke("run", "two words").stderr + _invoke("run", "Once", "--quiet").stderr


def test_max_tokens_minus_1_means_until_the_context_is_full(fake_llm: type[FakeLLM]) -> None:
    assert _invoke("run", "m", "Once", "-n", "-1").exit_code == 0
    assert fake_llm.made[0].params.max_tokens == MAX_INT


# --- sampling of conversations ---


def test_run_chat_uses_the_sampling_recommended_by_the_model(fake_llm: type[FakeLLM]) -> None:
    fake_llm.recommended = {"temperature": 0.6, "top_p": 0.9}
    done = _invoke("run", "Hi", "--chat")
    assert fake_llm.made[0].params == SamplingParams(temperature=0.6, top_p=0.9, max_tokens=MAX_INT)
    assert "sampling: temperature 0.6, top_p 0.9 (the model's own)\n" in done.stderr
    done = _invoke("run", "Hi", "--chat", "--temp", "0")
    assert fake_llm.made[1].params == SamplingParams(temperature=0, top_p=0.9, max_tokens=MAX_INT)
    assert "sampling: greedy, top_p 0.9\n" in done.stderr


def test_run_chat_defaults_to_temperature_0_7_and_completion_to_greedy(fake_llm: type[FakeLLM]) -> None:
    assert "sampling: temperature 0.7\n" in _invoke("run", "Hi", "--chat").stderr
    fake_llm.recommended = {"temperature": 0.6}
    assert "sampling" not in _invoke("run", "Hi").stderr
    assert [llm.params for llm in fake_llm.made] == [SamplingParams(temperature=0.7, max_tokens=MAX_INT), SamplingParams()]


def test_help_all_lists_every_option_of_every_panel() -> None:
    text = _invoke("run", "--help-all").stdout
    assert all(flag_of(name) in text for panel in PANELS for name in panel.options)
    assert [title for title in ("Prompt", "Model", "Memory", "Sampling", "Speculation", "Output") if f"─ {title} ─" not in text] == []


@pytest.mark.parametrize("command", ["run", "chat", "doctor"])
def test_help_truncates_no_option_name_at_80_columns(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    text = _invoke(command, "--help-all").stdout
    assert "…" not in text
    assert max(map(len, text.splitlines())) <= 80
    words = set(re.split(r"[\s│]+", text))
    names = {name for panel in PANELS for name in panel.options if flag_of(name) in words}
    assert len(names) == (13 if command == "doctor" else sum(len(panel.options) for panel in PANELS))
    assert {METAVARS[name] for name in names if name in METAVARS} <= words
    begins = [line.index(word) for line in text.splitlines() for word in ("Longest prompt", "The drafter:") if word in line]
    assert len(begins) == 2
    assert max(begins) <= 56, "room for what an option does"


ENDLESS_STREAM = """
import itertools, signal, sys, types
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job starts with it ignored
from paceline.outputs import StreamChunk
class LLM:
    notices, banner = [], "a banner"
    max_model_len = 100
    def __init__(self, **arguments): pass
    def stream(self, prompt, params):
        for number in itertools.count():
            yield StreamChunk("text\\n", [number], [], None)
module = types.ModuleType("paceline.llm")
module.LLM = LLM
sys.modules["paceline.llm"] = module
from paceline.cli import main
sys.argv = ["paceline", "run", "a text"]
main()
"""


def test_run_ends_quietly_if_its_output_pipe_is_closed() -> None:
    running = subprocess.Popen([sys.executable, "-c", ENDLESS_STREAM], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert running.stdout is not None
    assert running.stderr is not None
    with running, running.stdout, running.stderr:
        assert running.stdout.readline() == "text\n"
        running.stdout.close()
        assert running.wait(timeout=60) == 1
        assert running.stderr.read() == f"{NO_MODEL}\na banner\n"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no such device here")
@pytest.mark.parametrize("arguments", ["--help", "--version", "run --help", "run text", "run text --json"])
def test_full_stdout_is_one_plain_error(
    fake_llm: type[FakeLLM], arguments: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["paceline", *arguments.split()])
    with Path("/dev/full").open("w") as full:
        monkeypatch.setattr("sys.stdout", full)
        with pytest.raises(SystemExit) as ended:
            main()
        sys.stdout.close()
    assert ended.value.code == 1
    assert capsys.readouterr().err.splitlines()[-1] == "error: standard output cannot be written (No space left on device)"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no such device here")
def test_run_prints_the_answer_although_stderr_is_full(
    fake_llm: type[FakeLLM], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["paceline", "run", "text"])
    with Path("/dev/full").open("w") as full:
        monkeypatch.setattr("sys.stderr", full)
        with pytest.raises(SystemExit) as ended:
            main()
    assert (ended.value.code, capsys.readouterr().out) == (0, f"{TEXT}\n")


@pytest.mark.parametrize(("arguments", "code"), [("run text", 0), ("run", 2), ("chat", 0)])
def test_closed_standard_streams_are_empty_and_no_terminals(
    fake_llm: type[FakeLLM], arguments: str, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["paceline", *arguments.split()])
    for name in ("stdin", "stdout", "stderr"):
        monkeypatch.setattr(sys, name, None)
    with pytest.raises(SystemExit) as ended:
        main()
    for stream in (sys.stdin, sys.stdout, sys.stderr):
        stream.close()
    assert ended.value.code == code


def test_closed_descriptor_is_filled_so_that_no_file_gets_its_number() -> None:
    number = os.dup(1)
    os.close(number)
    _fill_descriptor(number)
    with Path(os.devnull).open() as other:
        assert other.fileno() != number
    os.close(number)


@pytest.mark.skipif(os.name == "nt", reason="signals of a terminal")
def test_interrupt_during_an_import_exits_with_130(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(typer.Exit) as ended, reported_errors(debug=True):
        raise RuntimeError("Error calling __set_name__") from KeyboardInterrupt()  # as Python 3.11 reports it
    assert ended.value.exit_code == 130
    assert capsys.readouterr().err == "interrupted\n"


def test_run_interrupted_from_the_terminal_exits_with_130() -> None:
    running = subprocess.Popen([sys.executable, "-c", ENDLESS_STREAM], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert running.stdout is not None
    with running:
        running.stdout.readline()
        running.send_signal(signal.SIGINT)
        text, said = running.communicate(timeout=60)
    assert running.returncode == 130
    assert text.replace("text\n", "") == ""
    assert said.endswith(" tokens a step, interrupted\n")


SLOW_IMPORT = """
import signal, sys, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job starts with it ignored
class Slow:
    def find_spec(self, name, path=None, target=None):
        if name == "paceline.cli.run":
            print("importing", flush=True)
            time.sleep(60)
sys.meta_path.insert(0, Slow())
from paceline.__main__ import main
main()
"""


@pytest.mark.skipif(os.name == "nt", reason="signals of a terminal")
def test_interrupt_during_import_prints_one_line_and_exits_with_130() -> None:
    running = subprocess.Popen([sys.executable, "-c", SLOW_IMPORT], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert running.stdout is not None
    with running:
        assert running.stdout.readline() == "importing\n"
        running.send_signal(signal.SIGINT)
        _, said = running.communicate(timeout=60)
    assert (running.returncode, said) == (130, "interrupted\n")


# --- the real thing ---


PROMPT = "I want to book a table for two. I want to book a table for"
LIMITS = ("--max-tokens", "32", "--ignore-eos", "--offline")


@pytest.fixture(scope="module")
def answers() -> dict[str, dict[str, Any]]:
    """Output of the embedded model for PROMPT, by drafter."""
    with pytest.MonkeyPatch.context() as patch:
        _keep_library_settings(patch)
        return {drafter: _answer(drafter) for drafter in ("none", "ngram", "auto")}


def _keep_library_settings(patch: pytest.MonkeyPatch) -> None:
    for name in ("TRANSFORMERS_VERBOSITY", "HF_HUB_DISABLE_PROGRESS_BARS"):
        patch.setenv(name, "1")  # set by the command if it is missing: so that it is restored


def _answer(drafter: str) -> dict[str, Any]:
    done = _invoke("run", PROMPT, "--json", "--drafter", drafter, *LIMITS)
    assert done.exit_code == 0, done.output
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def test_embedded_model_gives_the_same_tokens_with_every_drafter(answers: dict[str, dict[str, Any]]) -> None:
    assert (answers["none"]["drafter"], answers["ngram"]["drafter"]) == ("none", "ngram")
    assert answers["ngram"]["speculation"]["num_accepted_tokens"] > 0
    assert len(answers["none"]["token_ids"]) == 32
    assert answers["none"]["token_ids"] == answers["ngram"]["token_ids"] == answers["auto"]["token_ids"]


def test_embedded_model_streams_the_text_of_the_json_output(answers: dict[str, dict[str, Any]]) -> None:
    streamed = _paceline("run", "-", *LIMITS, stdin=PROMPT, PYTHONUTF8="1")
    assert streamed.returncode == 0, streamed.stderr
    assert streamed.stdout.removesuffix("\n") == answers["none"]["text"].removesuffix("\n")
    assert streamed.stderr.splitlines()[-1].startswith("32 tokens, ")


def test_embedded_model_answers_in_the_chat_command(monkeypatch: pytest.MonkeyPatch) -> None:
    _keep_library_settings(monkeypatch)
    done = _invoke("chat", "--max-tokens", "8", "--offline", stdin="Hello\nA table for two\n/exit\n")
    assert done.exit_code == 0, done.output
    assert len(re.findall(r"^\d+ tokens?, ", done.stderr, re.MULTILINE)) == 2


def test_missing_model_error_is_one_line(tmp_path: Path) -> None:
    done = _paceline("run", "x", "--model", str(tmp_path / "nothing"), "--offline")
    assert done.returncode in (1, 2)
    assert done.stdout == ""
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1
