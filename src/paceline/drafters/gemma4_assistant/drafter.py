"""Drafting with a Gemma 4 assistant: a small decoder reads the target's own keys and values, and feeds itself what it returns.

Source: Gemma 4's assistants ("multi-token prediction drafters"), as transformers and llama.cpp run them. Deviations: every kept token is
the target's own draw (`speculation/verify.py`); trees as well as chains, because a node costs one row and leaves nothing behind.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from paceline.drafters.gemma4_assistant.checkpoint import load_assistant
from paceline.drafters.gemma4_assistant.network import FEATURE, AssistantNetwork, NodeRows
from paceline.drafters.head_files import HeadFiles
from paceline.drafters.head_kinds import HeadKind
from paceline.drafters.pairs.guesses import NOTHING, Guessed, Guesses
from paceline.drafters.pairs.tree import GrowingDraft, draws_of, shape_of
from paceline.drafters.target import LoadedTarget
from paceline.errors import PacelineError
from paceline.runtimes.base import FloatArray, ForwardOutput, split_into_passes
from paceline.sampling.draw import Distribution
from paceline.speculation.drafter import CommittedRows, DraftBudget, Drafter, DrafterNeeds, DrafterTraits, RequestState
from paceline.speculation.request import Request
from paceline.speculation.tree import DraftTree

_NO_BLOCKS = np.zeros(0, np.int32)


@dataclass(slots=True)
class _Feature:
    """The target's final hidden state [E] of the token at `position`."""

    position: int
    values: FloatArray


class AssistantDrafter(Drafter):
    """Proposes trees of what an assistant guesses, level by level for all requests together.

    Args:
        vocab_size: V of the target; ids beyond it are never proposed.
        tree_width: guesses per node, and nodes expanded per level; 1 = a chain.
    """

    name = HeadKind.GEMMA4_ASSISTANT.value
    needs = DrafterNeeds(hidden_states=True)

    def __init__(self, network: AssistantNetwork, *, vocab_size: int, tree_width: int = 1) -> None:
        config = network.assistant.config
        self._network, self._vocab_size, self._tree_width = network, vocab_size, tree_width
        self._features = RequestState[_Feature]()
        self._guesses = Guesses(None, vocab_size, config.layers.vocab_size)
        self.traits = DrafterTraits(self._describe())
        self._ranking = None if config.clusters is not None else self._guesses.ranking(tree_width)

    def observe(self, rows: Sequence[CommittedRows]) -> None:
        for one in rows:
            last = one.start + one.num_rows - 1
            if one.hidden_states is not None and last == len(one.request.token_ids) - 2:  # it produced the root
                self._features[one.request] = _Feature(last, np.array(one.hidden_states[-1], np.float32))

    def propose(self, requests: Sequence[Request], budgets: Sequence[DraftBudget]) -> list[DraftTree | None]:
        trees: dict[int, DraftTree | None] = {}
        asked = [
            GrowingDraft(request, budget, *shape_of(budget, self._tree_width), _NO_BLOCKS, 0)
            for request, budget in zip(requests, budgets, strict=True)
        ]
        for part in split_into_passes([draft for draft in asked if self._can_guess(draft)], lambda draft: draft.width):
            self._draft(part)
            trees |= {id(draft.request): draft.finished(self.name) for draft in part}
        return [trees.get(id(request)) for request in requests]

    def _describe(self) -> str:
        config = self._network.assistant.config
        parts = [f"{config.layers.num_layers} layers", f"hidden size {config.layers.hidden_size}", "reads the target's keys and values"]
        if config.clusters is not None:
            parts.append(f"{config.clusters.num_best} of {config.clusters.count} clusters of tokens")
        if self._tree_width > 1:
            parts.append(f"trees {self._tree_width} wide")
        return f"{self.name} ({', '.join(parts)})"

    def _can_guess(self, draft: GrowingDraft) -> bool:
        """Whether the target has just run everything in front of the root."""
        request = draft.request
        feature, behind = self._features.get(request), len(request.token_ids) - 1
        return draft.depth > 0 and feature is not None and feature.position == behind - 1 and request.sequence.committed_len == behind

    def _draft(self, drafts: Sequence[GrowingDraft]) -> None:
        while active := [draft for draft in drafts if draft.frontier]:
            nodes = [self._nodes(draft) for draft in active]
            output = self._network.forward(nodes, self._ranking, None if self._ranking is None else draws_of(active))
            features, first = np.array(output.results[FEATURE]), 0
            ranked = output.ranked if self._ranking is not None else []
            for draft in active:
                last = first + len(draft.frontier)
                if draft.reads_ranks and ranked:
                    is_greedy = draft.request.params.is_greedy
                    guesses = [self._guesses.of_ranked(row, draft.width, is_greedy=is_greedy) for row in ranked[first:last]]
                else:
                    guesses = [self._guess(draft, node, output, row) for row, node in enumerate(draft.frontier, first)]
                draft.take(guesses, features[first:last])
                first = last

    def _nodes(self, draft: GrowingDraft) -> NodeRows:
        """The frontier: the root, or the last rows of those that a head with a cache would run."""
        request = draft.request
        if draft.level == 0:
            return NodeRows(request.token_ids[-1:], self._features[request].values[None], request.sequence)
        rows = draft.next_rows()
        first = rows.wanted[0]
        return NodeRows(rows.token_ids[first:], rows.features[first:], request.sequence)

    def _guess(self, draft: GrowingDraft, node: int, output: ForwardOutput, row: int) -> Guessed:
        request, path, wants_draws = draft.request, draft.path(node), draft.budget.wants_draws
        if self._network.assistant.config.clusters is None:
            return self._guesses.next_token(request, path, output.logits[row], draft.width, wants_draws=wants_draws)
        ids, scores = self._network.candidates(output, row, self._vocab_size)
        if not len(ids) or not np.isfinite(scores).all():
            return NOTHING
        if request.processor.only_scales:  # the others need not be looked at
            is_greedy = request.params.is_greedy
            scaled = scores if is_greedy else scores / np.float32(request.params.temperature)
            candidates = Distribution(scaled, ids, is_greedy)
            return self._guesses.of_candidates(request, path, candidates, draft.width, wants_draws=wants_draws)
        whole = np.full(self._vocab_size, -np.inf, np.float32)
        whole[ids] = scores
        try:
            return self._guesses.of_target_row(request, path, whole, draft.width, wants_draws=wants_draws)
        except PacelineError:  # none of them is allowed here
            return NOTHING


def open_assistant(files: HeadFiles, target: LoadedTarget) -> AssistantDrafter:
    """The drafter for an assistant's files.

    Raises:
        CheckpointError, IncompatibleDrafterError: the files do not hold an assistant of this target.
        BackendUnavailableError: the target's runtime lets nobody read its cache.
    """
    assistant = load_assistant(files, target.runtime.config, num_threads=target.engine.num_threads)
    assistant = replace(assistant, weights=target.quantized(assistant.weights, files.files))
    network = AssistantNetwork(assistant, target.runtime, max_model_len=target.max_model_len)
    return AssistantDrafter(network, vocab_size=target.vocab_size, tree_width=target.speculation.tree_width)
