"""Batches of recorded sequences: which ones, in which order, and as padded tensors.

The order of an epoch depends on the seed and the number of the epoch alone, so that a resumed run sees the same batches. Sequences of
similar length are in one batch.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paceline.training.shards import SequenceData
from paceline.training.vocabulary import DraftVocabulary

_SORTED_CHUNK = 256  # sequences that are sorted by length together


@dataclass(frozen=True, slots=True)
class Batch:
    """B padded sequences of T tokens, and the roots to draft after.

    Attributes:
        token_ids: [B, T].
        features: [B, T, num_boundaries * E] of the chosen boundaries.
        final: [B, T, E] final hidden states.
        roots: [B, N] positions of the tokens to draft after; padded ones are 1.
        is_root: [B, N] False for padding.
        label_index: [B, T + 1] number of each position among the label positions; -1 = none. Column T is -1.
        label_rows: [M, 2] sequence and position of each label.
        draft_ids: [M] the label's draft id; -1 = it has none.
    """

    token_ids: Tensor
    features: Tensor
    final: Tensor
    roots: Tensor
    is_root: Tensor
    label_index: Tensor
    label_rows: Tensor
    draft_ids: Tensor

    def labels_at(self, positions: Tensor) -> Tensor:
        """Return the label number at positions [B, ...]; -1 = no label."""
        length = self.token_ids.shape[1]
        flat = positions.clamp(0, length).flatten(1)
        return self.label_index.gather(1, flat).view_as(positions)


def make_batch(data: SequenceData, indices: Sequence[int], vocabulary: DraftVocabulary, hidden_size: int, device: str) -> Batch:
    """Read sequences into one batch."""
    lengths = [len(data.token_ids[index]) for index in indices]
    longest, num = max(lengths), len(indices)
    token_ids = np.zeros((num, longest), np.int64)
    label_index = np.full((num, longest + 1), -1, np.int64)
    rows: list[NDArray[np.int64]] = []
    roots: list[NDArray[np.int64]] = []
    first = data.features(indices[0])
    features = torch.zeros((num, longest, first.shape[1]), dtype=torch.bfloat16)
    for row, (index, length) in enumerate(zip(indices, lengths, strict=True)):
        token_ids[row, :length] = data.token_ids[index]
        features[row, :length] = data.features(index)
        places = np.flatnonzero(data.is_answer[index])
        places = places[places >= 2]  # a root has a position before it, whose features are read
        label_index[row, places] = np.arange(len(places)) + sum(len(one) for one in rows)
        rows.append(np.stack([np.full(len(places), row), places], 1))
        roots.append(places - 1)
    most = max(1, max(map(len, roots)))
    padded = np.ones((num, most), np.int64)
    is_root = np.zeros((num, most), bool)
    for row, own in enumerate(roots):
        padded[row, : len(own)], is_root[row, : len(own)] = own, True
    label_rows = np.concatenate(rows)
    drafted = vocabulary.draft_ids[token_ids[label_rows[:, 0], label_rows[:, 1]]]
    tensors = [torch.from_numpy(one).to(device) for one in (token_ids, padded, is_root, label_index, label_rows, drafted)]
    features = features.to(device)
    return Batch(tensors[0], features[..., :-hidden_size], features[..., -hidden_size:], *tensors[1:])


def epoch_batches(data: SequenceData, seed: int, epoch: int, batch_tokens: int) -> list[list[int]]:
    """Return the sequences of each batch of an epoch.

    Args:
        batch_tokens: most answer positions of a batch, padding included; a longer sequence is alone in its batch.
    """
    rng = np.random.default_rng([seed, epoch])
    order = rng.permutation(len(data))
    counts = np.array([int(mask.sum()) for mask in data.is_answer])
    batches: list[list[int]] = []
    for start in range(0, len(order), _SORTED_CHUNK):
        chunk = sorted(order[start : start + _SORTED_CHUNK].tolist(), key=lambda index: (counts[index], index))
        current: list[int] = []
        for index in chunk:
            if current and (len(current) + 1) * counts[index] > batch_tokens:
                batches.append(current)
                current = []
            current.append(index)
        batches.append(current)
    usable = [batch for batch in batches if any(counts[index] > 0 for index in batch)]
    return [usable[index] for index in rng.permutation(len(usable))]
