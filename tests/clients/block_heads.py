"""Block drafters written and run by the classes of z-lab's dflash and of speculators, in an environment with nothing of ours.

    python block_heads.py CASES.json FOLDER

For each case a drafter in FOLDER/NAME, as the library saves it, and in FOLDER/NAME.npz its inputs and the rows of five successive drafts.
"""

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from dflash.model import DFlash2DraftModel, DFlashDraftModel, _crop_to, _make_cache
from speculators.models.dflash import DFlashDraftModel as SpeculatorsDFlash
from speculators.models.dflash import DFlashSpeculatorConfig
from speculators.models.dflash import core as speculators_core
from speculators.models.dflash2 import DFlash2DraftModel as SpeculatorsDFlash2
from speculators.models.dflash2.config import DFlash2SpeculatorConfig
from speculators.models.dspark import DSparkDraftModel, DSparkSpeculatorConfig
from speculators_heads import make
from transformers import Qwen3Config

COUNTS = (9, 1, 5, 8, 20)  # target rows that come before each draft
CLASSES = {
    "dflash": (DFlashSpeculatorConfig, SpeculatorsDFlash),
    "dflash2": (DFlash2SpeculatorConfig, SpeculatorsDFlash2),
    "dspark": (DSparkSpeculatorConfig, DSparkDraftModel),
}
Case = Mapping[str, Any]


def randomise(model: torch.nn.Module, seed: int) -> torch.nn.Module:
    random = torch.Generator().manual_seed(seed)
    for name, weight in model.named_parameters():
        if "codebook" in name or "embed_tokens" in name or "markov_w1" in name:
            weight.data = torch.randn(weight.shape, generator=random)
        elif weight.dim() > 1:
            weight.data = torch.randn(weight.shape, generator=random) * 1.2 * weight.shape[-1] ** -0.5
        else:
            offset = 0.0 if name.endswith("bias") else 1.0
            weight.data = offset + 0.3 * torch.randn(weight.shape, generator=random)
    return model.eval()


def select(model: torch.nn.Module, hidden: torch.Tensor, logits: torch.Tensor, anchor: int, step: Any) -> tuple[list[int], list[Any]]:
    """The greedy tokens of a draft from left to right; `step` returns the corrected row of each slot."""
    tokens: list[int] = []
    rows = []
    for slot in range(len(hidden)):
        row = step(model, hidden, logits, [anchor, *tokens], slot)
        rows.append(row)
        token = int(row.argmax())
        tokens.append(token if getattr(model, "d2t", None) is None else token + int(model.d2t[token]))
    return tokens, rows


def markov_row(model: Any, hidden: torch.Tensor, logits: torch.Tensor, before: list[int], slot: int) -> torch.Tensor:
    previous, states = torch.tensor([before]), hidden[None, : slot + 1]
    if not model.config.sample_from_anchor:  # as it is trained: the anchor's own row comes first, with the anchor before it
        previous, states = torch.tensor([[before[0], *before]]), torch.cat([model.anchor_hidden[None, None], states], 1)
    return logits[slot] + model.markov_head.block_bias(prev_token_ids=previous, hidden_states=states)[0, -1]


def selector_row(model: Any, hidden: torch.Tensor, logits: torch.Tensor, before: list[int], slot: int) -> torch.Tensor:
    ids, scores = model.candidate_selector.select(logits[slot][None, None], hidden[slot][None, None], torch.tensor([[before[-1]]]))
    return torch.full_like(logits[slot], -torch.inf).scatter(0, ids[0, 0], scores[0, 0])


def confidences(model: Any, hidden: torch.Tensor, before: list[int]) -> list[float]:
    features = hidden
    if model.config.confidence_head_with_markov:
        features = torch.cat([hidden, model.markov_head.prev_embeddings(torch.tensor(before))], -1)
    return torch.sigmoid(model.confidence_head(features)).tolist()


def run_speculators(case: Case, folder: Path, given: dict[str, Any]) -> list[dict[str, Any]]:
    model = make(case, CLASSES, num_tokens=4)
    randomise(model, case["seed"])
    model.embed_tokens.weight.data, model.config.mask_token_id = given["embedding"], case["config"]["mask_token_id"]
    if not case["draft_ids"]:
        model.lm_head.weight.data = given["lm_head"]
    model.save_pretrained(folder)
    starts, size = np.cumsum(COUNTS), case["config"]["block_size"]
    features = torch.cat(given["features"])
    total = len(features) + size
    text = torch.zeros(1, total, dtype=torch.long)
    text[0, starts] = torch.tensor(given["anchors"])
    padded = torch.cat([features, torch.zeros(size, features.shape[1])])
    speculators_core.select_anchors = lambda *_, **__: (torch.from_numpy(starts), torch.ones(len(starts), dtype=torch.bool))
    nothing = torch.zeros(1, total, dtype=torch.long)
    last = torch.zeros(1, total, features.shape[1] // 3)
    hidden, logits, *_ = model._backbone_forward(padded[None], text, torch.ones(1, total), last, nothing, max_anchors=len(starts))
    step = selector_row if case["kind"] == "dflash2" else markov_row
    drafts = []
    for number, anchor in enumerate(given["anchors"]):
        own_hidden, own_logits = (rows[0, number * size : (number + 1) * size] for rows in (hidden, logits))
        model.anchor_hidden = own_hidden[0]
        shift = 0 if model.config.sample_from_anchor else 1
        found: dict[str, Any] = {"logits": own_logits[shift:].numpy()}
        if getattr(model, "markov_head", None) is not None or case["kind"] == "dflash2":
            found["tokens"], rows = select(model, own_hidden[shift:], own_logits[shift:], anchor, step)
            found["rows"] = torch.stack(rows).numpy()
            if getattr(model, "confidence_head", None) is not None:
                found["confidences"] = confidences(model, own_hidden[shift:], [anchor, *found["tokens"][:-1]])
        drafts.append(found)
    return drafts


def run_dflash(case: Case, folder: Path, given: dict[str, Any]) -> list[dict[str, Any]]:
    model_class = DFlash2DraftModel if case["kind"] == "dflash2" else DFlashDraftModel
    config = Qwen3Config(**{name: value for name, value in case["layer"].items() if name != "model_type"}, **case["config"])
    model: Any = randomise(model_class(config), case["seed"])
    model.save_pretrained(folder)
    head = torch.nn.Linear(*given["lm_head"].shape[::-1], bias=False)
    head.weight.data = given["lm_head"]
    cache, num_known, size, drafts = _make_cache(model.config), 0, model.block_size, []
    scale = float(config.dflash_config.get("input_embedding_scale", 1.0))
    for features, anchor in zip(given["features"], given["anchors"], strict=True):
        ids = torch.tensor([[anchor] + [model.mask_token_id] * (size - 1)])
        hidden = model(
            target_hidden=features[None], noise_embedding=given["embedding"][ids] * scale, past_key_values=cache, use_cache=True,
            position_ids=torch.arange(num_known, num_known + len(features) + size)[None],
        )[:, 1 - size :]  # fmt: skip
        num_known += len(features)
        _crop_to(cache, num_known)
        found: dict[str, Any] = {"logits": model.compute_logits(hidden, head)[0].numpy()}
        if case["kind"] == "dflash2":
            found["tokens"] = model.propose(hidden, torch.tensor([anchor]), head, 0.0)[0][0].tolist()
        drafts.append(found)
    return drafts


def main(cases_file: str, folder: str) -> None:
    for name, case in json.loads(Path(cases_file).read_text(encoding="utf-8")).items():
        random = torch.Generator().manual_seed(case["seed"] + 1000)
        vocab_size, hidden = case["layer"]["vocab_size"], case["layer"]["hidden_size"]
        given: dict[str, Any] = {
            "embedding": torch.randn(vocab_size, hidden, generator=random),
            "lm_head": torch.randn(vocab_size, hidden, generator=random) * 0.3,
            "features": [torch.randn(count, 3 * hidden, generator=random) for count in COUNTS],
            "anchors": torch.randint(0, vocab_size - 1, (len(COUNTS),), generator=random).tolist(),
        }
        run = run_dflash if case["library"] == "dflash" else run_speculators
        with torch.no_grad():
            drafts = run(case, Path(folder) / name, given)
        arrays = {f"{number}.{key}": np.array(value) for number, draft in enumerate(drafts) for key, value in draft.items()}
        features = torch.cat(given["features"]).numpy()
        np.savez(
            Path(folder) / f"{name}.npz", embedding=given["embedding"], lm_head=given["lm_head"], features=features,
            anchors=given["anchors"], **arrays,
        )  # fmt: skip


if __name__ == "__main__":
    main(*sys.argv[1:])
