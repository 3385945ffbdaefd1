"""Records the hidden states of the engine's own passes: the very states that a drafter will read, whatever the target's format.

A row belongs to a committed token. Its record is the residual stream at the chosen layer boundaries, ascending, and the final hidden state
after the last norm, in bfloat16.
"""

from collections.abc import Sequence
from contextlib import closing

import numpy as np
from numpy.typing import NDArray

from paceline.engine.loader import LoadedEngine, load_engine, parse_settings
from paceline.engine.request import EngineRequest
from paceline.machine import usable_processors
from paceline.models.weights import to_bf16
from paceline.sampling.params import SamplingParams
from paceline.speculation.drafter import CommittedRows, DraftBudget, Drafter, DrafterNeeds
from paceline.speculation.request import Request
from paceline.speculation.tree import DraftTree
from paceline.training.settings import TrainSettings

_BATCH, _BATCH_PER_THREAD = 32, 8


def batch_size(settings: TrainSettings) -> int:
    """Return how many requests run together: 32, on more than four processors 8 for each."""
    return max(_BATCH, _BATCH_PER_THREAD * (settings.threads or usable_processors()))


class FeatureRecorder(Drafter):
    """Keeps the features of each request's rows, and drafts nothing.

    Args:
        boundaries: layer boundaries to record.
        hidden_size: E of the target.
    """

    name = "recorder"

    def __init__(self, boundaries: tuple[int, ...], hidden_size: int) -> None:
        self.needs = DrafterNeeds(hidden_states=True, layers=boundaries)
        self.width = (len(boundaries) + 1) * hidden_size
        self._rows: dict[int, list[NDArray[np.uint16]]] = {}

    def has_candidates(self, request: Request) -> bool:
        return False

    def propose(self, requests: Sequence[Request], budgets: Sequence[DraftBudget]) -> list[DraftTree | None]:
        return [None] * len(requests)

    def observe(self, rows: Sequence[CommittedRows]) -> None:
        for one in rows:
            if one.hidden_states is None:
                raise RuntimeError("the target returned no hidden states")
            joined = np.concatenate([*one.collected_hidden_states, one.hidden_states], axis=1)
            kept = self._rows.setdefault(id(one.request), [])
            if one.first_position == 0:
                kept.clear()  # evicted rows are computed again
            kept.append(to_bf16(joined))

    def take(self, request: Request) -> NDArray[np.uint16]:
        """Return and drop the features [tokens - 1, width] of a finished request: its last token has no row."""
        kept = self._rows.pop(id(request), [])
        features = np.concatenate(kept) if kept else np.empty((0, self.width), np.uint16)
        return features[: len(request.token_ids) - 1]


def open_recorder(settings: TrainSettings, boundaries: tuple[int, ...], hidden_size: int) -> tuple[LoadedEngine, FeatureRecorder]:
    """Load the target with a recorder of its hidden states.

    Raises:
        PacelineError: as `load_engine`.
    """
    recorder = FeatureRecorder(boundaries, hidden_size)
    options = {
        "gguf_file": settings.gguf_file, "threads": settings.threads, "drafter": recorder, "max_num_seqs": batch_size(settings),
        "enable_prefix_caching": False, "max_model_len": settings.max_tokens + 1,
    }  # fmt: skip
    return load_engine(*parse_settings(settings.model, options)), recorder


def run(loaded: LoadedEngine, prompts: Sequence[list[int]], params: Sequence[SamplingParams]) -> list[EngineRequest]:
    """Run prompts to their ends and return the requests, in order.

    Raises:
        RequestError, CapacityError: as `LLM.generate`.
    """
    requests = loaded.make_requests(prompts, params, {}, is_streamed=False)
    with closing(loaded.engine.run(requests)) as steps:
        for _ in steps:
            pass
    return requests
