"""Times of a layer: bounds that hold, ranges with sources, parts that sum up."""

import dataclasses

import pytest

from sparsify.cost_model.calibration import Calibration, packaged_calibration
from sparsify.cost_model.configuration import DENSE, PUBLISHED, Configuration
from sparsify.cost_model.counts import StageCounts
from sparsify.cost_model.crossover import crossover_tokens
from sparsify.cost_model.efficiencies import share_of_bound, share_of_speedup
from sparsify.cost_model.hardware import list_gpus, load_gpu
from sparsify.cost_model.layer_cost import WORKSPACE_BYTES, layer_cost
from sparsify.cost_model.roofline import imbalance_factor, stage_bound, wave_factor
from sparsify.cost_model.times import ZERO_TIME, Source, TimeEstimate
from sparsify.cost_model.workload import AttentionShape, ElementBytes, Phase, Workload

M3 = AttentionShape(64, 4, 128, 128)
LLAMA_8B = AttentionShape(32, 8, 128, 128)
H200 = load_gpu("h200")
SPARSE = PUBLISHED
EVERY = (DENSE, *PUBLISHED)
CONTEXTS = (1, 100, 4096, 2**15, 2**17, 2**20)


def every_call(phases=Phase):
    for configuration in EVERY:
        for phase in phases:
            for context in CONTEXTS:
                yield configuration, Workload.of(phase, context)


def family(name, efficiency=0.5, **more):
    entry = {"family": name, "efficiency": efficiency, "error": 0.1, "points": 4}
    return entry | {"contexts": (1, 2**20)} | more


def calibration(*families):
    return Calibration(gpu=H200.name, date="2026-01-01", source="a test", families=families)


ROUNDING = 1e-9  # of sums of float64
MOBA_STAGES = ("moba_means", "moba_gate", "reverse_index", "moba_attention", "combine")


@pytest.mark.parametrize("gpu", list_gpus(), ids=lambda gpu: gpu.name)
def test_bound_low_expected_and_high_are_in_order_on_every_gpu(gpu):
    for configuration, workload in every_call():
        found = layer_cost(M3, workload, configuration, gpu, hidden_size=6144)
        for time in (found.time, *(stage.time for stage in found.stages)):
            assert 0 < time.bound_ms <= time.low_ms <= time.expected_ms <= time.high_ms


def test_stages_sum_to_the_whole():
    for configuration, workload in every_call():
        found = layer_cost(M3, workload, configuration, H200, hidden_size=6144)
        assert found.flops == sum(stage.flops for stage in found.stages)
        assert found.time.bound_ms == pytest.approx(sum(s.time.bound_ms for s in found.stages))
        assert found.time.high_ms == pytest.approx(sum(s.time.high_ms for s in found.stages))


def test_no_time_is_without_a_source():
    measured = packaged_calibration(H200)
    sources = set()
    for configuration, workload in every_call():
        without = layer_cost(M3, workload, configuration, H200)
        assert without.time.source is Source.BOUND
        assert without.time.ms == without.time.bound_ms
        known = layer_cost(M3, workload, configuration, H200, calibration=measured)
        sizes = {"group_size": M3.group_size, "block_size": configuration.block_size}
        entries = [measured.efficiency(stage.family, **sizes) for stage in known.stages]
        assert (known.time.source is Source.CALIBRATED) == all(entries)
        sources.add(known.time.source)
    assert sources == {Source.CALIBRATED, Source.BOUND}


def test_what_keeps_every_block_gains_nothing_by_calibration():
    measured = packaged_calibration(H200)
    configuration = PUBLISHED[1]
    for context in (1, 128, configuration.budget_tokens, 1 << 17):
        workload = Workload.of(Phase.PREFILL, context)
        dense, sparse = (
            layer_cost(LLAMA_8B, workload, one, H200, calibration=measured).time.expected_ms
            for one in (DENSE, configuration)
        )
        gains = sparse < dense * (1 - ROUNDING)
        assert gains == (context > configuration.budget_tokens)


def test_dense_prefill_bound_is_flops_over_peak():
    (stage,) = layer_cost(M3, Workload.of(Phase.PREFILL, 2**17), DENSE, H200).stages
    assert stage.time.bound_ms == pytest.approx(stage.flops / 989.4e12 * 1e3)
    assert stage.binding == "compute"


def test_dense_decode_bound_is_bytes_over_bandwidth():
    (stage,) = layer_cost(M3, Workload.of(Phase.DECODE, 2**20), DENSE, H200).stages
    assert stage.time.bound_ms == pytest.approx(stage.dram_bytes / 4.8e12 * 1e3)
    assert stage.binding == "dram"


def test_short_calls_are_bound_by_their_launch():
    found = layer_cost(M3, Workload.of(Phase.DECODE, 64), PUBLISHED[-1], H200)
    assert {stage.binding for stage in found.stages} == {"launch"}
    long = layer_cost(M3, Workload.of(Phase.PREFILL, 2**20), PUBLISHED[-1], H200)
    assert "launch" not in {stage.binding for stage in long.stages}


def test_few_queries_are_bound_by_the_l2_cache_where_it_is_known():
    few = Workload(Phase.PREFILL, 1, 32, 2**15)
    known = {s.name: s for s in layer_cost(M3, few, PUBLISHED[-1], H200).stages}
    assert known["attention"].binding == "l2"
    unknown = {s.name: s for s in layer_cost(M3, few, PUBLISHED[-1], load_gpu("b200")).stages}
    assert unknown["attention"].binding != "l2"


@pytest.mark.parametrize("configuration", SPARSE, ids=lambda c: c.label)
@pytest.mark.parametrize("shape", [M3, LLAMA_8B], ids=["m3", "llama"])
def test_no_speedup_is_promised_beyond_the_bound_or_the_share(configuration, shape):
    for phase in (Phase.PREFILL, Phase.DECODE):
        for context in CONTEXTS:
            workload = Workload.of(phase, context)
            dense = layer_cost(shape, workload, DENSE, H200).time
            sparse = layer_cost(shape, workload, configuration, H200).time
            if configuration.decode == "dense" and phase is Phase.DECODE:
                assert sparse == dense
                continue
            most = max(dense.bound_ms / sparse.bound_ms, 1)  # below 1 launches decide
            assert dense.expected_ms / sparse.low_ms <= most * (1 + 1e-9)


@pytest.mark.parametrize("phase", [Phase.PREFILL, Phase.DECODE])
def test_more_blocks_than_there_are_cost_nothing_more(phase):
    """A bound is one for every kernel, also where top-k goes beyond the context."""
    for tokens, blocks in ((8192, 2), (32_768, 8), (32_769, 9)):
        call = Workload.of(phase, tokens)
        few, many = (
            layer_cost(LLAMA_8B, call, Configuration("moba", 4096, topk), H200)
            for topk in (blocks, 1000)
        )
        assert few.stages == many.stages
    call = Workload.of(phase, 4096)
    three, nine = (
        layer_cost(LLAMA_8B, call, Configuration("msa", 8192, topk, "proxy"), H200)
        for topk in (3, 9)
    )
    assert three.stages == nine.stages


def test_short_contexts_cost_launches_not_guesses():
    for configuration in SPARSE:
        for context in (1, 128, 1024):
            found = layer_cost(LLAMA_8B, Workload.of(Phase.PREFILL, context), configuration, H200)
            assert found.time.high_ms < 0.5


@pytest.mark.parametrize("configuration", SPARSE, ids=lambda c: c.label)
@pytest.mark.parametrize("phase", Phase)
def test_the_fixed_time_of_calibrated_dense_calls_neither_shrinks_nor_grows(configuration, phase):
    dense = packaged_calibration(H200)
    for context in (1, 7, 128):
        workload = Workload.of(phase, context)
        calls = [
            layer_cost(LLAMA_8B, workload, one, H200, hidden_size=4096, calibration=dense)
            for one in (DENSE, configuration)
        ]
        assert calls[0].fixed_ms == pytest.approx(calls[0].time.expected_ms, rel=0.2)
        gain = calls[0].time.expected_ms / calls[1].time.expected_ms
        assert 0.2 < gain <= 1 + ROUNDING


def test_a_decode_step_pays_from_the_crossover_on_at_borders_of_blocks_too():
    shape, sizes = AttentionShape(9, 3, 64, 64), {"phase": Phase.DECODE, "batch": 32}
    for gpu, configuration in ((load_gpu("l4"), PUBLISHED[1]), (H200, PUBLISHED[0])):
        found = crossover_tokens(shape, configuration, gpu, **sizes)

        def pays(tokens, gpu=gpu, configuration=configuration):
            call = Workload.of(Phase.DECODE, tokens, 32)
            sparse, dense = (layer_cost(shape, call, c, gpu).time for c in (configuration, DENSE))
            return sparse.expected_ms < dense.expected_ms

        step = configuration.block_size
        first = found // step
        borders = [block * step + 1 for block in range(first + 1, 4 * first + 2)]
        assert not pays(found - 1)
        assert all(pays(tokens) for tokens in (found, *borders))


def test_llama_never_gets_more_than_twice_its_group_from_msa():
    for context in CONTEXTS:
        workload = Workload.of(Phase.PREFILL, context)
        dense = layer_cost(LLAMA_8B, workload, DENSE, H200)
        sparse = layer_cost(LLAMA_8B, workload, PUBLISHED[-1], H200, hidden_size=4096)
        assert dense.time.expected_ms / sparse.time.low_ms < 8
        assert dense.flops / sparse.flops < 8


def test_moba_with_the_published_blocks_is_slower_below_a_hundred_thousand_tokens():
    kimi = Configuration("moba", 4096, 12)
    for scale in (0.5, 1, 2):
        found = crossover_tokens(LLAMA_8B, kimi, H200, phase=Phase.PREFILL, efficiency_scale=scale)
        assert found > 65_536


def test_crossover_is_the_first_length_from_which_sparse_pays():
    configuration = PUBLISHED[3]
    found = crossover_tokens(M3, configuration, H200, phase=Phase.PREFILL)

    def pays(tokens):
        workload = Workload.of(Phase.PREFILL, tokens)
        sparse = layer_cost(M3, workload, configuration, H200).time.expected_ms
        return sparse < layer_cost(M3, workload, DENSE, H200).time.expected_ms

    assert not pays(found - 1)
    assert all(pays(tokens) for tokens in (found, found + 1, 2 * found, 10 * found))


def test_there_is_no_crossover_where_sparse_never_pays():
    never = Configuration("moba", 4096, 12, decode="dense")
    assert crossover_tokens(M3, never, H200, phase=Phase.DECODE) is None
    assert crossover_tokens(M3, PUBLISHED[3], H200, phase=Phase.PREFILL, most_tokens=4096) is None


def test_calibrated_stages_give_a_calibrated_time():
    known = calibration(*(family(name) for name in MOBA_STAGES))
    workload = Workload.of(Phase.PREFILL, 2**17)
    found = layer_cost(M3, workload, PUBLISHED[0], H200, calibration=known)
    assert found.time.source is Source.CALIBRATED
    assert found.time.expected_ms == pytest.approx(2 * found.time.bound_ms, rel=0.02)
    assert found.time.low_ms == pytest.approx(0.9 * found.time.expected_ms)
    assert found.time.high_ms == pytest.approx(1.1 * found.time.expected_ms)


def test_one_missing_stage_leaves_the_whole_uncalibrated():
    known = calibration(*(family(name) for name in MOBA_STAGES[:-1]))
    workload = Workload.of(Phase.PREFILL, 2**17)
    found = layer_cost(M3, workload, PUBLISHED[0], H200, calibration=known)
    assert found.time.source is Source.BOUND


def test_overhead_is_added_once_per_stage():
    entry = {"overhead_us": 100.0}
    known = calibration(*(family(name, **entry) for name in MOBA_STAGES))
    without = calibration(*(family(name) for name in MOBA_STAGES))
    workload = Workload.of(Phase.PREFILL, 2**15)
    times = [
        layer_cost(M3, workload, PUBLISHED[0], H200, calibration=c).time.expected_ms
        for c in (known, without)
    ]
    assert times[0] - times[1] == pytest.approx(0.5)


def test_another_group_size_is_not_served_by_a_calibration():
    known = calibration(*(family(name, group_size=16) for name in MOBA_STAGES))
    workload = Workload.of(Phase.PREFILL, 2**17)
    sources = [
        layer_cost(shape, workload, PUBLISHED[0], H200, calibration=known).time.source
        for shape in (M3, LLAMA_8B)
    ]
    assert sources == [Source.CALIBRATED, Source.BOUND]


def test_float32_is_not_served_by_a_bfloat16_calibration():
    wide = ElementBytes(4, 4, 4, 4, 4, 4)
    known = calibration(*(family(name) for name in MOBA_STAGES), family("dense_prefill"))
    workload = Workload.of(Phase.PREFILL, 2**17)
    found = layer_cost(M3, workload, DENSE, H200, element_bytes=wide, calibration=known)
    assert found.time.source is Source.BOUND
    narrow = layer_cost(M3, workload, DENSE, H200).time.bound_ms
    assert found.time.bound_ms == pytest.approx(2 * narrow)


def test_float8_index_runs_at_the_float8_rate():
    workload = Workload.of(Phase.PREFILL, 2**20)
    fp8 = dataclasses.replace(ElementBytes(), index=1)

    def index_ms(element_bytes):
        found = layer_cost(M3, workload, PUBLISHED[-1], H200, element_bytes=element_bytes)
        return next(s.time.bound_ms for s in found.stages if s.name == "index scores")

    assert index_ms(fp8) == pytest.approx(index_ms(ElementBytes()) / 2, rel=0.01)


def test_sensitivity_scales_sparse_kernels_only():
    workload = Workload.of(Phase.PREFILL, 2**17)

    def expected(configuration, scale):
        found = layer_cost(M3, workload, configuration, H200, efficiency_scale=scale)
        return found.time.expected_ms

    assert expected(DENSE, 2) == expected(DENSE, 1)
    assert expected(PUBLISHED[0], 0.5) > expected(PUBLISHED[0], 1) > expected(PUBLISHED[0], 2)
    assert expected(PUBLISHED[0], 1e9) >= layer_cost(M3, workload, PUBLISHED[0], H200).time.bound_ms


def test_workspace_is_bounded():
    for configuration, workload in every_call():
        found = layer_cost(M3, workload, configuration, H200)
        assert found.workspace_bytes <= WORKSPACE_BYTES
    million = layer_cost(M3, Workload.of(Phase.PREFILL, 2**20), PUBLISHED[-1], H200)
    assert max(stage.workspace_bytes for stage in million.stages) > 100 * WORKSPACE_BYTES


def test_waves_and_tails_only_slow_down():
    assert wave_factor(132, 132) == 1
    assert wave_factor(133, 132) == pytest.approx(264 / 133)
    assert wave_factor(None, 132) == wave_factor(10, None) == 1
    assert imbalance_factor(132_000, 132) == pytest.approx(1.008)
    assert imbalance_factor(1, 132) == 133


def test_peak_rates_of_element_sizes():
    stage = StageCounts("x", "x", 10**12, 0, 0, 0, 1, None, False)
    times = [
        stage_bound(stage, H200, ElementBytes(size, size, size)).compute_ms for size in (1, 2, 4)
    ]
    assert times == pytest.approx([1000 / 1978.9, 1000 / 989.4, 2000 / 989.4])


def test_every_range_has_a_source():
    families = ("dense_prefill", "dense_decode", "dense_backward", "gemm")
    ranges = [share_of_bound(name) for name in families]
    ranges += [share_of_speedup(c, phase) for c in SPARSE for phase in Phase]
    for found in ranges:
        assert 0 < found.low < found.middle < found.high <= 1
        assert any(digit in found.source for digit in "0123456789")
    with pytest.raises(KeyError):
        share_of_bound("moba_attention")


def test_a_sum_is_as_well_founded_as_its_weakest_part():
    bound = TimeEstimate(1, 2, 3, 4, Source.BOUND)
    measured = TimeEstimate(1, 1, 1, 1, Source.MEASURED)
    assert (bound + measured).source is Source.BOUND
    assert (measured + measured).source is Source.MEASURED
    assert ZERO_TIME + bound == bound + ZERO_TIME == bound
    assert (2 * bound).high_ms == 8
