"""The cost model: least squares with forgetting, and forward times that follow the machine."""

import numpy as np
import pytest

from harness.decoding_rows import make_rows
from paceline.runtimes.cost import PROFILED_CONTEXT_LEN, ForwardProfile
from paceline.speculation.draft_length.cost import MAX_SLOWDOWN, AdapterUse, BatchShape, CostModel, LinearCost

STAIRS = ForwardProfile.from_samples({1: 1.0, 8: 1.2, 9: 2.0, 16: 2.2})
ONE = BatchShape(1, 1, is_decoding=True, cached_len=0.0, adapter_use=AdapterUse.NONE)
LONG = BatchShape(1, 1, is_decoding=True, cached_len=1000.0, adapter_use=AdapterUse.NONE)


def with_adapters(use: AdapterUse) -> BatchShape:
    return BatchShape(1, 1, is_decoding=True, cached_len=0.0, adapter_use=use)


# LinearCost


def test_linear_cost_before_the_first_sample_is_zero() -> None:
    cost = LinearCost()
    assert cost.seconds_at(3.0, 5.0) == 0.0
    assert not cost.is_known


def test_linear_cost_of_exact_samples_finds_both_coefficients(seed: int) -> None:
    random, cost = np.random.default_rng(seed), LinearCost()
    for _ in range(30):
        x, y = random.uniform(0.5, 2.0), random.uniform(0.0, 4.0)
        cost.observe(x, y, 3.0 * x + 0.5 * y)
    assert (cost.a, cost.b) == (pytest.approx(3.0, rel=1e-3), pytest.approx(0.5, rel=1e-3))


@pytest.mark.parametrize(("a", "b"), [(0.0, 1.0), (1.0, 0.0)])
def test_linear_cost_of_noisy_samples_is_never_negative(a: float, b: float, seed: int) -> None:
    random, cost = np.random.default_rng(seed), LinearCost()
    for _ in range(200):
        x, y = random.uniform(0.5, 2.0), random.uniform(0.0, 4.0)
        cost.observe(x, y, max(0.0, a * x + b * y + random.normal(0.0, 0.5)))
        assert cost.a >= 0.0
        assert cost.b >= 0.0


def test_linear_cost_of_one_kind_of_step_scales_both_coefficients() -> None:
    cost = LinearCost()
    for x, y in [(1.0, 0.0), (1.0, 4.0)] * 4:
        cost.observe(x, y, x + 0.1 * y)
    for seconds in (2.8, 5.6):
        for _ in range(400):
            cost.observe(1.0, 4.0, seconds)
        assert cost.seconds_at(1.0, 4.0) == pytest.approx(seconds, rel=0.01)
    assert cost.seconds_at(1.0, 0.0) == pytest.approx(2.0, rel=0.05)


@pytest.mark.parametrize(("measured", "expected"), [(0.0, 2.0), (0.1, 2.8), (5.0, 2.8)])
def test_linear_cost_without_recent_draft_rows_keeps_a_low_ratio_and_forgets_a_high_one(measured: float, expected: float) -> None:
    """Else b of a busy time would last for as long as nothing with y runs, which is because of b."""
    cost = LinearCost(ratio=0.1, usual_y=4.0)
    for x, y in [(1.0, 0.0), (1.0, 4.0)] * 20:
        cost.observe(x, y, x + measured * y)
    for _ in range(300):
        cost.observe(1.0, 0.0, 2.0)
    assert cost.seconds_at(1.0, 0.0) == pytest.approx(2.0, rel=0.01)
    assert cost.seconds_at(1.0, 4.0) == pytest.approx(expected, rel=0.05)


def test_linear_cost_follows_a_changed_machine_within_tens_of_samples() -> None:
    cost = LinearCost()
    for factor, count in ((1.0, 200), (2.0, 60), (1.0, 60)):
        for _ in range(count):
            for y in (0.0, 4.0):
                cost.observe(1.0, y, factor * (1.0 + 0.1 * y))
        assert cost.seconds_at(1.0, 0.0) == pytest.approx(factor, rel=0.05)
        assert cost.seconds_at(1.0, 4.0) == pytest.approx(1.4 * factor, rel=0.05)


def test_linear_cost_of_a_stall_counts_as_a_bounded_slowdown() -> None:
    stalled, slow = LinearCost(), LinearCost()
    for cost, last in ((stalled, 1000.0), (slow, MAX_SLOWDOWN)):
        for _ in range(50):
            cost.observe(1.0, 0.0, 1.0)
        cost.observe(1.0, 0.0, last)
    assert stalled.seconds_at(1.0, 0.0) == pytest.approx(slow.seconds_at(1.0, 0.0), rel=1e-3)
    assert stalled.seconds_at(1.0, 0.0) < 1.2


def test_linear_cost_after_stalls_alone_recovers_within_few_samples() -> None:
    cost = LinearCost()
    for _ in range(20):
        cost.observe(1.0, 0.0, 30.0)
    for count, most in ((8, 2.5), (32, 1.5)):
        for _ in range(count):
            cost.observe(1.0, 0.0, 1.0)
        assert cost.seconds_at(1.0, 0.0) < most


# CostModel


def test_step_times_without_samples_equal_the_profile() -> None:
    times = CostModel(STAIRS).step_times(ONE, 15)
    assert times == pytest.approx([STAIRS.seconds_at(rows) for rows in range(1, 17)], rel=1e-6)


def test_step_times_of_a_batch_keep_the_jumps_of_the_profile() -> None:
    batch = BatchShape(8, 8, is_decoding=True, cached_len=0.0, adapter_use=AdapterUse.NONE)
    times = CostModel(STAIRS).step_times(batch, 3)
    assert times == pytest.approx([STAIRS.seconds_at(rows) for rows in (8, 9, 10, 11)], rel=1e-6)


def test_step_times_at_long_contexts_include_reading_the_cache() -> None:
    model = CostModel(ForwardProfile.from_samples({1: 1.0, 8: 1.2}, cached_row_read_s=0.001, cached_row_attention_s=0.0001))
    near, far = model.step_times(ONE, 4), model.step_times(LONG, 4)
    assert far[0] - near[0] == pytest.approx(1.0 + 0.1, rel=1e-6)
    assert (far[4] - far[0]) - (near[4] - near[0]) == pytest.approx(4 * 0.1, rel=1e-6)


def test_step_times_include_host_time_by_request_and_draft_token() -> None:
    model, two = CostModel(STAIRS), BatchShape(2, 2, is_decoding=True, cached_len=0.0, adapter_use=AdapterUse.NONE)
    for shape, drafts in [(ONE, 0), (ONE, 4), (two, 0), (two, 6)] * 10:
        host_s = 0.2 * shape.num_sequences + 0.05 * drafts
        model.observe_step_time(shape, drafts, STAIRS.seconds_at(shape.num_rows + drafts), host_s)
    times = model.step_times(two, 4)
    assert times[0] == pytest.approx(STAIRS.seconds_at(2) + 0.4, rel=0.02)
    assert times[4] - times[0] == pytest.approx(STAIRS.seconds_at(6) - STAIRS.seconds_at(2) + 0.2, rel=0.05)


@pytest.mark.parametrize("factor", [0.5, 2.0, 4.0])
def test_step_times_with_a_wrong_profile_are_corrected_by_steps(factor: float) -> None:
    """Draft tokens add `factor` times what was measured at load."""
    model, profile = CostModel(ForwardProfile.from_samples({1: 1.0, 5: 1.4, 9: 1.8})), {0: 1.0, 4: 1.4}
    for _ in range(60):
        for drafts, seconds in profile.items():
            model.observe_step_time(ONE, drafts, 1.0 + factor * (seconds - 1.0), 0.0)
    times = model.step_times(ONE, 8)
    assert times[0] == pytest.approx(1.0, rel=0.1)  # the profile still counts as half a sample
    assert times[8] - times[0] == pytest.approx(factor * 0.8, rel=0.1)


def test_measured_slowdown_scales_step_times_of_unmeasured_draft_lengths() -> None:
    model = CostModel(STAIRS)
    for _ in range(200):
        model.observe_step_time(ONE, 0, 3.0, 0.0)
    times = model.step_times(ONE, 7)
    assert times[0] == pytest.approx(3.0, rel=0.05)
    assert times[7] == pytest.approx(3.0 * 1.2, rel=0.05)


@pytest.mark.parametrize(
    "profile", [ForwardProfile({1: 0.025, 5: 0.025, 9: 0.025, 17: 0.026}), ForwardProfile.from_samples({1: 0.025, 17: 0.02})]
)
def test_step_times_of_a_flat_profile_do_not_charge_a_pass_to_its_draft_tokens(profile: ForwardProfile) -> None:
    """On a GPU a pass of 5 rows takes as long as one of 1 row. A disturbed measurement looks the same."""
    model = CostModel(profile)
    for _ in range(8):
        model.observe_step_time(ONE, 0, 0.025, 0.0)
        times = model.step_times(ONE, 4)
        assert times[0] == pytest.approx(0.025, rel=0.25)
        assert times[4] == pytest.approx(times[0], rel=0.02)


def test_step_times_with_adapters_are_learned_separately() -> None:
    model, some = CostModel(STAIRS), with_adapters(AdapterUse.SOME_ROWS)
    for _ in range(60):
        model.observe_step_time(ONE, 0, 1.0, 0.0)
        model.observe_step_time(some, 0, 1.5, 0.0)
    assert model.step_times(ONE, 0)[0] == pytest.approx(1.0, rel=0.02)
    assert model.step_times(some, 0)[0] == pytest.approx(1.5, rel=0.05)


def test_step_times_with_unmeasured_adapters_equal_those_without() -> None:
    model = CostModel(STAIRS)
    for _ in range(200):
        model.observe_step_time(ONE, 0, 3.0, 0.0)
    assert model.step_times(with_adapters(AdapterUse.SOME_ROWS), 7)[7] == pytest.approx(3.0 * 1.2, rel=0.1)


def test_step_times_with_unmeasured_x_lora_passes_are_doubled() -> None:
    times = CostModel(STAIRS).step_times(with_adapters(AdapterUse.MIXTURE_PASS), 7)
    assert times == pytest.approx([2.0 * STAIRS.seconds_at(rows) for rows in range(1, 9)], rel=1e-6)


def test_step_times_after_any_noise_are_positive(seed: int) -> None:
    """The policy divides by them."""
    random, model = np.random.default_rng(seed), CostModel(STAIRS)
    for _ in range(500):
        drafts = int(random.integers(0, 9))
        model.observe_step_time(ONE, drafts, STAIRS.seconds_at(1 + drafts) * random.uniform(0.01, 30.0), random.uniform(0.0, 1.0))
        assert min(model.step_times(ONE, 8)) > 0.0


def test_draft_time_is_fitted_by_depth_without_first_proposals() -> None:
    model = CostModel(STAIRS)
    assert model.draft_s("model", 1, 4) == 0.0
    model.observe_draft_time("model", 1, 4, 50.0)
    assert model.draft_s("model", 1, 4) == 0.0, "it prepared memory and kernels"
    assert not model.is_draft_cost_known("model")
    for depth in (1, 4, 2, 8) * 4:
        model.observe_draft_time("model", 1, depth, 0.1 + 0.2 * depth)
    assert model.draft_s("model", 1, 6) == pytest.approx(1.3, rel=0.02)
    assert model.draft_token_s("model") == pytest.approx(0.2, rel=0.02)
    assert model.draft_s("other", 1, 6) == 0.0
    assert model.is_draft_cost_known("model")


def test_draft_time_of_an_unseen_number_of_requests_is_the_nearest_one() -> None:
    model = CostModel(STAIRS)
    model.observe_draft_time("model", 1, 1, 0.0)
    for depth in (1, 4) * 8:
        model.observe_draft_time("model", 1, depth, 0.1 * depth)
        model.observe_draft_time("model", 16, depth, 0.9 * depth)
    assert model.draft_s("model", 2, 4) == pytest.approx(0.4, rel=0.05)
    assert model.draft_s("model", 30, 4) == pytest.approx(3.6, rel=0.05)


# BatchShape


def test_batch_shape_counts_rows_and_cached_rows_beyond_the_profiled_ones() -> None:
    shape = BatchShape.from_batch([make_rows(num_cached=1000), make_rows(num_cached=PROFILED_CONTEXT_LEN // 2)])
    assert (shape.num_rows, shape.num_sequences, shape.is_decoding) == (2, 2, True)
    assert shape.cached_len == 1000 - PROFILED_CONTEXT_LEN
    assert shape.adapter_use is AdapterUse.NONE


def test_batch_shape_with_a_prompt_chunk_is_not_decoding() -> None:
    shape = BatchShape.from_batch([make_rows(num_cached=100), make_rows(num_cached=0, num_new_tokens=32, length=200)])
    assert (shape.num_rows, shape.is_decoding) == (33, False)


def test_batch_shape_takes_the_costliest_use_of_adapters() -> None:
    plain, some, scaling = (make_rows() for _ in range(3))
    some.request.adapter_number = 1
    assert BatchShape.from_batch([plain, some]).adapter_use is AdapterUse.SOME_ROWS
    scaling.request.adapter_number, scaling.request.has_mixture_pass = 2, True
    assert BatchShape.from_batch([scaling, plain, some]).adapter_use is AdapterUse.MIXTURE_PASS
