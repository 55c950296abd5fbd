"""The ops as PyTorch sees them: schemas, shapes, opcheck, compile, export, dispatch."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch.export import Dim
from torch.library import opcheck

from sparsify.errors import UsageError
from sparsify.kernels import schemas
from sparsify.kernels.layout import Layout
from tests._util.ops import KINDS, make, ops_for, run, select

every_kind = pytest.mark.parametrize("kind", KINDS)
OPS = torch.ops.sparsify
SELECTS = ("moba_select", "msa_select")
ATTENDS = ("block_attention", "moba_attention", "msa_attention")
BACKWARDS = tuple(f"{name}_backward" for name in ATTENDS)
LAYOUT = list(Layout._fields)


def ints(*values):
    return torch.tensor(values, dtype=torch.int32)


LAYOUTS = {
    "plain": {},
    "padded": {"key_mask": torch.arange(19) >= torch.tensor([[0], [4]])},
    "cache": {"q_start": ints(10, 6), "kv_len": ints(19, 15), "block_origin": ints(0, 1)},
}


def arguments(name, layout, *, dtype=torch.float32, grad=False):
    """Positional and keyword arguments of an op."""
    case = make("proxy", batch=2, queries=13, keys=19, dtype=dtype)
    case = {n: x.requires_grad_(grad and n in ("q", "k", "v")) for n, x in case.items()}
    lay = [LAYOUTS[layout].get(n) for n in LAYOUT]
    sizes = {"block_size": 4, "topk": 2}
    q, k, v, iq, ik = case.values()
    if name == "moba_select":
        return (q, k, *lay), sizes
    if name == "msa_select":
        return (iq, ik, *lay), {**sizes, "local": "union"}
    if name == "moba_attention":
        return (q, k, v, *lay), {**sizes, "scale": 0.3}
    if name == "msa_attention":
        return (q, k, v, iq, ik, *lay), {**sizes, "deterministic": True}
    lists = schemas.moba_select(q.detach(), k.detach(), *lay, **sizes)
    if name == "block_attention":
        return (q, k, v, lists, *lay), {"block_size": 4, "workspace_bytes": 5000}
    forward = name.removesuffix("_backward")
    args, options = arguments(forward, layout, dtype=dtype)
    out, lse = getattr(OPS, forward)(*args, **options)
    own = len(args) - len(LAYOUT)
    grads = (torch.ones_like(out), torch.ones_like(lse))
    return (*grads, *args[:own], out, lse, *args[own:]), options


@pytest.mark.parametrize("name", SELECTS + ATTENDS + BACKWARDS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_opcheck(name, layout):
    args, options = arguments(name, layout, grad=name in ATTENDS)
    result = opcheck(getattr(OPS, name).default, args, options)
    assert set(result.values()) == {"SUCCESS"}


@pytest.mark.parametrize("name", SELECTS + ATTENDS)
def test_schemas_take_the_layout_by_position_with_default_none(name):
    schema = getattr(OPS, name).default._schema
    by_name = {a.name: a for a in schema.arguments}
    positional = [a.name for a in schema.arguments if not a.kwarg_only]
    start = positional.index("q_start")
    assert positional[start : start + 7] == LAYOUT
    assert all(by_name[n].default_value is None for n in LAYOUT)
    assert not any("Tensor" in str(a.type) for a in schema.arguments if a.kwarg_only)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", SELECTS + ATTENDS + BACKWARDS)
def test_fake_results_have_the_real_shapes_dtypes_and_strides(name, dtype):
    args, options = arguments(name, "padded", dtype=dtype)
    real = getattr(OPS, name)(*args, **options)
    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=False) as mode:
        fakes = [mode.from_tensor(a) if isinstance(a, torch.Tensor) else a for a in args]
        fake = getattr(OPS, name)(*fakes, **options)
    real, fake = (x if isinstance(x, tuple) else (x,) for x in (real, fake))
    for r, f in zip(real, fake, strict=True):
        assert (r.shape, r.dtype, r.stride()) == (f.shape, f.dtype, f.stride())


@pytest.mark.parametrize(
    ("keys", "block_size", "topk", "kind"),
    [(1, 4, 2, "moba"), (9, 4, 10**6, "union"), (9, 4, 2, "union"), (0, 3, 2, "msa")],
)
def test_list_widths_of_meta_tensors(keys, block_size, topk, kind):
    case = make(kind, keys=keys, queries=3)
    real = select(kind, case, block_size, topk)
    meta = select(kind, {n: x.to("meta") for n, x in case.items()}, block_size, topk)
    assert real.shape == meta.shape


def test_pages_have_fakes():
    pages, q = torch.randn(7, 2, 4, 6), torch.randn(2, 4, 3, 6)
    table = torch.zeros(2, 3, dtype=torch.int32)
    real = OPS.moba_select(q, pages, page_table=table, block_size=4, topk=9)
    meta = OPS.moba_select(
        q.to("meta"), pages.to("meta"), page_table=table.to("meta"), block_size=4, topk=9
    )
    assert real.shape == meta.shape == (2, 4, 3, 3)


def test_arguments_are_judged_for_fakes_as_for_real_tensors():
    q, k = torch.randn(1, 3, 5, 4, device="meta"), torch.randn(1, 2, 5, 4, device="meta")
    with pytest.raises(ValueError, match="q has 3 heads and k has 2"):
        schemas.moba_attention(q, k, k, block_size=4, topk=2)


class Attention(torch.nn.Module):
    """One fused op between plain tensors."""

    def __init__(self, kind, **options):
        super().__init__()
        self.kind, self.options = kind, options

    def forward(self, *tensors):
        case = dict(zip(ops_for(self.kind), tensors, strict=True))
        return run(self.kind, case, 4, 2, **self.options)[0]


def tensors_of(kind, **sizes):
    case = make(kind, dtype=torch.float32, **sizes)
    return [case[n] for n in ops_for(kind)]


@every_kind
def test_compile_full_graph_forward_and_backward(kind):
    module = Attention(kind)
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager", dynamic=True)
    for keys in (19, 33):
        grads = []
        for attend in (module, compiled):
            tensors = [x.clone().requires_grad_() for x in tensors_of(kind, keys=keys)]
            attend(*tensors).square().sum().backward()
            grads.append([x.grad for x in tensors[:3]])
        for a, b in zip(*grads, strict=True):
            assert torch.equal(a, b)


def test_compile_of_the_two_step_form():
    def attend(q, k, v):
        lists = schemas.moba_select(q, k, block_size=4, topk=2)
        return schemas.block_attention(q, k, v, lists, block_size=4)[0]

    grads = []
    for form in (attend, torch.compile(attend, fullgraph=True, backend="aot_eager", dynamic=True)):
        tensors = [x.clone().requires_grad_() for x in tensors_of("moba", keys=30)]
        form(*tensors).square().sum().backward()
        grads.append([x.grad for x in tensors])
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


def test_sites_do_not_break_a_compiled_graph():
    from sparsify.kernels.selection import record_selection, site

    def attend(q, k, v):
        with site("layer#0"):
            return schemas.moba_attention(q, k, v, block_size=4, topk=2)[0]

    tensors = tensors_of("moba", keys=19)
    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(*tensors), attend(*tensors))
    with record_selection() as sel:
        compiled(*tensors)
    assert sel.sites() == ["call:0"]


def test_compiled_graphs_replay():
    from sparsify.kernels.selection import record_selection, replay_selection

    module = Attention("msa")
    q, k, v, iq, ik = tensors_of("msa", keys=30)
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    with record_selection() as sel:
        expected = compiled(q, k, v, iq, ik)
    with replay_selection(sel):
        assert torch.equal(compiled(q, k, v, -iq, ik), expected)


def exported(kind):
    dims = {0: Dim("batch", min=1, max=64), 2: Dim("length", min=1, max=4096)}
    tensors = tensors_of(kind, batch=2, keys=13)
    return torch.export.export(
        Attention(kind), tuple(tensors), dynamic_shapes=((dims,) * len(tensors),)
    )


@every_kind
def test_export_with_dynamic_batch_and_length(kind, tmp_path):
    program = exported(kind)
    targets = [str(n.target) for n in program.graph.nodes if n.op == "call_function"]
    assert any("sparsify.m" in t and "_attention" in t for t in targets)
    assert not any("select" in t and "sparsify" in t for t in targets)
    torch.export.save(program, tmp_path / "program.pt2")
    loaded = torch.export.load(tmp_path / "program.pt2")
    for batch, keys in ((1, 1), (1, 2), (3, 4), (2, 57)):
        tensors = tensors_of(kind, batch=batch, keys=keys, seed=keys)
        expected = Attention(kind)(*tensors)
        assert torch.equal(program.module()(*tensors), expected)
        assert torch.equal(loaded.module()(*tensors), expected)


def test_export_of_decode_with_a_mask():
    class Decode(torch.nn.Module):
        def forward(self, q, k, v, mask):
            return schemas.moba_attention(q, k, v, key_mask=mask, block_size=4, topk=2)[0]

    batch, length = Dim("batch", min=1, max=64), Dim("length", min=2, max=4096)
    q, k, v = tensors_of("moba", batch=2, keys=13, queries=1)
    mask = torch.arange(13) >= torch.tensor([[0], [3]])
    shapes = ({0: batch}, {0: batch, 2: length}, {0: batch, 2: length}, {0: batch, 1: length})
    program = torch.export.export(Decode(), (q, k, v, mask), dynamic_shapes=shapes)
    q, k, v = tensors_of("moba", batch=3, keys=40, queries=1)
    mask = torch.arange(40) >= torch.tensor([[0], [3], [20]])
    assert torch.equal(program.module()(q, k, v, mask), Decode()(q, k, v, mask))


def test_decompositions_keep_the_ops():
    program = exported("moba").run_decompositions()
    assert any("moba_attention" in str(n.target) for n in program.graph.nodes)


@pytest.mark.parametrize("name", SELECTS + ATTENDS)
def test_triton_by_name_is_one_clear_error(name, monkeypatch):
    args, options = arguments(name, "plain")
    monkeypatch.setenv("SPARSIFY_IMPL", "triton")
    why = "the tensors are not on a GPU"
    with pytest.raises(UsageError, match=rf"^SPARSIFY_IMPL is triton, but {why}\."):
        getattr(OPS, name)(*args, **options)
    monkeypatch.setenv("SPARSIFY_IMPL", "reference")
    getattr(OPS, name)(*args, **options)
    monkeypatch.setenv("SPARSIFY_IMPL", "cuda")
    with pytest.raises(UsageError, match="SPARSIFY_IMPL is 'cuda'"):
        getattr(OPS, name)(*args, **options)


def test_importing_the_ops_loads_neither_triton_nor_pydantic():
    code = (
        "import sys\n"
        "sys.modules['triton'] = None\n"
        "from sparsify.kernels import schemas\n"
        "import torch\n"
        "x = torch.randn(1, 2, 5, 4)\n"
        "print(schemas.moba_attention(x, x, x, block_size=2, topk=2)[0].shape)\n"
        "assert not {'pydantic', 'transformers', 'onnx'} & set(sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "[1, 2, 5, 4]" in done.stdout


@pytest.mark.parametrize("name", SELECTS + ATTENDS)
def test_functions_have_the_arguments_of_their_ops(name):
    import inspect

    schema = getattr(OPS, name).default._schema
    parameters = inspect.signature(getattr(schemas, name)).parameters.values()
    ours = [(p.name, p.kind == p.KEYWORD_ONLY, p.default) for p in parameters]
    theirs = [
        (
            a.name,
            a.kwarg_only,
            a.default_value if a.has_default_value() else inspect.Parameter.empty,
        )
        for a in schema.arguments
    ]
    assert ours == theirs


def test_inference_mode_and_no_grad():
    case = make("msa")
    expected = run("msa", case, 4, 2)[0]
    case["q"].requires_grad_()
    with torch.inference_mode():
        assert torch.equal(run("msa", case, 4, 2)[0], expected)
    with torch.no_grad():
        assert not run("msa", case, 4, 2)[0].requires_grad
