"""Passes of a head that reads the target's features, as formulas are compared with them."""

import numpy as np
import torch
from numpy.typing import NDArray

from paceline.drafters.recurrent_heads.cache import TargetFeaturePairs
from paceline.drafters.recurrent_heads.head import DraftFeaturePairs, RecurrentHead
from paceline.runtimes.base import FloatArray, RowRange

_TABLE = np.arange(1, 8, dtype=np.int32)


def run_pairs(head: RecurrentHead, token_ids: NDArray[np.int64], features: FloatArray, first: int) -> tuple[FloatArray, FloatArray]:
    """Logits and feature of the last of the pairs from `first` on; pair t is in slot t + 1."""
    rows = RowRange(0, len(token_ids), first + 1, _TABLE, None, 1)
    results = head.run_target_feature_pairs([TargetFeaturePairs(token_ids.astype(np.int32), features, rows)], needs_logits=True)
    return results.logits[0].copy(), results.features[-1].copy()


def run_draft(head: RecurrentHead, token_id: int, feature: FloatArray, index: int) -> tuple[FloatArray, FloatArray]:
    """Logits and feature of a drafted pair, the one after so many others."""
    rows = RowRange(0, 1, index + 1, _TABLE, None, 1)
    results = head.run_draft_feature_pairs([DraftFeaturePairs([token_id], feature[None], [index], rows, [0])])
    return results.logits[0].copy(), results.features[0].copy()


def distance(found: FloatArray, expected: torch.Tensor) -> float:
    """The largest difference, compared with the largest value above 1."""
    return float(np.abs(found - expected.numpy()).max() / max(1.0, float(expected.abs().max())))
