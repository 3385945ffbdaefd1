"""Measures a trained drafter on held-out prompts with the real engine, in turns with plain decoding and lookup drafters."""

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from paceline.engine.loader import LoadedEngine, load_engine, parse_settings
from paceline.repeats import repeat_share
from paceline.sampling.params import SamplingParams
from paceline.speculation.draft_length.policy import FixedDraftLength
from paceline.speculation.stats import SpeculationStats
from paceline.training.prompts import PrintLine, Prompt
from paceline.training.settings import TrainSettings

TEMPERATURES = (0.0, 0.7)
_WARMUP_TOKENS = 32


def measure(settings: TrainSettings, directory: Path, prompts: Sequence[Prompt], depth: int, print_line: PrintLine) -> dict[str, Any]:
    """Return the results of held-out prompts by source, temperature and drafter.

    Args:
        directory: of the drafter.
        depth: draft tokens of every step in the comparison with the estimate.

    Returns:
        `speeds`: rows with source, temperature, drafter, tokens a second, speedup and mean_acceptance_length; `fixed`: the mean
        acceptance length of chains of `depth` tokens at temperature 0, by source and as "all"; `are_texts_equal`: whether all
        drafters gave the texts of plain decoding; `num_looping`: answers left out because they repeat themselves.
    """
    with_trained = _load(settings, ["suffix", str(directory)])
    lookup_only = _load(settings, ["ngram", "suffix"])
    name = with_trained.engine.speculator.drafters[-1].name
    modes: dict[str, tuple[LoadedEngine, Mapping[str, object]]] = {
        "plain": (lookup_only, {"enabled": False}),
        "ngram": (lookup_only, {"drafter": "ngram"}),
        "suffix": (lookup_only, {"drafter": "suffix"}),
        name: (with_trained, {"drafter": name}),
        f"suffix+{name}": (with_trained, {}),
    }
    prompts = [one for one in prompts if one.answer_mask is None]
    if not prompts:
        return {"speeds": [], "fixed": {}, "are_texts_equal": None, "num_looping": 0}
    for loaded, options in modes.values():
        _generate(loaded, options, prompts[0].token_ids, _WARMUP_TOKENS, 0.0)
    rows: list[dict[str, Any]] = []
    are_equal, num_looping, usable = True, 0, list[Prompt]()
    for temperature in TEMPERATURES:
        found: dict[tuple[str, str], tuple[float, SpeculationStats]] = {}
        for prompt in prompts:
            runs = {mode: _generate(*one, prompt.token_ids, settings.max_answer_tokens, temperature) for mode, one in modes.items()}
            texts = [ids for _, _, ids in runs.values()]
            are_equal = are_equal and all(ids == texts[0] for ids in texts)
            if repeat_share([[*prompt.token_ids, *texts[0]]]) > settings.max_repeat_share:
                num_looping += 1  # any lookup drafter is nearly perfect on these
                continue
            usable += [prompt] if temperature == 0 else []
            for mode, (seconds, stats, _) in runs.items():
                for source in (prompt.source, "all"):
                    spent, counts = found.setdefault((source, mode), (0.0, SpeculationStats()))
                    counts.add(stats)
                    found[source, mode] = spent + seconds, counts
        rows += _rows(found, temperature)
        for row in rows[-len(modes) :] if found else []:
            print_line(f"T = {temperature:g}, {row['drafter']}: {row['tokens_per_s']:.0f} tokens/s, {row['speedup']:.2f} x plain")
    fixed = _fixed(with_trained, name, usable, settings.max_answer_tokens, depth)
    return {"speeds": rows, "fixed": fixed, "are_texts_equal": are_equal, "num_looping": num_looping}


def _load(settings: TrainSettings, drafters: list[str]) -> LoadedEngine:
    options = {
        "gguf_file": settings.gguf_file, "threads": settings.threads, "drafter": drafters, "tree_width": settings.tree_width,
        "max_model_len": settings.max_tokens + 32, "max_num_seqs": 1,
    }  # fmt: skip
    return load_engine(*parse_settings(settings.model, options))


def _generate(
    loaded: LoadedEngine, options: Mapping[str, object], prompt: list[int], max_tokens: int, temperature: float
) -> tuple[float, SpeculationStats, list[int]]:
    """Return the seconds, the counters and the tokens of one answer."""
    params = SamplingParams(max_tokens=max_tokens, temperature=temperature, seed=0)
    start = time.perf_counter()
    (request,) = loaded.make_requests([prompt], params, {"speculation": options}, is_streamed=False)
    for _ in loaded.engine.run([request]):
        pass
    seconds = time.perf_counter() - start
    output = loaded.make_output(request)
    return seconds, output.speculation, output.token_ids


def _rows(found: Mapping[tuple[str, str], tuple[float, SpeculationStats]], temperature: float) -> list[dict[str, Any]]:
    """Return the results of one temperature by source; those of all sources together come last."""
    order = sorted(found, key=lambda key: key[0] == "all")
    plain = {source: stats.num_emitted_tokens / seconds for (source, mode), (seconds, stats) in found.items() if mode == "plain"}
    rows = []
    for source, mode in order:
        seconds, stats = found[source, mode]
        rate = stats.num_emitted_tokens / seconds
        rows.append(
            {
                "source": source, "temperature": temperature, "drafter": mode, "tokens_per_s": round(rate, 1),
                "speedup": round(rate / plain[source], 3), "mean_acceptance_length": round(stats.mean_acceptance_length, 3),
                "num_tokens": stats.num_emitted_tokens,
            }
        )  # fmt: skip
    return rows


def _fixed(loaded: LoadedEngine, name: str, prompts: Sequence[Prompt], max_tokens: int, depth: int) -> dict[str, float]:
    """Return the mean acceptance length with `depth` draft tokens in every step, by source and as "all"."""
    speculator = loaded.engine.speculator
    before, speculator.policy = speculator.policy, FixedDraftLength(depth)
    found: dict[str, SpeculationStats] = {}
    for prompt in prompts:
        _, stats, _ = _generate(loaded, {"drafter": name}, prompt.token_ids, max_tokens, 0.0)
        for source in (prompt.source, "all"):
            found.setdefault(source, SpeculationStats()).add(stats)
    speculator.policy = before
    return {source: round(stats.mean_acceptance_length, 3) for source, stats in found.items()}
