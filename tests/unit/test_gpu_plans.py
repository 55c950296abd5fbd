"""`sparsify.plan` for a GPU, on models in memory."""

import functools

import pytest
import torch

import sparsify as sp
from sparsify.cost_model.model_config import read_config
from sparsify.gpu_plans import Request, plan_config
from tests._util.plan_gpus import write_gpu
from tests._util.tiny_folders import byte_tokenizer
from tests._util.tiny_models import build, tokens

SIZES = {"head_dim": 16, "max_position_embeddings": 1 << 20}


@functools.cache
def model():
    return build("llama", **SIZES)


@functools.cache
def found():
    return sp.inspect(model())


@pytest.fixture
def gpu(tmp_path):
    return str(write_gpu(tmp_path / "gpu.yaml"))


def test_without_a_gpu_nothing_changes():
    policy = sp.Policy.moba(block_size=8, topk=2)
    plan = sp.plan(found(), policy)
    assert plan.estimate == {} and {layer.min_context for layer in plan} == {0}
    assert plan == sp.plan(model(), policy)


def test_a_plan_for_a_gpu_can_be_carried_out(gpu):
    plan = sp.plan(model(), sp.Policy.auto(), gpu=gpu, context=131_072)
    assert plan.estimate["gpu"] == "Round-100" and plan.estimate["of"] == "the whole model"
    result = sp.sparsify(model(), plan=plan, inspection=found())
    assert result.plan == plan
    ids = tokens(1, 30)
    # below min_context it is the original
    assert torch.equal(result.model(ids).logits, model()(ids).logits)


def test_auto_may_name_its_target_itself(gpu):
    policy = sp.Policy.auto(gpu=gpu, context=131_072, phase="prefill")
    plan = sp.plan(found(), policy)
    assert (plan.estimate["phase"], plan.estimate["context_tokens"]) == ("prefill", 131_072)
    assert sp.sparsify(model(), policy, inspection=found()).plan.rewritten
    # what the verb is told wins
    plan = sp.plan(found(), policy, context=65_536, phase="decode")
    assert (plan.estimate["phase"], plan.estimate["context_tokens"]) == ("decode", 65_536)


def test_auto_that_finds_nothing_says_why(gpu):
    policy = sp.Policy.auto(gpu=gpu, context=1024)
    with pytest.raises(sp.NothingToDoError, match=r"nothing is (faster|possible) at 1,024 tokens"):
        sp.sparsify(model(), policy, inspection=found())


@pytest.mark.parametrize(
    ("options", "missing"),
    [({}, "A GPU and a context"), ({"gpu": "h200"}, "A context"), ({"context": 4096}, "A GPU")],
)
def test_what_auto_needs_is_named(options, missing):
    with pytest.raises(sp.UsageError, match=f"^{missing} to plan for"):
        sp.plan(found(), sp.Policy.auto(), **options)
    with pytest.raises(sp.UsageError, match="to plan for"):
        sp.sparsify(model(), sp.Policy.auto(**options), inspection=found())


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"context": 0}, "context is 0; expected"),
        ({"context": "32k"}, "context is '32k'; expected"),
        ({"gpu": 7}, "The GPU is a int; it must be a name or a file."),
        ({"phase": ""}, "Unknown phase ''"),
        ({"calibration": 3}, "The calibration is a int; it must be a file."),
    ],
)
def test_what_is_given_and_wrong_is_not_called_missing(options, said):
    policy = sp.Policy.auto(gpu="h200", context=4096, phase="decode")
    with pytest.raises(sp.UsageError, match=said):
        sp.plan(found(), policy, **options)


def test_autos_that_disagree():
    rule = {"match": "0", "method": {"name": "auto", "gpu": "a100", "context": 4096}}
    policy = sp.Policy.auto(gpu="h200", context=4096, layers=[rule])
    with pytest.raises(sp.UsageError, match="different targets: gpu h200 and a100"):
        sp.plan(found(), policy)


@pytest.mark.parametrize("value", [0.5, float("inf"), float("nan"), True, "2"])
def test_impossible_speedups(gpu, value):
    with pytest.raises(sp.UsageError, match="min_speedup is"):
        sp.plan(found(), sp.Policy.auto(), gpu=gpu, context=4096, min_speedup=value)


def test_unknown_gpus_have_their_own_error():
    with pytest.raises(sp.UnknownGpuError):
        sp.plan(found(), sp.Policy.auto(), gpu="h2oo", context=4096)


def test_recall_on_samples_decides(gpu):
    policy = sp.Policy.auto(quality={"min_score_recall": 0.05})
    samples = [tokens(1, 2400)]
    plan = sp.plan(model(), policy, gpu=gpu, context=131_072, samples=samples)
    text = " ".join(plan.estimate["notes"])
    assert "measured on samples of 2,400 tokens, 1,024 rows" in text
    assert "Not measurable on samples this short" in text
    assert all(layer.block_size * layer.topk < 2400 for layer in plan.rewritten)
    strict = sp.Policy.auto(quality={"min_score_recall": 1.0})
    with pytest.raises(sp.InfeasibleError, match="mean score recall of 1 on the samples"):
        sp.plan(model(), strict, gpu=gpu, context=131_072, samples=samples)


def test_texts_are_samples_too(gpu):
    small = build("llama", vocab_size=260, **SIZES)
    plan = sp.plan(
        small,
        sp.Policy.moba(block_size=64, topk=8),
        gpu=gpu,
        context=131_072,
        samples="text " * 150,
        tokenizer=byte_tokenizer(),
    )
    assert any("mean score recall" in note for note in plan.estimate["notes"])


def test_samples_without_a_language_model(gpu):
    options = {"gpu": gpu, "context": 4096, "samples": [tokens(1, 20)]}
    with pytest.raises(sp.UsageError, match="Samples need a language model in memory"):
        sp.plan(found(), sp.Policy.auto(), **options)
    with pytest.raises(sp.UsageError, match="to plan for are missing"):
        sp.plan(model(), sp.Policy.moba(block_size=8, topk=2), samples=[tokens(1, 20)])


def test_a_quality_budget_without_samples(gpu):
    policy = sp.Policy.moba(block_size=64, topk=8, quality={"min_score_recall": 0.9})
    with pytest.raises(sp.UsageError, match="no samples"):
        sp.plan(found(), policy, gpu=gpu, context=131_072)
    assert sp.plan(found(), policy).rewritten  # without a GPU the check V6 judges it


def test_the_plan_of_a_config_fits_the_model(gpu):
    described = plan_config(
        sp.Policy.auto(), read_config(model().config.to_dict()), Request(gpu, 131_072)
    )
    assert "Nothing of this is proved" in described.notes[0]
    result = sp.sparsify(model(), plan=described.plan, inspection=found())
    assert len(result.plan.rewritten) == 3


def test_a_config_of_another_model_does_not(gpu):
    other = {**model().config.to_dict(), "num_hidden_layers": 4, "layer_types": None}
    described = plan_config(sp.Policy.auto(), read_config(other), Request(gpu, 131_072))
    with pytest.raises(sp.UsageError, match=r"model\.layers\.3\.self_attn, where the model has no"):
        sp.sparsify(model(), plan=described.plan, inspection=found())


class Module(torch.nn.Module):
    """Attention with a width of its own, no language model."""

    def __init__(self):
        super().__init__()
        self.qkv = torch.nn.Linear(64, 192, bias=False)
        self.out = torch.nn.Linear(64, 64, bias=False)

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, 4, 16)).permute(2, 0, 3, 1, 4)
        y = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(2))


def test_modules_are_planned_by_what_was_captured(gpu):
    module, x = Module().eval(), torch.randn(1, 40, 64)
    policy = sp.Policy.moba(block_size=128, topk=8)
    plan = sp.plan(module, policy, (x,), gpu=gpu, context=131_072)
    assert plan.estimate["of"] == "the whole model" and plan.rewritten
    result = sp.sparsify(module, args=(x,), plan=plan)
    assert result.plan == plan
    with pytest.raises(sp.UsageError, match="Samples need a language model"):
        sp.plan(module, policy, (x,), gpu=gpu, context=131_072, samples=["text"])
