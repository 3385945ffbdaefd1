"""Parts of a server that all routes use."""

from collections.abc import Collection
from dataclasses import dataclass, field

from paceline import __version__
from paceline.engine.async_engine import AsyncEngine
from paceline.engine.inputs import RequestOptions
from paceline.sampling.defaults import SamplingDefaults
from paceline.server.admission import AdmissionControl
from paceline.server.chat import ChatService
from paceline.server.errors import HttpError
from paceline.server.generation import Generation
from paceline.server.metrics import Metrics
from paceline.server.settings import ServerSettings
from paceline.server.token_texts import TokenTexts

LATEST = ":latest"
"""The tag of Ollama that a name means without one."""


@dataclass(frozen=True, slots=True)
class Service:
    """An engine and its limits.

    Attributes:
        model: its name in requests.
        chat: answers conversations; `generation` answers prompts.
        logged_fields: names of ignored fields that the log has already.
    """

    engine: AsyncEngine
    settings: ServerSettings
    model: str
    admission: AdmissionControl
    metrics: Metrics
    generation: Generation
    chat: ChatService
    texts: TokenTexts
    logged_fields: set[str] = field(default_factory=set)

    def adapter_of(self, name: str | None) -> str | None:
        """The adapter that a request names as its model; None = the model itself, which a request without a name gets.

        Raises:
            HttpError: 404.
        """
        if name is None or name == self.model:
            return None
        if name in self.engine.adapters:
            return name
        known = "".join(f", or its adapter {one!r}" for one in self.engine.adapters)
        raise HttpError(
            404, f"the model of the request is not served here: send {self.model!r}{known}", parameter="model", code="model_not_found"
        )

    def name_of(self, options: RequestOptions) -> str:
        """The name of the model in an answer."""
        adapter = options.get("adapter")
        return adapter if isinstance(adapter, str) else self.model

    def is_own_name(self, name: str) -> bool:
        """Whether a name means the model itself in some dialect: Ollama's may end with a tag."""
        return name.removesuffix(LATEST) == self.model.removesuffix(LATEST)

    @property
    def sampling_defaults(self) -> SamplingDefaults:
        """Sampling parameters for requests that leave them open."""
        return self.engine.loaded.sampling_defaults

    @property
    def drafters(self) -> Collection[str]:
        """Names of the drafters that a request may name."""
        return self.engine.loaded.engine.speculator.drafter_names

    @property
    def reads_predictions(self) -> bool:
        """Whether a drafter has a use for what a request predicts."""
        return self.engine.loaded.engine.speculator.uses_predictions

    @property
    def fingerprint(self) -> str:
        """What answers depend on apart from the request: OpenAI's `system_fingerprint`."""
        return f"paceline-{__version__}-{self.engine.loaded.numerics}"
