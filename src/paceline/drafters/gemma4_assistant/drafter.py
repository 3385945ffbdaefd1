"""Drafter for Gemma 4 assistants: small decoders that attend to the target's keys and values.

An assistant drafts one level of a tree per pass. Its inputs are the tokens of the level before and their features: its own output, or the
target's last hidden state for the first level.

Source: Gemma 4's assistants ("multi-token prediction drafters"), as transformers and llama.cpp run them. Deviations: every accepted token
is drawn by the target (`speculation/verify.py`); trees are drafted as well as chains.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from paceline.drafters.draft_sampler import DraftSampler, DraftTokens
from paceline.drafters.gemma4_assistant.checkpoint import load_assistant
from paceline.drafters.gemma4_assistant.network import FEATURE, AssistantNetwork, TreeLevelInput
from paceline.drafters.head_files import HeadFiles
from paceline.drafters.head_kinds import HeadKind
from paceline.drafters.recurrent_heads.tree import GrowingDraft, draft_depth_and_width, frontier_sampling
from paceline.drafters.target import LoadedTarget
from paceline.runtimes.base import ForwardOutput, split_into_passes
from paceline.speculation.drafter import CommittedRows, DraftBudget, Drafter, DrafterNeeds, DrafterTraits, LastHiddenStates
from paceline.speculation.request import Request
from paceline.speculation.tree import DraftTree

_NO_BLOCKS = np.zeros(0, np.int32)


class AssistantDrafter(Drafter):
    """Drafts trees with an assistant. Each pass drafts one level of the trees of all requests.

    Args:
        vocab_size: V of the target; ids >= V are never drafted.
        tree_width: draft tokens after each node, and number of nodes of a level that get children; 1 = a chain.
    """

    name = HeadKind.GEMMA4_ASSISTANT.value
    needs = DrafterNeeds(hidden_states=True)

    def __init__(self, network: AssistantNetwork, *, vocab_size: int, tree_width: int = 1) -> None:
        config = network.assistant.config
        self._network, self._vocab_size, self._tree_width = network, vocab_size, tree_width
        self._features = LastHiddenStates()
        self._sampler = DraftSampler(None, vocab_size, config.layers.vocab_size)
        self.traits = DrafterTraits(self._description())
        self._summary_options = None if config.clusters is not None else self._sampler.summary_options(tree_width)

    def observe(self, rows: Sequence[CommittedRows]) -> None:
        for committed in rows:
            self._features.observe(committed)

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

    def _description(self) -> str:
        config = self._network.assistant.config
        details = [f"{config.layers.num_layers} layers", f"hidden size {config.layers.hidden_size}", "reads the target's keys and values"]
        if config.clusters is not None:
            details.append(f"{config.clusters.top_k} of {config.clusters.num_clusters} clusters of tokens")
        if self._tree_width > 1:
            details.append(f"trees {self._tree_width} wide")
        return f"{self.name} ({', '.join(details)})"

    def _can_draft(self, draft: GrowingDraft) -> bool:
        """Return whether the target has run all tokens before the last one, and the last hidden state has been received."""
        request = draft.request
        has_feature = self._features.find(request) is not None
        return draft.max_depth > 0 and has_feature and request.cached_sequence.committed_len == len(request.token_ids) - 1

    def _grow_drafts(self, drafts: Sequence[GrowingDraft]) -> None:
        while active := [draft for draft in drafts if draft.frontier]:
            levels = [self._frontier_input(draft) for draft in active]
            sampling = None if self._summary_options is None else frontier_sampling(active)
            output = self._network.forward(levels, self._summary_options, sampling)
            features, first = np.array(output.results[FEATURE]), 0
            summaries = output.summaries if self._summary_options is not None else []
            for draft in active:
                last = first + len(draft.frontier)
                rows = list(enumerate(draft.frontier, first))
                if summaries:
                    drafted = [draft.sample(self._sampler, node, output, row, summaries) for row, node in rows]
                else:
                    drafted = [self._sample_from_clusters(draft, node, output, row) for row, node in rows]
                draft.add_level(drafted, features[first:last])
                first = last

    def _frontier_input(self, draft: GrowingDraft) -> TreeLevelInput:
        """Return the inputs of the next pass: the frontier nodes, or the last committed token at the beginning of a draft."""
        request = draft.request
        feature = self._features.find(request)
        if draft.level == 0 and feature is not None:
            return TreeLevelInput(request.token_ids[-1:], feature[None], request.cached_sequence)
        pairs = draft.frontier_pairs()
        first = pairs.logit_rows[0]  # only this level runs: the features contain all that an assistant keeps of earlier levels
        return TreeLevelInput(pairs.token_ids[first:], pairs.features[first:], request.cached_sequence)

    def _sample_from_clusters(self, draft: GrowingDraft, node: int, output: ForwardOutput, row: int) -> DraftTokens:
        request, path, needs_draft_probs = draft.request, draft.path(node), draft.budget.needs_draft_probs
        ids, scores = self._network.cluster_candidates(output, row, self._vocab_size)
        return self._sampler.sample_candidates(request, path, ids, scores, draft.width, needs_draft_probs=needs_draft_probs)


def open_assistant(files: HeadFiles, target: LoadedTarget) -> AssistantDrafter:
    """Create the drafter for a loaded target from the files of an assistant.

    Raises:
        CheckpointError: tensors or config values of the assistant are missing or damaged.
        IncompatibleDrafterError: the assistant was made for another target.
        BackendUnavailableError: the target's runtime cannot give another network access to its KV cache.
    """
    assistant = load_assistant(files, target.runtime.config, num_threads=target.engine.num_threads)
    assistant = replace(assistant, weights=target.quantize(assistant.weights, files.files))
    network = AssistantNetwork(assistant, target.runtime, max_model_len=target.max_model_len)
    return AssistantDrafter(network, vocab_size=target.vocab_size, tree_width=target.speculation.tree_width)
