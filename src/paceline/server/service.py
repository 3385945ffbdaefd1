"""What answers requests for one loaded model."""

from collections.abc import Collection
from dataclasses import dataclass

from paceline import __version__
from paceline.engine.async_engine import AsyncEngine
from paceline.engine.inputs import RequestOptions
from paceline.errors import ConfigError, shortened
from paceline.parsing.registry import OutputFormat
from paceline.sampling.defaults import SamplingDefaults
from paceline.sampling.grammars.compile_sandbox import CompileSandbox
from paceline.server.admission import AdmissionControl
from paceline.server.chat import ChatService
from paceline.server.errors import HttpError
from paceline.server.generation import Generation
from paceline.server.metrics import Metrics
from paceline.server.settings import ServerSettings
from paceline.server.token_texts import TokenTexts

LATEST = ":latest"
"""The tag of Ollama that a name means without one."""
GGUF = ".gguf"


@dataclass(frozen=True, slots=True)
class Service:
    """An engine and its limits.

    Attributes:
        model: its name in requests.
        chat: answers conversations; `generation` answers prompts.
    """

    engine: AsyncEngine
    settings: ServerSettings
    model: str
    admission: AdmissionControl
    generation: Generation
    chat: ChatService
    texts: TokenTexts

    @classmethod
    def of(cls, engine: AsyncEngine, name: str, settings: ServerSettings, admission: AdmissionControl, metrics: Metrics) -> "Service":
        """Return what answers with an engine.

        Raises:
            ConfigError: a parser of the settings does not exist, or an adapter has the name of the model.
        """
        inputs = engine.loaded.input_processor
        inputs.grammar_compiler.sandbox = CompileSandbox(settings.grammar_timeout_s)
        formats = OutputFormat.of(inputs.tokenizer, settings.tool_call_parser, settings.reasoning_parser)
        generation = Generation(engine, settings, admission, metrics)
        chat, texts = ChatService(generation, formats), TokenTexts(inputs.tokenizer)
        service = cls(engine, settings, name, admission, generation, chat, texts)
        for adapter in filter(service.is_own_name, engine.adapters):
            text = f"an adapter is called {adapter!r}, as the model is"
            raise ConfigError(f"{text}: give it another name, or the model with served_model_name")
        return service

    def adapter_of(self, name: str | None) -> str | None:
        """The adapter that a request names as its model; None = the model itself, which a request without a name gets.

        Raises:
            HttpError: 404.
        """
        return adapter_of(name, self.model, self.engine.adapters)

    def name_of(self, options: RequestOptions) -> str:
        """The name of the model in an answer."""
        adapter = options.get("adapter")
        return adapter if isinstance(adapter, str) else self.model

    def is_own_name(self, name: str) -> bool:
        """Whether a name means the model itself."""
        return matches_model_name(name, self.model)

    @property
    def sampling_defaults(self) -> SamplingDefaults:
        """Sampling parameters for requests that leave them open."""
        return self.engine.loaded.sampling_defaults

    @property
    def reads_predictions(self) -> bool:
        """Whether a drafter uses the prediction of a request."""
        return self.engine.loaded.engine.speculator.uses_predicted_outputs

    @property
    def fingerprint(self) -> str:
        """OpenAI's `system_fingerprint`: identifies everything but the request that the output depends on."""
        return f"paceline-{__version__}-{self.engine.loaded.numerics}"


def is_same_model(name: str, model: str) -> bool:
    """Whether a name means a model: Ollama's clients may add the tag that a name has without one."""
    return name.removesuffix(LATEST) == model.removesuffix(LATEST)


def matches_model_name(name: str, model: str) -> bool:
    """Whether a request's name means a model: as `is_same_model`, and the ending of a GGUF file may be left out."""
    return name.removesuffix(LATEST).removesuffix(GGUF) == model.removesuffix(LATEST).removesuffix(GGUF)


def adapter_of(name: str | None, model: str, adapters: Collection[str]) -> str | None:
    """See `Service.adapter_of`; for any model and its adapters."""
    if name is None or is_same_model(name, model):
        return None
    for known in (name, name.removesuffix(LATEST)):
        if known in adapters:
            return known
    if matches_model_name(name, model):
        return None
    raise model_not_found(name, repr(model), *(f"its adapter {one!r}" for one in adapters))


def model_not_found(name: str, *served: str) -> HttpError:
    """The answer to a request that names another model than those that are served."""
    text = f"the model {shortened(name)} is not served here: send {', or '.join(served)}"
    return HttpError(404, text, parameter="model", code="model_not_found")
