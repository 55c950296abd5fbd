"""Learned indexers on the graph host: their branch in programs, index keys in caches, files."""

import copy
import itertools
import json
import pickle
import zipfile

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers import DynamicCache

import sparsify as sp
from sparsify.errors import CaptureError, UsageError
from sparsify.hosts.caches import SparseDynamicLayer
from sparsify.hosts.graph_index import _picked, _runs
from sparsify.kernels.selection import record_selection
from tests._util.planned import relative
from tests._util.tiny_models import CACHE, build, inspected, tokens


def policy(width=8, **fields):
    return sp.Policy.msa(block_size=8, topk=2, indexer="learned", index_dim=width, **fields)


@pytest.fixture(scope="module", params=["llama", "qwen3", "gpt2"])
def pair(request):
    """The model on the graph host and on the transformers host, with the same trained indexers."""
    model = build(request.param)
    graph = sp.sparsify(model, policy(), host="graph")
    other = sp.sparsify(model, policy(), inspection=inspected(request.param))
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, p in graph.model.named_parameters():
            if ".indexer." in name:
                p.add_(torch.randn(p.shape, generator=generator))
    other.model.load_state_dict(graph.model.state_dict(), strict=False)
    return graph, other


def logits(model, ids, **kwargs):
    with torch.no_grad():
        return model(ids, **kwargs).logits


def steps(model, ids, borders, cache):
    parts = [
        logits(model, ids[:, a:b], use_cache=True, **{CACHE: cache})
        for a, b in itertools.pairwise(borders)
    ]
    return torch.cat(parts, 1)


def test_both_hosts_compute_the_same_under_the_same_names(pair):
    graph, other = pair
    assert graph.model.state_dict().keys() == other.model.state_dict().keys()
    ids = tokens(2, 61)
    mask = torch.ones_like(ids)
    mask[1, :9] = 0
    for more in ({}, {"attention_mask": mask}):
        a, b = logits(graph.model, ids, **more), logits(other.model, ids, **more)
        real = mask.bool() if more else torch.ones_like(mask).bool()
        assert relative(a[real], b[real]) < 1e-5


def test_chunks_and_decode_equal_the_whole_prefill_and_crops_go_back(pair):
    model, ids = pair[0].model, tokens(2, 61)
    wanted, cache = logits(model, ids), DynamicCache(config=model.config)
    assert relative(steps(model, ids, (0, 13, 40, 60, 61), cache), wanted) < 1e-4
    assert all(isinstance(layer, SparseDynamicLayer) for layer in cache.layers)
    cache.crop(-21)
    cache.batch_select_indices(torch.tensor([1]))
    assert relative(steps(model, ids[1:, 40:], (0, 20, 21), cache), wanted[1:, 40:]) < 1e-4


def test_other_index_keys_in_the_cache_would_show(pair):
    model, ids = pair[0].model, tokens(1, 61)
    cache = DynamicCache(config=model.config)
    steps(model, ids, (0, 50), cache)
    for layer in cache.layers:
        layer.index_keys.keys_B1SI = layer.index_keys.keys_B1SI.flip(2)
    assert relative(steps(model, ids[:, 50:], (0, 11), cache), logits(model, ids)[:, 50:]) > 1e-2


def test_a_cache_without_index_keys_is_an_error():
    model = build("llama", num_hidden_layers=1)
    made, ids = sp.sparsify(model, policy(), host="graph").model, tokens(1, 40)
    cache = DynamicCache(config=model.config)
    steps(model, ids, (0, 20), cache)
    with pytest.raises(UsageError, match="does not hold an index key"):
        steps(made, ids[:, 20:], (0, 5), cache)


def test_archives_copies_and_pickles_hold_the_weights(pair, tmp_path):
    result, ids = pair[0], tokens(1, 61)
    wanted = logits(result.model, ids)
    folder = sp.export(result, tmp_path / "out")
    for other in (copy.deepcopy(result.model), pickle.loads(pickle.dumps(result.model))):
        assert torch.equal(logits(other, ids), wanted)
    loaded = sp.load(folder)
    assert torch.equal(logits(loaded, ids), wanted)
    assert relative(steps(loaded, ids, (0, 40, 60, 61), DynamicCache()), wanted) < 1e-4
    documents = [_document(folder / name) for name in ("model.pt2", "model_with_past.pt2")]
    assert all(d["schema"] == 2 and d["indexed"] == [0, 1, 2] for d in documents)


def _document(file):
    with zipfile.ZipFile(file) as archive:
        (name,) = (n for n in archive.namelist() if n.endswith("sparsify.json"))
        return json.loads(archive.read(name))


def test_archives_without_learned_indexers_stay_as_they_were(tmp_path):
    model = build("llama", num_hidden_layers=1)
    result = sp.sparsify(model, sp.Policy.moba(block_size=8, topk=2), host="graph")
    found = _document(sp.export(result, tmp_path / "out") / "model.pt2")
    assert found["schema"] == 1 and "indexed" not in found


@pytest.mark.slow
@pytest.mark.parametrize("pair", ["gpt2"], indirect=True)  # all three compute the same, see above
def test_the_checks_pass(pair, tmp_path):
    graph, _ = pair
    folder = sp.export(graph, tmp_path / "out")
    report = sp.verify(graph.original, graph.model, [tokens(1, 200)], directory=folder)
    assert {c.status for c in report.checks} <= {"passed", "skipped"}
    assert [c.status for c in report.checks if c.check == "V1"] == ["passed"]


class Attention(nn.Module):
    """As a user might write it; `tables` says how cosines are put together."""

    def __init__(self, tables="halves"):
        super().__init__()
        torch.manual_seed(0)
        self.tables = tables
        self.q_proj, self.o_proj = nn.Linear(32, 32), nn.Linear(32, 32)
        self.k_proj, self.v_proj = nn.Linear(32, 16), nn.Linear(32, 16)

    def forward(self, x):
        batch, length, _ = x.shape
        q, k, v = (
            p(x).view(batch, length, -1, 8).transpose(1, 2)
            for p in (self.q_proj, self.k_proj, self.v_proj)
        )
        if self.tables != "none":
            steps = 100.0 ** (-torch.arange(0, 8, 2) / 8)
            angles = torch.arange(length)[:, None] * steps
            if self.tables == "halves":
                angles = torch.cat([angles, angles], -1)
            else:
                angles = torch.cat([angles, angles * 1.0], -1)
            cos, sin = angles.cos(), angles.sin()
            q, k = (y * cos + torch.cat([-y[..., 4:], y[..., :4]], -1) * sin for y in (q, k))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.o_proj(out.transpose(1, 2).reshape(batch, length, -1))


@pytest.mark.parametrize("tables", ["halves", "none"])
def test_any_module_gets_one_that_turns_as_q_and_k_do(tables):
    module, x = Attention(tables).double(), torch.randn(2, 60, 32, dtype=torch.float64)
    proxy = sp.sparsify(module, sp.Policy.msa(block_size=8, topk=2), args=(x,))
    wide = sp.sparsify(module, policy(16), args=(x,))
    with record_selection() as a:
        wanted = proxy.model(x)
    with record_selection() as b:
        found = wide.model(x)
    assert torch.equal(found, wanted)
    assert sum(d.differing for d in a.diff(b).values()) == 0
    assert {n for n in wide.model.state_dict() if n.startswith("indexer.")} == {
        f"indexer.{side}_proj.{leaf}" for side in "qk" for leaf in ("weight", "bias")
    }
    report = wide.verify(((x,), {}))
    assert {c.status for c in report.checks} <= {"passed", "skipped"}


def test_tables_that_are_not_understood_are_refused():
    x = torch.randn(2, 60, 32)
    with pytest.raises(CaptureError, match="put together"):
        sp.sparsify(Attention("other"), policy(), args=(x,))


def test_a_trained_indexer_of_the_model_is_taken():
    trained = sp.sparsify(build("llama", num_hidden_layers=1), policy()).model
    ids = tokens(1, 61)
    with torch.no_grad():
        for name, p in trained.named_parameters():
            if ".indexer." in name:
                p.normal_()
    graph = sp.sparsify(trained, policy(), host="graph").model
    assert relative(logits(graph, ids), logits(trained, ids)) < 1e-5


def test_columns_are_read_as_slices():
    table = torch.arange(24.0).view(1, 1, 24)
    for columns in (
        (4, 5, 6, 7, 4, 5, 6, 7),
        (0, 2, 4, 1, 3, 5),
        (7,),
        (3, 2, 1),
        tuple(range(24)),
    ):
        assert _picked(table, columns).flatten().tolist() == list(map(float, columns))
    assert _runs((4, 6, 8, 5, 7, 9)) == [(4, 9, 2), (5, 10, 2)]
