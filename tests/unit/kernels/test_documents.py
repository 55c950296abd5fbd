"""Documents packed into the rows of a batch: each of them equals itself run alone."""

import dataclasses

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from sparsify.kernels import documents as docs
from sparsify.kernels.planned import planned_attention
from sparsify.kernels.selection import record_selection
from sparsify.plans import LayerPlan
from tests._util.ops import KINDS, close, make, run
from tests._util.packed_rows import each

SIZE, TOPK = 4, 2
# 29 tokens a row: lengths below one block, at its border, below and beyond top-k blocks, one token
ROWS = [[1, 8, 20], [29], [3, 9, 1, 16]]
T, F = True, False


def table(rows, numbers=None):
    """Document numbers of rows of documents with the given lengths."""
    out = []
    for row in rows:
        names = numbers or range(len(row))
        out.append(torch.cat([torch.full((n,), d) for n, d in zip(row, names, strict=False)]))
    return torch.stack(out)


def packed(kind, case, documents, key_mask=None, **options):
    """Output and log-sum-exp of the op on the packed rows, as a batch again."""
    batch, length = documents.shape
    row = {name: docs.as_packed_row(x) for name, x in case.items()}
    where = docs.document_layout(documents, key_mask)._asdict()
    parts = run(kind, row, SIZE, TOPK, **where, **options)
    return tuple(docs.as_batch(x, batch, length) for x in parts)


def part(case, row, first, last):
    return {name: x[row : row + 1, :, first:last] for name, x in case.items()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("kind", KINDS)
def test_every_document_equals_itself_run_alone(kind, dtype):
    case = make(kind, batch=3, keys=29, dtype=dtype)
    out, lse = packed(kind, case, table(ROWS))
    assert out.shape == (3, 4, 29, 5) and lse.shape == (3, 4, 29)
    for row, first, last in each(ROWS):
        alone = run(kind, part(case, row, first, last), SIZE, TOPK)
        assert torch.equal(out[row : row + 1, :, first:last], alone[0])
        assert torch.equal(lse[row : row + 1, :, first:last], alone[1])


@pytest.mark.parametrize("kind", KINDS)
def test_without_documents_the_rows_differ(kind):
    case = make(kind, batch=3, keys=29)
    whole = run(kind, case, SIZE, TOPK)[0]
    out = packed(kind, case, table(ROWS))[0]
    assert close(out[1], whole[1])  # a row that is one document
    assert not close(out[0, :, 9:], whole[0, :, 9:], 1e-3)


@pytest.mark.parametrize("numbers", [(7, 3, 900), (-1, -5, 2), (2**40, 0, 1)])
def test_numbers_only_have_to_differ(numbers):
    case = make(batch=1, keys=29)
    wanted = packed("moba", case, table(ROWS[:1]))[0]
    assert torch.equal(packed("moba", case, table(ROWS[:1], numbers))[0], wanted)


def test_equal_numbers_in_two_rows_are_two_documents():
    case = make(batch=2, keys=29)
    out = packed("moba", case, torch.full((2, 29), 5))[0]
    assert close(out, run("moba", case, SIZE, TOPK)[0])


def test_the_scale_reaches_the_op():
    case = make(batch=1, keys=29)
    one, other = (packed("moba", case, table(ROWS[:1]), scale=s)[0] for s in (None, 0.9))
    alone = run("moba", part(case, 0, 9, 29), SIZE, TOPK, scale=0.9)[0]
    assert torch.equal(other[..., 9:, :], alone) and not close(one, other, 1e-3)


@pytest.mark.parametrize("kind", KINDS)
def test_padding_between_documents_changes_nothing(kind):
    """Rows [pad pad A*11 pad B*9 pad*4] and [A*5 B*14 pad*8], the padding full of NaN."""
    rows = [[(2, F), (11, T), (1, F), (9, T), (4, F)], [(5, T), (14, T), (8, F)]]
    lengths = [[n for n, _ in row] for row in rows]
    real = torch.stack([torch.cat([torch.full((n,), r) for n, r in row]) for row in rows])
    case = make(kind, batch=2, keys=27)
    for name in ("k", "v", "ik"):
        case[name] = case[name].masked_fill(~real[:, None, :, None], float("nan"))
    out = packed(kind, case, table(lengths), real)[0]
    for row, first, last in each(lengths):
        if real[row, first]:
            alone = run(kind, part(case, row, first, last), SIZE, TOPK)[0]
            assert close(out[row : row + 1, :, first:last], alone)


@pytest.mark.parametrize("number_of_holes", [1, 0], ids=["own number", "another number"])
def test_a_hole_inside_a_document_keeps_its_slot(number_of_holes):
    documents = torch.ones(1, 29, dtype=torch.int64)
    real = torch.ones(1, 29, dtype=torch.bool)
    real[0, [4, 5, 17]] = False
    documents[~real] = number_of_holes
    case = make(batch=1, keys=29)
    out = packed("moba", case, documents, real)[0]
    wanted = run("moba", case, SIZE, TOPK, key_mask=real)[0]
    assert close(out[:, :, real[0]], wanted[:, :, real[0]])


def test_hidden_numbers_in_front_do_not_matter():
    documents = torch.tensor([[1, 1, 2, 2, 2, 1, 1, 0]])
    real = torch.tensor([[F, F, T, T, T, T, T, F]])
    layout = docs.document_layout(documents, real)
    assert layout.cu_seqlens_q.tolist() == [0, 5, *[8] * 7]


def test_lengths_have_a_fixed_size_and_end_in_documents_without_tokens():
    layout = docs.document_layout(torch.tensor([[4, 4, 9], [9, 7, 7]]))
    assert layout.cu_seqlens_q.tolist() == [0, 2, 3, 4, 6, 6, 6]
    assert layout.cu_seqlens_q.dtype == torch.int32
    assert layout.key_mask is None


@pytest.mark.parametrize("shape", [(0, 5), (2, 0)])
def test_nothing_at_all(shape):
    case = make(batch=shape[0], keys=shape[1])
    out, lse = packed("moba", case, torch.zeros(shape, dtype=torch.int64))
    assert out.shape == (shape[0], 4, shape[1], 5) and lse.shape == out.shape[:3]
    masked = docs.document_layout(torch.zeros(shape, dtype=torch.int64), torch.ones(shape).bool())
    assert masked.cu_seqlens_q.tolist() == [0]


@pytest.mark.parametrize(
    "row", [[1, 1, 2, 2, 1], [3, 0, 3, 3, 3], [1, 2, 1, 2, 1]], ids=["ABA", "one", "mixed"]
)
def test_scattered_documents_are_an_error_in_one_sentence(row):
    documents = torch.tensor([[5] * 5, row])
    with pytest.raises(RuntimeError, match="do not stand next to each other") as error:
        docs.document_layout(documents)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("documents", "mask", "words"),
    [
        (torch.zeros(3, dtype=torch.int64), None, r"documents has shape \[3\]"),
        (torch.zeros(1, 3), None, "whole numbers"),
        (torch.zeros(1, 3, dtype=torch.int64), torch.ones(1, 3), r"expected torch\.bool"),
    ],
)
def test_other_tables_are_refused_by_name(documents, mask, words):
    with pytest.raises(ValueError, match=words):
        docs.document_layout(documents, mask)


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_those_of_each_document_alone(kind):
    case = make(kind, batch=2, keys=29)
    for name in ("q", "k", "v"):
        case[name].requires_grad_()
    rows = ROWS[::2]
    weight = torch.randn(2, 4, 29, 5, dtype=torch.float64)
    (packed(kind, case, table(rows))[0] * weight).sum().backward()
    grads = {name: case[name].grad.clone() for name in ("q", "k", "v")}
    for name in grads:
        case[name].grad = None
    for row, first, last in each(rows):
        alone = run(kind, part(case, row, first, last), SIZE, TOPK)[0]
        (alone * weight[row : row + 1, :, first:last]).sum().backward()
    assert all(close(grads[name], case[name].grad) for name in grads)


def test_documents_are_recorded_as_sequences_of_their_own():
    case = make(batch=1, keys=29)
    with record_selection() as chosen:
        packed("moba", case, table(ROWS[:1]))
    known = chosen.known("call:0")
    assert known.sum(1).tolist() == ROWS[0]


PLAN = LayerPlan("a", 0, "moba", "rewritten", "by rule", block_size=SIZE, topk=TOPK)


class Packed(torch.nn.Module):
    def forward(self, q, k, v, documents, real):
        return planned_attention(PLAN, q, k, v, documents=documents, key_mask=real)


def inputs(rows, seed=0):
    documents = table(rows)
    case = make(seed=seed, batch=len(rows), keys=documents.shape[1])
    return case["q"], case["k"], case["v"], documents, torch.ones_like(documents).bool()


def test_it_exports_with_free_batch_and_length_and_checks_when_it_runs():
    size = torch.export.Dim.DYNAMIC
    shapes = ({0: size, 2: size},) * 3 + ({0: size, 1: size},) * 2
    program = torch.export.export(Packed(), inputs([[5, 8], [6, 7]]), dynamic_shapes=shapes)
    again = program.run_decompositions({}).module()
    for rows in ([[4, 9], [2, 11]], ROWS):
        other = inputs(rows, seed=3)
        assert torch.equal(again(*other), Packed()(*other))
    *first, documents, real = inputs(ROWS)
    documents[0, -1] = documents[0, 0]
    with pytest.raises(RuntimeError, match="next to each other"):
        again(*first, documents, real)


def test_it_traces_to_plain_operators_and_the_op():
    graph = make_fx(Packed(), tracing_mode="symbolic")(*inputs(ROWS)).graph
    names = {str(node.target) for node in graph.nodes if node.op == "call_function"}
    assert "sparsify.moba_attention.default" in names
    assert not {"aten._local_scalar_dense.default", "aten.nonzero.default"} & names


def test_it_compiles_without_a_break():
    compiled = torch.compile(Packed(), fullgraph=True, backend="aot_eager", dynamic=True)
    for rows in (ROWS, [[4, 9], [2, 11]]):
        assert close(compiled(*inputs(rows)), Packed()(*inputs(rows)))


@pytest.mark.parametrize("method", ["moba", "msa"])
def test_a_plan_runs_by_document(method):
    plan = dataclasses.replace(PLAN, method=method, indexer="proxy" if method == "msa" else None)
    q, k, v, documents, _ = inputs(ROWS)
    out = planned_attention(plan, q, k, v, documents=documents, scale=0.7)
    for row, first, last in each(ROWS):
        alone = (x[row : row + 1, :, first:last] for x in (q, k, v))
        wanted = planned_attention(plan, *alone, scale=0.7)
        assert torch.equal(out[row : row + 1, :, first:last], wanted)


def test_one_row_of_numbers_serves_every_row():
    q, k, v, documents, _ = inputs([ROWS[0]] * 3)
    one, all_of_them = (
        planned_attention(PLAN, q, k, v, documents=d) for d in (documents[:1], documents)
    )
    assert torch.equal(one, all_of_them)


def test_documents_over_a_cache_are_refused():
    q, k, v, documents, _ = inputs(ROWS)
    with pytest.raises(ValueError, match="3 queries and 29 keys"):
        planned_attention(PLAN, q[:, :, -3:], k, v, documents=documents[:, -3:])
    with pytest.raises(ValueError, match="no cache"):
        planned_attention(PLAN, q, k, v, documents=documents, q_start=torch.zeros(3).long())


def test_the_longest_document_decides_whether_the_context_is_long_enough():
    q, k, v, documents, _ = inputs([[9, 20], [15, 14]])
    sparse, dense, mixed = (
        planned_attention(dataclasses.replace(PLAN, **changes), q, k, v, documents=documents)
        for changes in ({}, {"topk": 100}, {"min_context": 20})
    )
    short = dataclasses.replace(PLAN, min_context=21)
    assert torch.equal(planned_attention(short, q, k, v, documents=documents), dense)
    assert torch.equal(mixed, sparse) and not close(sparse, dense, 1e-3)
