"""FLOPs that torch's counter sees in a rewritten model are those of the cost model, exactly."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import sparsify
from sparsify.cost_model.configuration import DENSE, Configuration
from sparsify.cost_model.counts import counted, values_of
from sparsify.cost_model.pairs import EXACT, LEADING
from sparsify.cost_model.stages import stage_formulas
from sparsify.cost_model.workload import AttentionShape, ElementBytes, Phase, Workload
from tests._util.tiny_models import CACHE, build, tokens

SHAPE = AttentionShape(q_heads=6, kv_heads=2, head_dim=8, value_dim=8)
LAYERS = 3
POLICIES = {
    "moba": sparsify.Policy.moba(block_size=8, topk=3),
    "msa": sparsify.Policy.msa(block_size=8, topk=3),
    "union": sparsify.Policy.msa(block_size=8, topk=3, local="union"),
}


def expected(configuration, workload):
    """FLOP of one layer by the cost model."""
    values = values_of(SHAPE, workload, configuration, ElementBytes())
    return sum(counted(f, values).flops for f in stage_formulas(configuration, workload))


def seen_apart(call):
    """FLOP of our ops in a call, and of all others."""
    with FlopCounterMode(display=False) as counter:
        call()
    counts = counter.get_flop_counts()["Global"]
    ours = sum(n for op, n in counts.items() if str(op).startswith("sparsify."))
    return ours, counter.get_total_flops() - ours


def seen(call):
    """FLOP of our ops in a call."""
    return seen_apart(call)[0]


def rewritten(policy):
    return sparsify.sparsify(build("llama"), policy).model


def dense_seen(length, *, causal):
    """FLOP of torch's attention; on the meta device, since its CPU kernel has no formula."""
    heads = (1, SHAPE.q_heads, length)
    q, k, v = (torch.empty(*heads, SHAPE.head_dim, device="meta") for _ in range(3))
    with FlopCounterMode(display=False) as counter:
        torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal)
    return counter.get_total_flops()


@pytest.mark.parametrize("length", [1, 7, 64, 4097])
def test_torch_counts_both_halves_of_dense_attention(length):
    """Causal or not, it counts the whole square: twice what the papers count."""
    workload = Workload.of(Phase.PREFILL, length)
    values = values_of(SHAPE, workload, DENSE, ElementBytes())
    exactly, papers = (
        sum(counted(f, values).flops for f in stage_formulas(DENSE, workload, pairs))
        for pairs in (EXACT, LEADING)
    )
    both = dense_seen(length, causal=True)
    assert both == dense_seen(length, causal=False)
    assert both == 2 * papers
    assert both * (length + 1) == 2 * exactly * length


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize(("batch", "length"), [(1, 64), (2, 53), (1, 7)])
def test_prefill(name, batch, length):
    policy = POLICIES[name]
    model = rewritten(policy)
    workload = Workload.of(Phase.PREFILL, length, batch)
    wanted = LAYERS * expected(Configuration.of(policy.method), workload)
    assert seen(lambda: model(tokens(batch, length), use_cache=False)) == wanted


def test_a_learned_indexer_is_counted_with_its_projections():
    """Torch counts the projections as products: what the same model has beyond the proxy's."""
    learned = sparsify.Policy.msa(block_size=8, topk=3, indexer="learned", index_dim=16)
    workload, ids = Workload.of(Phase.PREFILL, 53, 2), tokens(2, 53)
    configuration = Configuration.of(learned.method)
    hidden = build("llama").config.hidden_size
    values = values_of(SHAPE, workload, configuration, ElementBytes(), hidden)
    stages = [counted(f, values) for f in stage_formulas(configuration, workload)]
    projections = sum(stage.flops for stage in stages if stage.name == "index projections")
    model, proxy = rewritten(learned), rewritten(POLICIES["msa"])
    ours, rest = seen_apart(lambda: model(ids, use_cache=False))
    assert ours == LAYERS * (sum(stage.flops for stage in stages) - projections)
    assert rest - seen_apart(lambda: proxy(ids, use_cache=False))[1] == LAYERS * projections > 0


@pytest.mark.parametrize("name", POLICIES)
def test_chunk_and_decode_step(name):
    policy = POLICIES[name]
    model, ids = rewritten(policy), tokens(1, 61)
    with torch.no_grad():
        cache = model(ids[:, :30], use_cache=True).past_key_values
        chunk = Workload(Phase.PREFILL, 1, 30, 30)
        step = Workload.of(Phase.DECODE, 61)
        for part, workload in ((ids[:, 30:60], chunk), (ids[:, 60:], step)):
            wanted = LAYERS * expected(Configuration.of(policy.method), workload)
            assert seen(lambda p=part: model(p, use_cache=True, **{CACHE: cache})) == wanted


@pytest.mark.parametrize("name", POLICIES)
def test_training_chooses_a_second_time(name):
    policy = POLICIES[name]
    model, ids = rewritten(policy), tokens(1, 45)
    configuration = Configuration.of(policy.method)
    both = seen(lambda: model(ids, use_cache=False, labels=ids).loss.backward())
    training = expected(configuration, Workload.of(Phase.TRAINING, 45))
    # the published backward pass keeps the choice, our fused op makes it again
    forward = stage_formulas(configuration, Workload.of(Phase.PREFILL, 45))
    values = values_of(SHAPE, Workload.of(Phase.PREFILL, 45), configuration, ElementBytes())
    choice = sum(counted(f, values).flops for f in forward if f.name != "attention")
    assert both == LAYERS * (training + choice)


def test_a_call_below_min_context_is_left_to_torch():
    policy = sparsify.Policy.moba(block_size=8, topk=3, min_context=50)
    model = rewritten(policy)
    wanted = LAYERS * expected(Configuration.of(policy.method), Workload.of(Phase.PREFILL, 50))
    assert seen(lambda: model(tokens(1, 50), use_cache=False)) == wanted
    assert seen(lambda: model(tokens(1, 49), use_cache=False)) == 0
