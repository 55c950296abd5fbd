"""FLOPs that torch's counter reports for the ops, against counting pair by pair."""

import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode, flop_registry, sdpa_flop_count

from sparsify.kernels import flops, schemas
from sparsify.pair_counts import attended_pairs, dense_pairs
from tests._util.commands import environment
from tests._util.ops import KINDS, make, run, select

HEADS, GROUPS, SIZE, VALUE, INDEX = 4, 2, 6, 5, 4  # as `make` has them
FORWARD, BACKWARD = 2 * (SIZE + VALUE), 2 * (3 * SIZE + 2 * VALUE)


def counted(call):
    """All that the counter saw."""
    with FlopCounterMode(display=False) as counter:
        call()
    return counter.get_total_flops()


def places(queries, keys, start=None):
    first = keys - queries if start is None else start
    return [p for p in range(first, first + queries) if p >= 0]


def slow(kind, positions, block, topk, *, dense=False):
    """Pairs attended, one by one, per query head; and the operations of the choice."""
    if dense:
        return sum(p + 1 for p in positions), 0
    topk += kind == "union"
    pairs = 0
    for p in positions:
        past = range(p // block)
        pairs += len(list(past)[: topk - 1]) * block + len(range(p // block * block, p + 1))
    if kind == "moba":
        gates = sum(len(range(p // block)) for p in positions)
        return pairs, 2 * HEADS * SIZE * gates * (topk > 1)
    seen = sum(len(range(p + 1)) for p in positions)
    return pairs, 2 * GROUPS * INDEX * seen * (topk > 1)


def forward(kind, positions, block, topk, **how):
    pairs, choice = slow(kind, positions, block, topk, **how)
    return choice + FORWARD * HEADS * pairs


def backward(kind, positions, block, topk, **how):
    pairs, choice = slow(kind, positions, block, topk, **how)
    return choice + BACKWARD * HEADS * pairs


shapes = st.tuples(st.integers(0, 23), st.integers(0, 30))


@settings(max_examples=40, deadline=None)
@given(st.sampled_from(KINDS), shapes, st.integers(1, 12), st.integers(1, 6), st.integers(1, 3))
def test_forward_and_select_count_pair_by_pair(kind, shape, block, topk, batch):
    queries, more = shape
    keys = queries + more
    case = make(kind, queries=queries, keys=keys, batch=batch)
    at = places(queries, keys) * batch
    assert counted(lambda: run(kind, case, block, topk)) == forward(kind, at, block, topk)
    assert counted(lambda: select(kind, case, block, topk)) == slow(kind, at, block, topk)[1]


@pytest.mark.parametrize("kind", KINDS)
def test_queries_before_the_first_key_cost_nothing(kind):
    case = make(kind, queries=9, keys=4)
    assert counted(lambda: run(kind, case, 2, 2)) == forward(kind, range(4), 2, 2)


@pytest.mark.parametrize("kind", KINDS)
def test_backward_chooses_again(kind):
    case = make(kind, keys=37)
    for name in "qkv":
        case[name].requires_grad_()
    both = counted(lambda: sum(x.sum() for x in run(kind, case, 5, 3)).backward())
    at = range(37)
    assert both == forward(kind, at, 5, 3) + backward(kind, at, 5, 3)


def test_backward_of_block_attention_chooses_nothing():
    case = make(keys=37)
    lists = select("moba", case, 5, 3)
    for name in "qkv":
        case[name].requires_grad_()

    def call():
        schemas.block_attention(case["q"], case["k"], case["v"], lists, block_size=5)[
            0
        ].sum().backward()

    pairs = slow("moba", range(37), 5, 3)[0]
    assert counted(call) == (FORWARD + BACKWARD) * HEADS * pairs


@pytest.mark.parametrize("kind", KINDS)
def test_decode_steps_and_chunks_add_up_to_the_prefill(kind):
    whole = counted(lambda: run(kind, make(kind, keys=29), 4, 3))
    steps = [make(kind, queries=1, keys=n) for n in range(1, 30)]
    assert sum(counted(lambda c=c: run(kind, c, 4, 3)) for c in steps) == whole
    chunks = [make(kind, queries=7, keys=7), make(kind, queries=22, keys=29)]
    assert sum(counted(lambda c=c: run(kind, c, 4, 3)) for c in chunks) == whole


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("how", [{"min_context": 38}, {"decode_dense": True}])
def test_dense_calls_are_counted_dense(kind, how):
    queries = 1 if "decode_dense" in how else 37
    case = make(kind, queries=queries, keys=37)
    at = places(queries, 37)
    assert counted(lambda: run(kind, case, 4, 2, **how)) == forward(kind, at, 4, 2, dense=True)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("how", [{"min_context": 37}, {"decode_dense": True}])
def test_calls_that_stay_sparse_are_counted_sparse(kind, how):
    # as long as min_context; several queries are no decode step
    case = make(kind, queries=2, keys=37)
    at = places(2, 37)
    assert counted(lambda: run(kind, case, 4, 2, **how)) == forward(kind, at, 4, 2)


def test_disabled_by_the_environment(monkeypatch):
    monkeypatch.setenv("SPARSIFY_DISABLE", "1")
    case = make(keys=37)
    dense = forward("moba", range(37), 4, 2, dense=True)
    assert counted(lambda: run("moba", case, 4, 2)) == dense


def ints(*values):
    return torch.tensor(values, dtype=torch.int32)


@pytest.mark.parametrize("kind", KINDS)
def test_layout_tensors_are_read(kind):
    case = make(kind, batch=2, queries=5, keys=37)
    at = [*places(5, 30, 3), *places(5, 20)]
    where = {"kv_len": ints(30, 20), "q_start": ints(3, 15)}
    assert counted(lambda: run(kind, case, 4, 2, **where)) == forward(kind, at, 4, 2)
    assert forward(kind, at, 4, 2) != forward(kind, places(5, 37) * 2, 4, 2)


@pytest.mark.parametrize("kind", KINDS)
def test_packed_documents_are_counted_one_by_one(kind):
    case = make(kind, keys=37)
    at = [*range(9), *range(0), *range(20), *range(8)]
    cumulative = ints(0, 9, 9, 29, 37)
    where = {"cu_seqlens_q": cumulative, "cu_seqlens_k": cumulative}
    assert counted(lambda: run(kind, case, 4, 2, **where)) == forward(kind, at, 4, 2)
    dense = forward(kind, at, 4, 2, dense=True)
    assert counted(lambda: run(kind, case, 4, 2, min_context=21, **where)) == dense
    assert counted(lambda: run(kind, case, 4, 2, min_context=20, **where)) != dense


@pytest.mark.parametrize("kind", KINDS)
def test_padding_on_the_left_is_no_work_and_holes_are(kind):
    case = make(kind, batch=2, keys=20)
    mask = torch.ones(2, 20, dtype=torch.bool)
    mask[0, :6] = False
    at = [*range(14), *range(20)]
    assert counted(lambda: run(kind, case, 4, 2, key_mask=mask)) == forward(kind, at, 4, 2)
    mask[1, 9:12] = False
    assert counted(lambda: run(kind, case, 4, 2, key_mask=mask)) == forward(kind, at, 4, 2)


def test_queries_behind_the_keys_count_as_the_last_one():
    case = make(queries=4, keys=10)
    where = {"q_start": ints(8)}
    at = [8, 9, 9, 9]
    assert counted(lambda: run("moba", case, 4, 2, **where)) == forward("moba", at, 4, 2)
    empty = make(queries=4, keys=0)
    assert counted(lambda: run("moba", empty, 4, 2, **where)) == 0


def test_pages_count_as_the_slots_they_hold():
    q, pages = torch.randn(1, HEADS, 3, SIZE), torch.randn(7, GROUPS, 4, SIZE)
    table = torch.tensor([[4, 1, 6]])
    out = counted(
        lambda: schemas.moba_attention(q, pages, pages, page_table=table, block_size=4, topk=2)
    )
    pairs, choice = slow("moba", places(3, 12), 4, 2)
    assert out == choice + 2 * (SIZE + SIZE) * HEADS * pairs


def meta(case):
    return {name: x.to("meta") for name, x in case.items()}


@pytest.mark.parametrize("kind", KINDS)
def test_meta_tensors_take_the_default_place(kind):
    case = meta(make(kind, queries=5, keys=37, batch=2))
    where = {"q_start": ints(0, 0).to("meta"), "kv_len": ints(9, 9).to("meta")}
    at = places(5, 37) * 2
    assert counted(lambda: run(kind, case, 4, 2, **where)) == forward(kind, at, 4, 2)
    cumulative = ints(0, 9, 37).to("meta")
    where = {"cu_seqlens_q": cumulative, "q_start": ints(0, 0).to("meta"), "min_context": 30}
    case = meta(make(kind, keys=37))
    assert counted(lambda: run(kind, case, 4, 2, **where)) == forward(kind, range(37), 4, 2)


@pytest.mark.parametrize("kind", KINDS)
def test_fake_tensors_count_as_real_ones(kind):
    case = make(kind, keys=37, batch=2)
    with FakeTensorMode() as mode:
        fakes = {name: mode.from_tensor(x) for name, x in case.items()}
        where = {"q_start": mode.from_tensor(ints(0, 0)), "min_context": 20}
        count = counted(lambda: run(kind, fakes, 4, 2, **where))
    assert count == forward(kind, [*range(37)] * 2, 4, 2)


def test_a_compiled_function_is_counted_once():
    # under a counter torch runs it as it was written
    compiled = torch.compile(
        lambda q, k, v: schemas.moba_attention(q, k, v, block_size=4, topk=2)[0] + 1,
        backend="aot_eager",
    )
    case = make(keys=37)

    def call():
        return compiled(case["q"], case["k"], case["v"])

    assert counted(call) == forward("moba", range(37), 4, 2)
    call()
    assert counted(call) == forward("moba", range(37), 4, 2)


def test_a_traced_graph_is_counted_once():
    from torch.fx.experimental.proxy_tensor import make_fx

    case = make(keys=37)
    args = (case["q"], case["k"], case["v"])

    def body(q, k, v):
        return schemas.moba_attention(q, k, v, block_size=4, topk=2)[0]

    for mode in ("real", "fake", "symbolic"):
        graph = make_fx(body, tracing_mode=mode)(*args)
        assert counted(lambda g=graph: g(*args)) == forward("moba", range(37), 4, 2)
        traced = counted(lambda m=mode: make_fx(body, tracing_mode=m)(*args))
        assert traced == forward("moba", range(37), 4, 2)


def test_symbolic_sizes_count_by_their_hints():
    from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

    environment_of_sizes = ShapeEnv()
    case = make(keys=37)
    with FakeTensorMode(shape_env=environment_of_sizes) as mode:
        free = StatelessSymbolicContext([DimDynamic.DYNAMIC] * 4)
        q = mode.from_tensor(case["q"], symbolic_context=free)
        guards = len(environment_of_sizes.guards)
        call = {"block_size": 4, "topk": 2, "out_val": None}
        formula = flop_registry[torch.ops.sparsify.moba_select]
        assert isinstance(formula(q, q, **call), int)
        assert len(environment_of_sizes.guards) == guards
    gates = sum(p // 4 for p in range(37))
    assert formula(q, q, **call) == 2 * HEADS * SIZE * gates


def test_every_op_has_a_formula():
    names = {
        name.removeprefix("sparsify::").partition(".")[0]
        for name in torch._C._dispatch_get_all_op_names()
        if name.startswith("sparsify::")
    }
    assert names == set(flops.FORMULAS)
    assert all(getattr(torch.ops.sparsify, name) in flop_registry for name in names)


def test_an_op_without_a_formula_would_count_nothing():
    # why every op has one: the counter says 0 of what it does not know
    with torch.library._scoped_library("sparsify_without_formula", "DEF") as library:
        library.define("nothing(Tensor x) -> Tensor")
        library.impl("nothing", lambda x: x @ x, "CompositeExplicitAutograd")
        x = torch.ones(3, 3)
        assert counted(lambda: torch.ops.sparsify_without_formula.nothing(x)) == 0


def test_torch_counts_the_full_square_of_causal_attention():
    # twice the causal pairs, but for the diagonal; SDPA itself counts as 0 on a CPU
    n = 64
    square = sdpa_flop_count((2, HEADS, n, SIZE), (2, HEADS, n, SIZE), (2, HEADS, n, VALUE))
    ours = counted(lambda: run("moba", make(batch=2, keys=n), 8, 10**6, min_context=n + 1))
    assert square == 2 * (SIZE + VALUE) * HEADS * 2 * n * n
    assert 2 * ours == square + 2 * (SIZE + VALUE) * HEADS * 2 * n
    assert ours == 2 * (SIZE + VALUE) * HEADS * 2 * dense_pairs(n, n)


def test_nothing_breaks_where_the_counter_cannot_be_imported():
    code = """
import sys
sys.modules["torch.utils.flop_counter"] = None
from sparsify.kernels import schemas
import torch
q = torch.randn(1, 2, 8, 4)
print(tuple(schemas.moba_attention(q, q, q, block_size=4, topk=1)[0].shape))
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment(), check=True
    )
    assert done.stdout.strip() == "(1, 2, 8, 4)"


def test_a_rewritten_model_counts_what_the_closed_forms_say():
    import sparsify
    from tests._util.tiny_models import build, tokens

    model = build("llama")
    policy = sparsify.Policy.moba(block_size=8, topk=2)
    rewritten = sparsify.sparsify(model, policy, progress=None).model
    with FlopCounterMode(display=False) as counter:
        rewritten(tokens(2, 53))
    ours = {
        str(op): n
        for op, n in counter.get_flop_counts()["Global"].items()
        if str(op).startswith("sparsify.")
    }
    per_head = 2 * (8 + 8) * attended_pairs(53, 53, 8, 2) + 2 * 8 * sum(p // 8 for p in range(53))
    assert ours == {"sparsify.moba_attention": 3 * 2 * 6 * per_head}
    products = counter.get_total_flops() - sum(ours.values())
    assert products == 2 * 2 * 53 * sum(
        w.numel() for name, w in model.named_parameters() if w.dim() == 2 and "embed" not in name
    )
