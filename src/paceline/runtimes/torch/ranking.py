"""What guessing needs of rows of logits, with torch: the records that kernels/ranking.c makes."""

import numpy as np
import torch

from paceline.runtimes.ranking import Draws, Ranking

_GAMMA = 0x9E3779B97F4A7C15 - (1 << 64)  # as an int64, in which products wrap
_FACTOR_1 = 0xBF58476D1CE4E5B9 - (1 << 64)
_FACTOR_2 = 0x94D049BB133111EB - (1 << 64)


def rank_rows(logits: torch.Tensor, ranking: Ranking, draws: Draws | None) -> torch.Tensor:
    """The records [R, 2 + 2 * count] of rows [R, V], see `ranked_rows`.

    Args:
        draws: [R].
    """
    columns = min(ranking.columns, logits.shape[1])
    scores = logits[:, :columns].float()
    ids = torch.arange(columns, device=logits.device)
    if ranking.target_ids is not None:
        ids = torch.from_numpy(ranking.target_ids[:columns]).to(logits.device)
    drawn = torch.full((len(logits),), -1, device=logits.device)
    if draws is not None:
        temperatures = torch.from_numpy(draws["temperature"].copy()).to(logits.device)
        is_drawn = temperatures > 0
        scores = scores / torch.where(is_drawn, temperatures, 1.0)[:, None]
        keys = torch.from_numpy(draws["key"].view(np.int64).copy()).to(logits.device)
        drawn = torch.where(is_drawn, ids[_race(scores, keys, ids).argmax(dim=1)], drawn)
    log_sum = scores.logsumexp(dim=1)
    values, best = _best_few(scores, ranking.count)
    token_ids = torch.where(values > -torch.inf, ids[best], -1)
    numbers = torch.cat((drawn[:, None], token_ids), dim=1).to(torch.int32).view(torch.float32)
    return torch.cat((log_sum[:, None], numbers[:, :1], values, numbers[:, 1:]), dim=1)


def _best_few(scores: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The largest scores [R, count] and their columns, the first ones on ties; those at -inf come last, whatever their columns."""
    left = scores.clone()
    columns = []
    for _ in range(count):
        columns.append(left.argmax(dim=1, keepdim=True))
        left.scatter_(1, columns[-1], -torch.inf)
    best = torch.cat(columns, dim=1)
    is_first = torch.ones_like(best, dtype=torch.bool)
    for rank in range(1, count):  # with nothing left the same column comes again
        is_first[:, rank] = (best[:, :rank] != best[:, rank : rank + 1]).all(dim=1)
    return torch.where(is_first, scores.gather(1, best), -torch.inf), best


def _race(scores: torch.Tensor, keys: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """[R, V] float64 score - log E, E of the noise of each row's key (`sampling/noise.py`)."""
    mixed = _mix(keys[:, None] + (ids >> 1) * _GAMMA)
    bits = (mixed >> ((ids & 1) << 5)) & 0xFFFFFFFF
    return scores.double() - torch.log(-torch.log1p(-(bits.double() + 0.5) * 2.0**-32))


def _mix(state: torch.Tensor) -> torch.Tensor:
    state = (state ^ _shifted(state, 30)) * _FACTOR_1
    state = (state ^ _shifted(state, 27)) * _FACTOR_2
    return state ^ _shifted(state, 31)


def _shifted(state: torch.Tensor, count: int) -> torch.Tensor:
    """To the right, with zeros from the left."""
    return (state >> count) & ((1 << (64 - count)) - 1)
