import json

import numpy as np
import pytest

from paceline.speculation.stats import SkipReason, SpeculationStats


def _record(stats: SpeculationStats, generator: np.random.Generator) -> None:
    """One random step, cut by a stop or not."""
    depths = sorted(generator.integers(1, 6, generator.integers(0, 9)).tolist())
    depths = [depth for depth in depths if set(range(1, depth)) <= set(depths)]
    accepted = int(generator.integers(0, max(depths, default=0) + 1))
    was_cut = accepted > 0 and generator.random() < 0.2
    plain = None if depths else list(SkipReason)[int(generator.integers(len(SkipReason)))]
    stats.record(depths, accepted, accepted if was_cut else accepted + 1, plain)


def _check_identities(stats: SpeculationStats) -> None:
    assert stats.num_emitted_tokens == stats.num_accepted_tokens + stats.num_bonus_tokens
    assert sum(stats.num_accepted_tokens_by_position) == stats.num_accepted_tokens
    assert sum(stats.num_draft_tokens_by_position) == stats.num_draft_tokens
    assert all(
        kept <= drafted for kept, drafted in zip(stats.num_accepted_tokens_by_position, stats.num_draft_tokens_by_position, strict=True)
    )
    assert stats.num_accepted_tokens_by_position == sorted(stats.num_accepted_tokens_by_position, reverse=True)
    assert stats.plain_steps == sum(stats.skip_counts.values()) <= stats.steps
    assert stats.num_bonus_tokens <= stats.steps
    assert stats.mean_acceptance_length == pytest.approx(stats.num_emitted_tokens / max(1, stats.steps))
    assert stats.acceptance_rate == pytest.approx(stats.num_accepted_tokens / max(1, stats.num_draft_tokens))


def test_speculation_stats_counters_add_up(seed):
    generator = np.random.default_rng(seed)
    for _ in range(100):
        stats = SpeculationStats()
        for _ in range(30):
            _record(stats, generator)
            _check_identities(stats)


def test_sum_of_speculation_stats_equals_one_combined_record(seed):
    generators = [np.random.default_rng([seed, half]) for half in range(2)]
    halves = [SpeculationStats(), SpeculationStats()]
    for half, generator in zip(halves, generators, strict=True):
        for _ in range(20):
            _record(half, generator)
    halves[0].num_dropped_tokens, halves[1].num_dropped_tokens = 3, 4
    whole = SpeculationStats()
    for half in range(2):
        generator = np.random.default_rng([seed, half])
        for _ in range(20):
            _record(whole, generator)
    whole.num_dropped_tokens = 7
    for order in ((0, 1), (1, 0)):
        total = SpeculationStats()
        for half in order:
            total.add(halves[half])
        assert total == whole
        _check_identities(total)


def test_adding_speculation_stats_leaves_the_added_one_unchanged():
    total, other = SpeculationStats(), SpeculationStats()
    other.record([1, 2], 1, 2, None)
    total.add(other)
    total.record([1, 2, 3], 3, 4, None)
    assert (other.num_draft_tokens_by_position, other.num_accepted_tokens_by_position) == ([1, 1], [1, 0])


def test_plain_decoding_has_a_mean_acceptance_length_of_one():
    stats = SpeculationStats()
    for _ in range(5):
        stats.record([], 0, 1, SkipReason.OFF)
    assert (stats.mean_acceptance_length, stats.acceptance_rate, stats.plain_steps) == (1.0, 0.0, 5)
    assert stats.acceptance_rate_by_position == []


def test_acceptance_rates_of_a_tree_count_all_nodes_of_a_depth():
    stats = SpeculationStats()
    stats.record([1, 1, 2, 2, 2, 2], 1, 2, None)
    assert stats.acceptance_rate_by_position == [0.5, 0.0]
    assert stats.acceptance_rate == pytest.approx(1 / 6)


def test_empty_speculation_stats_have_rates_of_zero():
    stats = SpeculationStats()
    assert (stats.mean_acceptance_length, stats.acceptance_rate, stats.acceptance_rate_by_position) == (0.0, 0.0, [])


def test_speculation_stats_as_dict_names_the_skip_reasons():
    stats = SpeculationStats()
    stats.record([], 0, 1, SkipReason.PROMPT)
    stats.record([1, 2, 3], 2, 3, None)
    stats.num_dropped_tokens = 2
    record = json.loads(json.dumps(stats.as_dict()))
    assert (record["steps"], record["num_draft_tokens"], record["num_accepted_tokens"], record["num_emitted_tokens"]) == (2, 3, 2, 4)
    assert record["mean_acceptance_length"] == 2.0
    assert record["acceptance_rate_by_position"] == [1.0, 1.0, 0.0]
    assert record["skip_counts"] == {SkipReason.PROMPT.value: 1}
