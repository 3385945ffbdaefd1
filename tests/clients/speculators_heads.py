"""Heads written and run by the classes of the speculators library; runs in an environment of its own, with nothing of ours.

    python speculators_heads.py CASES.json FOLDER

For each case a head in FOLDER/NAME, as the library saves it, and in FOLDER/NAME.npz what it was given and what it made of that.
"""

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from speculators.config import SpeculatorsConfig, VerifierConfig
from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig
from speculators.models.eagle3.rotary_partial import install_partial_neox_rotary
from speculators.models.mtp import MTPDraftModel, MTPSpeculatorConfig
from speculators.models.peagle import PEagleDraftModel, PEagleSpeculatorConfig
from speculators.models.peagle import core as peagle_core
from speculators.proposals.greedy import GreedyTokenProposalConfig
from transformers import AutoConfig

NUM_PAIRS, STEPS = 24, 3
CLASSES = {
    "eagle3": (Eagle3SpeculatorConfig, Eagle3DraftModel),
    "peagle": (PEagleSpeculatorConfig, PEagleDraftModel),
    "mtp": (MTPSpeculatorConfig, MTPDraftModel),
}
Case = Mapping[str, Any]


def make(case: Case, classes: Mapping[str, Any], num_tokens: int) -> Any:
    """A model of the library with the vocabulary of a case, whose weights are not set."""
    layer = AutoConfig.for_model(**case["layer"])
    layer._attn_implementation = "eager"
    config_class, model_class = classes[case["kind"]]
    container = SpeculatorsConfig(
        algorithm=case["kind"],
        proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=num_tokens)],
        default_proposal_method="greedy",
        verifier=VerifierConfig(name_or_path=None, architectures=[]),
    )
    model = model_class(config_class(transformer_layer_config=layer, speculators_config=container, **case["config"]))
    if case["draft_ids"] is not None:
        ids = torch.tensor(case["draft_ids"])
        marks = torch.zeros(case["layer"]["vocab_size"], dtype=torch.bool)
        marks[ids] = True
        model.load_vocab_mappings(marks, ids - torch.arange(len(ids)))
    return model


def build(case: Case) -> torch.nn.Module:
    """A head whose every weight is random, of a size that every switch can be seen by."""
    model = make(case, CLASSES, STEPS)
    random = torch.Generator().manual_seed(case["seed"])
    for name, weight in model.named_parameters():
        if weight.dim() == 2:
            weight.data = torch.randn(weight.shape, generator=random) * 1.2 * weight.shape[1] ** -0.5
        elif name.endswith("bias"):
            weight.data = torch.randn(weight.shape, generator=random) * 0.3
        else:
            weight.data = torch.rand(weight.shape, generator=random) + 0.5
    if case["kind"] == "peagle":
        model.mask_hidden.data = torch.randn(model.mask_hidden.shape, generator=random)
    return model.eval()


def run(model: torch.nn.Module, case: Case) -> dict[str, np.ndarray]:
    """The inputs, and `logits` [steps, pairs, V] of each pair and of those drafted after it, with the text's tokens as drafts."""
    random = torch.Generator().manual_seed(case["seed"] + 1)
    vocab_size, hidden = case["layer"]["vocab_size"], case["layer"]["hidden_size"]
    width = hidden if case["kind"] == "mtp" else hidden * len(case["config"]["eagle_aux_hidden_state_layer_ids"])
    token_ids = torch.randint(0, vocab_size, (1, NUM_PAIRS), generator=random)
    features = torch.randn(1, NUM_PAIRS, width, generator=random)
    seen: list[torch.Tensor] = []
    hook = model.lm_head.register_forward_hook(lambda module, inputs, output: seen.append(output[0].detach()))
    nobody = torch.zeros(1, NUM_PAIRS, dtype=torch.long)
    more: dict[str, np.ndarray] = {}
    with torch.no_grad():
        if case["kind"] == "eagle3":
            model(hidden_states=features, input_ids=token_ids, document_ids=nobody, ttt_steps=STEPS)
            logits = torch.stack(seen)
        elif case["kind"] == "peagle":
            logits = run_parallel(model, features, token_ids, nobody, seen)
        else:
            logits = torch.stack(model(input_ids=token_ids, hidden_states=features)[0])[:, 0]
            more = {"embedding": model.embed_tokens.weight.numpy(), "lm_head": model.lm_head.weight.numpy()}
    hook.remove()
    return {"token_ids": token_ids[0].numpy(), "features": features[0].numpy(), "logits": logits.numpy(), **more}


def run_parallel(
    model: torch.nn.Module, features: torch.Tensor, token_ids: torch.Tensor, nobody: torch.Tensor, seen: list[torch.Tensor]
) -> torch.Tensor:
    """Every pair with all masked pairs after it. Training samples some of them; here all are used, and the loss is left out."""
    anchors, depths = (part.flatten() for part in torch.meshgrid(torch.arange(NUM_PAIRS - STEPS), torch.arange(1, STEPS), indexing="ij"))
    anchors = torch.cat((torch.arange(NUM_PAIRS), anchors))
    depths = torch.cat((torch.zeros(NUM_PAIRS, dtype=torch.long), depths))
    peagle_core.generate_cod_sample_indices = lambda **_: (anchors, depths)
    peagle_core.compute_metrics = lambda **_: (None, {})
    last = torch.zeros(1, NUM_PAIRS, features.shape[-1] // 3)
    model(hidden_states=features, input_ids=token_ids, document_ids=nobody, verifier_last_hidden_states=last)
    (found,) = seen
    logits = torch.zeros(STEPS, NUM_PAIRS, found.shape[-1])
    logits[depths, anchors] = found
    return logits


def main(cases_file: str, folder: str) -> None:
    install_partial_neox_rotary()  # as the library's own training does
    for name, case in json.loads(Path(cases_file).read_text(encoding="utf-8")).items():
        model = build(case)
        model.save_pretrained(Path(folder) / name)
        np.savez(Path(folder) / f"{name}.npz", **run(model, case))


if __name__ == "__main__":
    main(*sys.argv[1:])
