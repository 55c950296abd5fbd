"""Explanations say the same as the costs they explain."""

import pytest
import sympy

from sparsify.cost_model.configuration import DENSE, PUBLISHED
from sparsify.cost_model.explaining import LayerCall, explain_layer
from sparsify.cost_model.hardware import load_gpu
from sparsify.cost_model.situation import Situation
from sparsify.cost_model.workload import BF16, AttentionShape, ElementBytes, Phase, Workload

SHAPE = AttentionShape(32, 8, 128, 128)


def call(configuration, phase=Phase.PREFILL, context=32_768, batch=1, elements=BF16):
    workload = Workload.of(phase, context, batch)
    situation = Situation(load_gpu("h200"), workload, None, elements, 4096)
    return LayerCall(SHAPE, configuration, situation)


@pytest.mark.parametrize("phase", list(Phase))
@pytest.mark.parametrize("configuration", (DENSE, *PUBLISHED), ids=lambda c: c.label)
def test_formulas_with_their_values_give_the_numbers(configuration, phase):
    elements = ElementBytes(key=1, value=1, index=1)
    found = explain_layer(call(configuration, phase, batch=2, elements=elements))
    values = found.symbols | {line.name: line.value for line in found.pairs}
    for stage in found.stages:
        for formula, number in (
            (stage.flops_formula, stage.cost.flops),
            (stage.dram_formula, stage.cost.dram_bytes),
        ):
            expression = sympy.sympify(formula)
            assert {str(s) for s in expression.free_symbols} <= set(values)
            exact = expression.subs({s: values[str(s)] for s in expression.free_symbols})
            assert float(exact) == pytest.approx(number, rel=1e-9)
    for line in found.pairs:
        if line.formula:
            expression = sympy.sympify(line.formula)
            assert (
                expression.subs({s: values[str(s)] for s in expression.free_symbols}) == line.value
            )


@pytest.mark.parametrize("configuration", (DENSE, *PUBLISHED), ids=lambda c: c.label)
def test_shares_add_up_and_every_stage_has_a_basis(configuration):
    found = explain_layer(call(configuration))
    assert sum(stage.share for stage in found.stages) == pytest.approx(1)
    assert all("range" in stage.basis for stage in found.stages)
    assert all("aiconfigurator" in s.basis or "FlashMoBA" in s.basis for s in found.stages)


def test_better_kernels_are_faster_and_cross_earlier():
    lines = explain_layer(call(PUBLISHED[3])).sensitivity
    assert [line.scale for line in lines] == [0.5, 1.0, 2.0]
    assert lines[0].time.expected_ms > lines[1].time.expected_ms > lines[2].time.expected_ms
    assert lines[0].speedup < lines[1].speedup < lines[2].speedup
    far = 1 << 30
    crossings = [line.crossover_tokens or far for line in lines]
    assert crossings[0] >= crossings[1] >= crossings[2]


def test_dense_attention_has_nothing_to_be_sensitive_to():
    assert explain_layer(call(DENSE)).sensitivity == ()
    assert explain_layer(call(PUBLISHED[2], Phase.DECODE)).sensitivity == ()  # decodes dense
    assert explain_layer(call(PUBLISHED[0], Phase.DECODE)).sensitivity != ()


def test_figures_carry_their_sources():
    short = explain_layer(call(PUBLISHED[4], context=32)).figures  # re-reads keys through the L2
    figures = {name: (value, source) for name, value, _, source in short}
    assert figures["l2_bandwidth_gbs"] == (8770, load_gpu("h200").l2_bandwidth_gbs.source)
    assert "l2_bandwidth_gbs" not in {name for name, *_ in explain_layer(call(DENSE)).figures}
    fp8 = explain_layer(call(DENSE, elements=ElementBytes(key=1))).figures
    assert "fp8_dense_tflops" in {name for name, *_ in fp8} - set(figures)
    situation = Situation(load_gpu("h100-nvl"), Workload.of(Phase.DECODE, 4096))
    h100 = LayerCall(SHAPE, DENSE, situation)
    names = {name: source for name, _, _, source in explain_layer(h100).figures}
    assert names["bf16_dense_tflops"].startswith("unverified: ") and "l2_bandwidth_gbs" not in names


def test_json():
    data = explain_layer(call(PUBLISHED[0])).to_json()
    assert data["configuration"] == "MoBA 128/8" and data["context_tokens"] == 32_768
    assert data["stages"][0].keys() >= {
        "name",
        "flops_formula",
        "flops",
        "time",
        "binding",
        "basis",
    }
    assert data["sensitivity"][1]["efficiency_scale"] == 1.0


@pytest.mark.parametrize(
    ("context", "shown"), [(32_768, True), (32_767, False), (128, True), (200, False)]
)
def test_a_formula_of_pairs_is_shown_only_where_it_holds(context, shown):
    pairs = explain_layer(call(PUBLISHED[0], context=context)).pairs
    attended = next(line for line in pairs if line.name == "attended_pairs")
    assert bool(attended.formula) is shown
