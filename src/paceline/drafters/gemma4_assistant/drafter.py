"""Drafter for Gemma 4 assistants: a small decoder attends to the target's keys and values and feeds itself.

Source: Gemma 4's assistants ("multi-token prediction drafters"), as transformers and llama.cpp run them. Deviations: every kept token is
the target's own draw (`speculation/verify.py`); trees are drafted too, because a node costs one row and is not cached.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from paceline.drafters.draft_sampler import DraftSampler, DraftTokens
from paceline.drafters.gemma4_assistant.checkpoint import load_assistant
from paceline.drafters.gemma4_assistant.network import FEATURE, AssistantNetwork, NodeRows
from paceline.drafters.head_files import HeadFiles
from paceline.drafters.head_kinds import HeadKind
from paceline.drafters.recurrent_heads.tree import GrowingDraft, draft_depth_and_width, frontier_draws
from paceline.drafters.target import LoadedTarget
from paceline.runtimes.base import FloatArray, ForwardOutput, split_into_passes
from paceline.speculation.drafter import CommittedRows, DraftBudget, Drafter, DrafterNeeds, DrafterTraits, RequestState
from paceline.speculation.request import Request
from paceline.speculation.tree import DraftTree

_NO_BLOCKS = np.zeros(0, np.int32)


@dataclass(slots=True)
class _LastHiddenState:
    """The target's final hidden state [E] of the token at `position`."""

    position: int
    hidden_state: FloatArray


class AssistantDrafter(Drafter):
    """Drafts trees with an assistant, level by level for all requests together.

    Args:
        vocab_size: V of the target; ids beyond it are never proposed.
        tree_width: draft tokens per node, and nodes expanded per level; 1 = a chain.
    """

    name = HeadKind.GEMMA4_ASSISTANT.value
    needs = DrafterNeeds(hidden_states=True)

    def __init__(self, network: AssistantNetwork, *, vocab_size: int, tree_width: int = 1) -> None:
        config = network.assistant.config
        self._network, self._vocab_size, self._tree_width = network, vocab_size, tree_width
        self._features = RequestState[_LastHiddenState]()
        self._sampler = DraftSampler(None, vocab_size, config.layers.vocab_size)
        self.traits = DrafterTraits(self._banner_text())
        self._ranking = None if config.clusters is not None else self._sampler.ranking(tree_width)

    def observe(self, rows: Sequence[CommittedRows]) -> None:
        for one in rows:
            last = one.start + one.num_rows - 1
            if one.hidden_states is not None and last == len(one.request.token_ids) - 2:  # it produced the root
                self._features[one.request] = _LastHiddenState(last, np.array(one.hidden_states[-1], np.float32))

    def propose(self, requests: Sequence[Request], budgets: Sequence[DraftBudget]) -> list[DraftTree | None]:
        trees: dict[int, DraftTree | None] = {}
        drafts = [
            GrowingDraft(request, budget, *draft_depth_and_width(budget, self._tree_width), _NO_BLOCKS, 0)
            for request, budget in zip(requests, budgets, strict=True)
        ]
        for part in split_into_passes([draft for draft in drafts if self._can_draft(draft)], lambda draft: draft.width):
            self._grow_drafts(part)
            trees |= {id(draft.request): draft.to_tree(self.name) for draft in part}
        return [trees.get(id(request)) for request in requests]

    def _banner_text(self) -> str:
        config = self._network.assistant.config
        parts = [f"{config.layers.num_layers} layers", f"hidden size {config.layers.hidden_size}", "reads the target's keys and values"]
        if config.clusters is not None:
            parts.append(f"{config.clusters.num_best} of {config.clusters.count} clusters of tokens")
        if self._tree_width > 1:
            parts.append(f"trees {self._tree_width} wide")
        return f"{self.name} ({', '.join(parts)})"

    def _can_draft(self, draft: GrowingDraft) -> bool:
        """Return whether the target's cache and last hidden state end just before the root."""
        request = draft.request
        feature, position = self._features.get(request), len(request.token_ids) - 1
        return draft.depth > 0 and feature is not None and feature.position == position - 1 and request.sequence.committed_len == position

    def _grow_drafts(self, drafts: Sequence[GrowingDraft]) -> None:
        while active := [draft for draft in drafts if draft.frontier]:
            nodes = [self._frontier_rows(draft) for draft in active]
            output = self._network.forward(nodes, self._ranking, None if self._ranking is None else frontier_draws(active))
            features, first = np.array(output.results[FEATURE]), 0
            ranked = output.summaries if self._ranking is not None else []
            for draft in active:
                last = first + len(draft.frontier)
                if draft.uses_ranking and ranked:
                    is_greedy = draft.request.params.is_greedy
                    drafted = [self._sampler.sample_ranked(row, draft.width, is_greedy=is_greedy) for row in ranked[first:last]]
                else:
                    drafted = [self._sample(draft, node, output, row) for row, node in enumerate(draft.frontier, first)]
                draft.add_level(drafted, features[first:last])
                first = last

    def _frontier_rows(self, draft: GrowingDraft) -> NodeRows:
        """Return the nodes to run next. The network has no cache of its own, so only the newest level of a tree runs."""
        request = draft.request
        if draft.level == 0:
            return NodeRows(request.token_ids[-1:], self._features[request].hidden_state[None], request.sequence)
        rows = draft.frontier_rows()
        first = rows.wanted[0]
        return NodeRows(rows.token_ids[first:], rows.features[first:], request.sequence)

    def _sample(self, draft: GrowingDraft, node: int, output: ForwardOutput, row: int) -> DraftTokens:
        request, path, needs_draft_probs = draft.request, draft.path(node), draft.budget.needs_draft_probs
        if self._network.assistant.config.clusters is None:
            return self._sampler.sample(request, path, output.logits[row], draft.width, needs_draft_probs=needs_draft_probs)
        ids, scores = self._network.cluster_candidates(output, row, self._vocab_size)
        return self._sampler.sample_candidates(request, path, ids, scores, draft.width, needs_draft_probs=needs_draft_probs)


def open_assistant(files: HeadFiles, target: LoadedTarget) -> AssistantDrafter:
    """Open the drafter for an assistant's files.

    Raises:
        CheckpointError, IncompatibleDrafterError: the files do not hold an assistant of this target.
        BackendUnavailableError: the target's runtime does not share its cache.
    """
    assistant = load_assistant(files, target.runtime.config, num_threads=target.engine.num_threads)
    assistant = replace(assistant, weights=target.quantized(assistant.weights, files.files))
    network = AssistantNetwork(assistant, target.runtime, max_model_len=target.max_model_len)
    return AssistantDrafter(network, vocab_size=target.vocab_size, tree_width=target.speculation.tree_width)
