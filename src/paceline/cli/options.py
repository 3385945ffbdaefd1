"""The options that commands share. Names, types and defaults are those of the dataclasses they fill, so --help cannot drift."""

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields, replace
from typing import Annotated, Any, get_type_hints

import typer

from paceline.cli.reporting import reported_errors
from paceline.config import (
    ACCEPTANCE_RULES,
    DEVICES,
    DRAFT_QUANTIZATIONS,
    DTYPES,
    GGUF_WEIGHTS_CHOICES,
    NUMERICS,
    QUANTIZATIONS,
    EngineConfig,
    SpeculationConfig,
)
from paceline.errors import ConfigError, RequestError
from paceline.sampling.defaults import RECOMMENDABLE_PARAMS
from paceline.sampling.params import MAX_INT, SamplingParams
from paceline.server.replicas.settings import ClusterSettings
from paceline.server.settings import ServerSettings


@dataclass(frozen=True, slots=True)
class Panel:
    """A group of options in --help: fields of one dataclass, each with its help text."""

    title: str
    source: type[EngineConfig | SamplingParams | SpeculationConfig | ServerSettings | ClusterSettings]
    options: Mapping[str, str]

    def part(self, *names: str) -> "Panel":
        """Return a panel of some of its options."""
        return replace(self, options={name: self.options[name] for name in names})


MODEL = Panel(
    "Model",
    EngineConfig,
    {
        "model": 'The model, where it is no argument: "mini", a directory, a GGUF file or a Hugging Face id.',
        "gguf_file": "Name of the GGUF file to take from the directory or from the Hub's model. Default: the only one.",
        "gguf_weights": "exact: the file's own values. regroup: quantise them again so that they run faster; it changes tokens.",
        "numerics": "exact: a token never depends on what else is in the pass. fast: what the hardware does best.",
        "dtype": "Type to compute in; auto = as stored. Only f32 leaves rows unrounded before quantised matrices.",
        "quantization": "Quantise the weights while loading; the result is cached on disk. It changes tokens: another target.",
        "threads": "CPU threads. Default and maximum: the processors this process may use; efficiency cores are used on request only.",
        "merge_adapter": "Directory of a LoRA adapter that is added to the weights before they are rounded or quantised: another target.",
        "device": "Where to run.",
        "backend": "What computes: native (our own CPU kernels) or torch; auto = the faster one for this machine.",
        "revision": "Branch, tag or commit of a model from the Hugging Face Hub.",
        "hf_token": "Access token for the Hugging Face Hub. Better: log in with its own client, then no shell history holds the token.",
        "offline": "Use only what is on this machine.",
    },
)
ADAPTERS = Panel(
    "Model",
    EngineConfig,
    {
        "adapters": "A LoRA or X-LoRA adapter for the model: a name and the directory that PEFT wrote. Requests to a server or of a "
        "batch name it as their model, and there may be several; run and chat answer with it."
    },
)
MEMORY = Panel(
    "Memory",
    EngineConfig,
    {
        "max_model_len": "Longest prompt + output, in tokens. Default: what the model was made for.",
        "kv_cache_dtype": "Type of keys and values: f32, bf16, f16, int8; auto = as computed (quantised GGUF: f16). It changes tokens.",
        "kv_cache_gb": "Memory for keys and values at most, in gigabytes. Default: 4 full contexts, at most a quarter of the memory.",
        "enable_prefix_caching": "Keep rows of earlier prompts and answers while there is room, for what begins with the same tokens.",
        "state_interval": "Rows between the states of recurrent layers that are kept for that, a multiple of 32.",
    },
)
SAMPLING = Panel(
    "Sampling",
    SamplingParams,
    {
        "max_tokens": "Output tokens at most; -1 = until the context is full. Default: in conversations -1, for texts 256.",
        "temperature": "0 = greedy: always the most probable token. Default: in conversations the model's own, else 0.7; for texts 0.",
        "top_k": "Keep the k best tokens; 0 = off. In conversations the model's own by default.",
        "top_p": "Keep the best tokens until their mass reaches p; 1 = off. In conversations the model's own by default.",
        "min_p": "Keep tokens at least min_p times as probable as the best; 0 = off. In conversations the model's own by default.",
        "repetition_penalty": "Penalise tokens of the prompt and the output; 1 = off. In conversations the model's own by default.",
        "frequency_penalty": "Subtracted from a token's logit for each time it occurs in the output.",
        "presence_penalty": "Subtracted once from tokens that occur in the output.",
        "seed": "Same seed, same text. Default: a fresh one, which --explain prints.",
        "stop": "Text that ends the output; may be given several times.",
        "ignore_eos": "Go on after the model's own end of text.",
    },
)
SPECULATION = Panel(
    "Speculation",
    SpeculationConfig,
    {
        "drafter": "The drafter: auto (suffix, and a draft model or head that comes with the target), none, ngram, suffix, prediction; "
        "draft_model, medusa or mtp of the target's own directory; or the directory or id of a draft model, of Medusa or EAGLE heads, or "
        "of a Gemma 4 assistant. Several times: all. It changes the speed, never a token.",
        "num_speculative_tokens": 'Tokens to draft a step, at most: a number, or "auto" (16). As many are drafted as pay.',
        "tree_width": "Draft tokens for one position, of draft models and heads; 1 = a chain, or what Medusa heads make of its rows.",
        "acceptance": "match: a seed has one text, whatever drafts. rejection: more is accepted at high temperatures; sampled texts "
        "have the same distribution but depend on what was drafted.",
        "draft_quantization": "Quantise draft models and heads while loading; auto: on the CPU, to 4 bits with a quantised "
        "target, to 8 with a 16-bit one. It changes the speed alone.",
        "draft_adapter": "Directory of a LoRA adapter that the draft model computes with. It changes the speed alone.",
        "drafter_options": "A setting of one method, such as tree=accuracy (medusa), boundaries=2,16,29 "
        "(eagle3) or draft_vocab_size=32768, draft_vocab_corpus=FILE (mtp); may be given several times. docs/methods lists them.",
    },
)
BATCHES = Panel(
    "Batches",
    EngineConfig,
    {
        "max_num_seqs": "Samples that run at a time; others wait.",
        "max_num_batched_tokens": "Rows of one pass: prompt tokens and drafts of all requests.",
        "prefill_chunk_size": "Prompt rows of a pass, of all requests together; fewer shorten the gaps between other requests' tokens.",
    },
)
SERVER = Panel(
    "Server",
    ServerSettings,
    {
        "host": "Address to listen on. Other machines (0.0.0.0) need keys.",
        "port": "Port to listen on; 0 = any free one.",
        "served_model_name": "Name of the model in requests. Default: its id, or the last part of its path.",
        "allowed_hosts": "A further name that a Host header may have while only this machine can reach the server, such as a proxy's; "
        "may be given several times.",
        "allow_origin": "An origin whose web pages may use the server from a browser (CORS), such as http://localhost:3000; * = all; "
        "may be given several times.",
        "insecure": "Allow other machines to use the server without a key.",
        "adapter_loading": "Let requests load LoRA adapters from directories of this machine, and remove them; it takes a key.",
        "tool_call_parser": "Format of the model's tool calls: auto (from its chat template), none (calls are text), or a name such as "
        "hermes, qwen3_coder or llama3_json; docs/server.md lists all.",
        "reasoning_parser": "Format of its reasoning: auto, none, or a name such as qwen3; docs/server.md lists all.",
        "max_loaded": "Of several models, how many are loaded at a time; fewer if memory is short.",
        "unload_after": "Time without requests after which a model is unloaded, such as 10m; never = only to make room for another.",
        "unknown_fields": "Fields of a request that no API has: ignore them and name them in the log, or refuse the request.",
        "max_queue": "Samples that may wait; more are refused with status 429.",
        "max_body_mb": "Megabytes of a request.",
        "max_prompt_chars": "Characters of a prompt or a conversation.",
        "max_n": "Samples of a prompt.",
        "request_timeout_s": "Seconds an answer may take.",
        "drain_s": "Seconds that running requests get after SIGTERM or Ctrl-C.",
    },
)
REPLICAS = Panel(
    "Replicas",
    ClusterSettings,
    {
        "replicas": "Engines in processes of their own, which Ray runs and restarts; 0 = one in this process.",
        "ray_address": "Address of a Ray cluster that is running. Default: one of this machine's own, for as long as the command runs.",
        "max_lead": "Requests by which the replica that has the beginning of a prompt cached may be ahead of the least loaded one.",
    },
)
REQUESTS = replace(SERVER.part("served_model_name", "max_body_mb", "max_prompt_chars", "max_n"), title="Requests")
OUTPUT = "Output"
PANELS = (MODEL, ADAPTERS, MEMORY, SAMPLING, SPECULATION)
SERVING = (SERVER, REPLICAS, MODEL, ADAPTERS, MEMORY, BATCHES, SPECULATION)
BATCHING = (REQUESTS, REPLICAS, MODEL, ADAPTERS, MEMORY, BATCHES, SPECULATION)
FLAGS: Mapping[str, tuple[str, ...]] = {
    "enable_prefix_caching": ("--prefix-caching",),
    "adapters": ("--adapter",),
    "model": ("-m", "--model"),
    "max_tokens": ("-n", "--max-tokens"),
    "temperature": ("--temp", "--temperature"),
    "threads": ("-t", "--threads"),
    "max_model_len": ("-c", "--ctx-size", "--max-model-len"),
    "drafter": ("-md", "--draft-model", "--drafter"),
}
"""Flags that are not spelled like the field: short forms, repeatable options in the singular, and llama.cpp's names. Ours is the last."""
METAVARS = {
    "numerics": "|".join(NUMERICS),
    "dtype": "|".join(DTYPES),
    "kv_cache_dtype": "<str>",
    "quantization": "|".join(QUANTIZATIONS),
    "draft_quantization": "|".join(DRAFT_QUANTIZATIONS),
    "acceptance": "|".join(ACCEPTANCE_RULES),
    "device": "|".join(DEVICES),
    "backend": "auto|<str>",  # longer than a column
    "gguf_weights": "|".join(GGUF_WEIGHTS_CHOICES),
    "num_speculative_tokens": "auto|<int>",
    "stop": "<str>",
    "drafter": "<str>",
    "unknown_fields": "ignore|refuse",
    "unload_after": "DURATION",
    "tool_call_parser": "<str>",
    "reasoning_parser": "<str>",
    "drafter_options": "NAME=VALUE",
    "adapters": "NAME=DIR",
    "allowed_hosts": "<str>",
    "allow_origin": "ORIGIN",
}
MODEL_HELP = 'The model: "mini" (embedded, the default), a directory, a GGUF file or a Hugging Face id.'
NO_MODEL = "no MODEL is given: the embedded mini is used, a model of 14 M parameters for trying things out"
_OPEN_NAMES = ("max_tokens", *RECOMMENDABLE_PARAMS)  # their defaults depend on the command and the model
REPEATABLE = ("stop", "drafter", "drafter_options", "allowed_hosts", "allow_origin", "adapters")


@dataclass(frozen=True, slots=True)
class Settings:
    """Values of the shared options, validated.

    Attributes:
        given_sampling: names of the sampling parameters that were given, of those whose defaults depend on the command or the model.
        names_model: whether a model was named; else the embedded one is used.
        server: options of the server, checked once its keys are read.
        cluster: how many engines run, and where.
    """

    engine: EngineConfig
    sampling: SamplingParams
    speculation: SpeculationConfig
    quiet: bool = False
    debug: bool = False
    server: Mapping[str, Any] = field(default_factory=dict)
    cluster: ClusterSettings = field(default_factory=ClusterSettings)
    given_sampling: frozenset[str] = frozenset()
    names_model: bool = field(default=False, compare=False)

    @classmethod
    def take_from(cls, values: dict[str, Any], panels: Sequence[Panel] = PANELS) -> "Settings":
        """Build the settings from a command's option values, and remove these options from `values`.

        Raises:
            ConfigError, RequestError: a value is out of range.
        """
        given: dict[type, dict[str, Any]] = {panel.source: {} for panel in (*PANELS, SERVER, REPLICAS)}
        for panel in panels:
            given[panel.source] |= {name: values.pop(name) for name in panel.options}
        sampling, speculation, server = given[SamplingParams], given[SpeculationConfig], given[ServerSettings]
        names_model = given[EngineConfig].get("model") is not None
        if not names_model:
            given[EngineConfig].pop("model", None)
        if sampling:
            sampling = {name: value for name, value in sampling.items() if name not in _OPEN_NAMES or value is not None}
            if sampling.get("max_tokens") == -1:  # as in llama.cpp and Ollama
                sampling["max_tokens"] = MAX_INT
            sampling["stop"] = tuple(checked_text("stop", text) for text in sampling["stop"] or ())
        for name in {"allowed_hosts", "allow_origin"} & set(server):
            server[name] = tuple(server[name] or ())
        drafters = tuple(speculation["drafter"])
        speculation["drafter"] = drafters[0] if len(drafters) == 1 else drafters
        options = named_values("--drafter-options", speculation["drafter_options"], "NAME=VALUE, such as tree=accuracy")
        speculation["drafter_options"] = options
        adapters = given[EngineConfig].get("adapters", ())
        given[EngineConfig]["adapters"] = named_values("--adapter", adapters, "NAME=DIR, such as sql=adapters/sql")
        configs = EngineConfig(**given[EngineConfig]), SamplingParams(**sampling), SpeculationConfig(**speculation)
        cluster = ClusterSettings(**given[ClusterSettings])
        given_sampling = frozenset(sampling) & set(_OPEN_NAMES)
        return cls(*configs, values.pop("quiet"), values.pop("debug"), server, cluster, given_sampling, names_model)

    @property
    def adapter(self) -> str | None:
        """Name of the only adapter; None = there is none.

        Raises:
            ConfigError: there are several.
        """
        names = list(self.engine.adapters)
        if len(names) > 1:
            raise ConfigError(f"--adapter is given {len(names)} times ({', '.join(names)}), and one answers here: give one of them")
        return names[0] if names else None

    @property
    def start_lines(self) -> list[str]:
        """Lines for the user about defaults that were used, such as the built-in model."""
        return [] if self.names_model or self.quiet else [NO_MODEL]

    def llm_arguments(self) -> dict[str, Any]:
        """Return the keyword arguments of `paceline.LLM`."""
        return {one.name: getattr(config, one.name) for config in (self.engine, self.speculation) for one in fields(config)}


def with_settings(
    command: Callable[..., None],
    panels: Sequence[Panel] = PANELS,
    *,
    has_model_argument: bool = True,
    sort_words: Callable[[dict[str, Any]], None] | None = None,
) -> Callable[..., None]:
    """Add MODEL and the options of `panels` to a command, which gets them, validated, as its keyword argument `settings`.

    Errors of ours end the command as one line on stderr and an exit code; `--debug` adds the traceback.

    Args:
        has_model_argument: whether the first positional argument is MODEL.
        sort_words: moves the values of positional arguments to the names they belong to.
    """
    own = [one for one in inspect.signature(command, eval_str=True).parameters.values() if one.name != "settings"]
    own = [MODEL_ARGUMENT, *own] if has_model_argument else own
    shared = [parameter for panel in panels for parameter in _parameters(panel)]
    # --help shows panels in the order they are met
    parameters = sorted([*own, *shared, _QUIET, DEBUG], key=lambda one: one.annotation.__metadata__[0].rich_help_panel == OUTPUT)

    @functools.wraps(command)
    def with_checked_options(**values: Any) -> None:
        with reported_errors(debug=values["debug"]):
            if sort_words is not None:
                sort_words(values)
            if has_model_argument:
                values["model"] = named_model(values.pop(MODEL_ARGUMENT.name), values["model"])
            settings = Settings.take_from(values, panels)
            command(settings=settings, **values)

    return with_parameters(with_checked_options, parameters)


def with_parameters(command: Callable[..., None], parameters: Sequence[inspect.Parameter]) -> Callable[..., None]:
    """Give a command that takes any keyword arguments these parameters, which typer reads."""
    command.__dict__["__signature__"] = inspect.Signature(parameters)
    command.__annotations__ = {one.name: one.annotation for one in parameters}
    return command


def option(
    *flags: str, hint: Any, text: str, panel: str | None, name: str | None = None, default: Any = None, **more: Any
) -> inspect.Parameter:
    """Return a parameter of a command that is an option.

    Args:
        hint: its type.
        text: for --help.
        panel: title of its group there.
        name: of the parameter; None = that of the last flag.
        more: of `typer.Option`.
    """
    annotation = Annotated[hint, typer.Option(*flags, help=text, rich_help_panel=panel, **more)]
    name = name or flags[-1].removeprefix("--").replace("-", "_")
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def checked_text(name: str, text: str) -> str:
    """Return the text if it is valid Unicode: bytes that are not UTF-8 arrive from a shell as lone surrogates.

    Raises:
        RequestError: it is not.
    """
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise RequestError(f"{name} is not UTF-8 text at character {error.start}; convert it first", parameter=name) from None
    return text


def named_model(argument: str | None, option: str | None) -> str | None:
    """Return the model that the command line names; None if it names none.

    Raises:
        ConfigError: it names two.
    """
    if argument is not None and option is not None:
        raise ConfigError(f"two models are given, {argument!r} and --model {option!r}: give one of them")
    return option if argument is None else argument


_MODEL_HINT = Annotated[str | None, typer.Argument(metavar="MODEL", help=MODEL_HELP, show_default=False)]
MODEL_ARGUMENT = inspect.Parameter("model_argument", inspect.Parameter.KEYWORD_ONLY, default=None, annotation=_MODEL_HINT)
_QUIET = option("-q", "--quiet", hint=bool, text="Print no statistics and nothing about loading but notices.", panel=OUTPUT, default=False)
DEBUG = option("--debug", hint=bool, text="Print tracebacks and what libraries warn about.", panel=OUTPUT, default=False)


def _parameters(panel: Panel) -> list[inspect.Parameter]:
    hints = get_type_hints(panel.source)
    defaults = {one.name: one.default if one.default_factory is MISSING else one.default_factory() for one in fields(panel.source)}
    return [_parameter(name, hints[name], defaults[name], help_text, panel.title) for name, help_text in panel.options.items()]


def _parameter(name: str, hint: Any, default: Any, help_text: str, title: str) -> inspect.Parameter:
    parser = None
    if name in REPEATABLE:
        hint, default = list[str], [default] if default else []
    elif name in ("quantization", "draft_quantization"):
        hint = str
    elif name == "model" or name in _OPEN_NAMES:
        hint, default = hint | None, None
    elif name == "num_speculative_tokens":
        hint, parser = str, _count_or_word
    flags = flags_of(name)
    if default is True:  # add the --no- form
        flags = tuple(flag + flag.replace("--", "/--no-") for flag in flags)
    metavar = METAVARS.get(name)
    return option(*flags, hint=hint, text=help_text, panel=title, name=name, default=default, metavar=metavar, parser=parser)


def flags_of(name: str) -> tuple[str, ...]:
    """Return the flags of an option; the last one is its name."""
    return FLAGS.get(name, (f"--{name.replace('_', '-')}",))


def named_values(flag: str, texts: Iterable[str], example: str) -> dict[str, str]:
    """Return the values of a repeatable option by name.

    Raises:
        ConfigError: one has no "=", or a name comes twice.
    """
    found: dict[str, str] = {}
    for text in texts:
        name, _, value = text.partition("=")
        if not name or not value:
            raise ConfigError(f"{flag} is {text!r}: use {example}")
        if name in found:
            raise ConfigError(f"{flag} names {name!r} twice: give each name once")
        found[name] = value
    return found


def numbers(name: str, text: str, kind: type[int] | type[float]) -> tuple[float, ...]:
    """Return the numbers of a text, which has commas between them.

    Raises:
        ConfigError: one is no number.
    """
    try:
        return tuple(map(kind, text.split(",")))
    except ValueError:
        raise ConfigError(f"{name} is {text!r}: use numbers with commas between them, such as 0,1") from None


def _count_or_word(text: str) -> int | str:
    """Convert whole numbers; the dataclass checks the rest."""
    try:
        return int(text)
    except ValueError:
        return text
