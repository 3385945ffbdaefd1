"""Faults of the engine that several comparisons of tests/exact must find."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from paceline.kv_cache.row_plan import RowPlan
from paceline.runtimes.base import ForwardInputs
from paceline.sampling.processors import LogitsProcessor
from paceline.speculation import commit as commit_module
from paceline.speculation import step as step_module


def leave_kept_rows_of_a_tree_where_they_were(patch: pytest.MonkeyPatch) -> None:
    """What comes next attends to rejected rows."""
    real = RowPlan.committed_path
    patch.setattr(RowPlan, "committed_path", lambda plan, node: real(plan, node)._replace(moves=()))


def let_siblings_see_one_another(patch: pytest.MonkeyPatch) -> None:
    real = step_module.assemble_pass

    def without_masks(*arguments: Any) -> ForwardInputs:
        made = real(*arguments)
        return made._replace(batch=replace(made.batch, ranges=tuple(one._replace(mask=None) for one in made.batch.ranges)))

    patch.setattr(step_module, "assemble_pass", without_masks)


def process_rows_without_the_path_to_them(patch: pytest.MonkeyPatch) -> None:
    real = LogitsProcessor.edit_logits
    patch.setattr(LogitsProcessor, "edit_logits", lambda self, logits, path=(): real(self, logits))


def report_logprobs_of_the_next_row(patch: pytest.MonkeyPatch) -> None:
    real = commit_module.token_logprobs

    def of_next(tokens: Any, nodes: Any, logits: Any, request: Any) -> Any:
        return real(tokens, nodes, np.roll(logits, -1, axis=0), request)

    patch.setattr(step_module, "token_logprobs", of_next)
