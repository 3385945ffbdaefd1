"""What the routes share."""

from collections.abc import Collection
from dataclasses import dataclass

from paceline import __version__
from paceline.engine.async_engine import AsyncEngine
from paceline.server.dialogue.dialogue import Dialogue
from paceline.server.gate import Gate
from paceline.server.generation import Generation
from paceline.server.http_errors import HttpError
from paceline.server.metrics import Metrics
from paceline.server.settings import ServerSettings


@dataclass(frozen=True, slots=True)
class Service:
    """An engine, its limits, and who may still come in.

    Attributes:
        model: the name that requests ask for.
    """

    engine: AsyncEngine
    settings: ServerSettings
    model: str
    gate: Gate
    metrics: Metrics
    generation: Generation
    dialogue: Dialogue

    def check_model(self, name: str | None) -> None:
        """That a request asks for the model that is here; None = whichever is.

        Raises:
            HttpError: 404.
        """
        if name is not None and name != self.model:
            raise HttpError(
                404, f"the model of the request is not served here: ask for {self.model!r}", parameter="model", code="model_not_found"
            )

    @property
    def drafters(self) -> Collection[str]:
        """Names of the drafters that a request may name."""
        return self.engine.opened.engine.speculator.drafters

    @property
    def reads_predictions(self) -> bool:
        """Whether a drafter has a use for what a request predicts."""
        drafter = self.engine.opened.engine.speculator.drafter
        return drafter is not None and drafter.reads_predictions

    @property
    def fingerprint(self) -> str:
        """What answers depend on besides the request: OpenAI's `system_fingerprint`."""
        return f"paceline-{__version__}-{self.engine.opened.numerics}"
