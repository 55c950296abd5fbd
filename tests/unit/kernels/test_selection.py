"""Record and replay: one recorded choice serves prefill, chunks, decode, packing, backward."""

from __future__ import annotations

import threading
from itertools import pairwise

import numpy as np
import pytest
import torch

from sparsify.errors import ArtefactError, UsageError
from sparsify.kernels import schemas
from sparsify.kernels.selection import Selection, record_selection, replay_selection, site
from tests._util.ops import KINDS, OF_KEYS, close, cut, make, run, select

KEYS, BLOCK, TOPK = 37, 8, 3
NAME = "model.layers.7.self_attn#0"
every_kind = pytest.mark.parametrize("kind", KINDS)


def attend(kind, case, topk=TOPK, **options):
    return run(kind, case, BLOCK, topk, **options)[0]


def other(kind, case):
    """The same attention with another choice of blocks, and nothing else changed."""
    if kind == "moba":
        means = torch.randn(1, 2, 5, 6, generator=torch.Generator().manual_seed(5))
        return case, {"block_means": means.double().expand(case["q"].shape[0], -1, -1, -1)}
    return dict(case, iq=-case["iq"]), {}


@every_kind
def test_record_holds_the_lists_of_the_select_op(kind):
    case = make(kind)
    with record_selection() as sel, site(NAME):
        attend(kind, case)
    assert sel.sites() == [NAME]
    assert torch.equal(sel.blocks(NAME), select(kind, case, BLOCK, TOPK))
    assert sel.blocks(NAME).dtype == torch.int32
    assert bool(sel.known(NAME).all())
    assert sel.block_size(NAME) == BLOCK


@every_kind
@pytest.mark.parametrize("queries", [1, KEYS])
def test_replay_attends_with_the_recorded_choice(kind, queries):
    case = make(kind, queries=queries)
    changed, options = other(kind, case)
    with record_selection() as sel:
        expected = attend(kind, case)
    assert not close(attend(kind, changed, **options), expected, 1e-3)
    with replay_selection(sel):
        assert torch.equal(attend(kind, changed, **options), expected)
    assert not close(attend(kind, changed, **options), expected, 1e-3)


@every_kind
def test_select_ops_replay_too_and_count_as_the_fused_op_does(kind):
    case = make(kind)
    changed, options = other(kind, case)
    with record_selection() as sel:
        lists = select(kind, case, BLOCK, TOPK)
        out = attend(kind, changed, **options)
    assert sel.sites() == ["call:0", "call:1"]
    with replay_selection(sel):
        assert torch.equal(select(kind, changed, BLOCK, TOPK, **options), lists)
        assert torch.equal(attend(kind, case), out)


@every_kind
@pytest.mark.parametrize("edges", [[0, 5, 20, 37], [0, 8, 16, 37], [0, 36, 37], list(range(38))])
def test_one_prefill_serves_chunks_and_steps(kind, edges):
    case = make(kind)
    changed, options = other(kind, case)
    with record_selection() as sel, site(NAME):
        expected = attend(kind, case)
    parts = []
    with replay_selection(sel), site(NAME):
        for a, b in pairwise(edges):
            part = cut(changed, a, b)
            part_options = {n: x[:, :, : -(-b // BLOCK)] for n, x in options.items()}
            parts.append(attend(kind, part, **part_options))
    assert close(torch.cat(parts, 2), expected)


@every_kind
@pytest.mark.parametrize("edges", [[0, 5, 20, 37], [0, 20, 5, 37], list(range(38))])
def test_chunks_and_steps_serve_one_prefill(kind, edges):
    case = make(kind)
    changed, options = other(kind, case)
    spans = list(pairwise(sorted(edges)))
    with record_selection() as sel, site(NAME):
        for a, b in spans if edges == sorted(edges) else reversed(spans):
            attend(kind, cut(case, a, b))
    assert sel.blocks(NAME).shape[2] == KEYS
    with replay_selection(sel), site(NAME):
        assert close(attend(kind, changed, **options), attend(kind, case))
    assert close(
        torch.cat([attend(kind, cut(case, a, b)) for a, b in spans], 2),
        attend(kind, case),
    )


@every_kind
def test_rows_are_known_by_sequence_and_position_not_by_slot(kind):
    """Recorded plainly, replayed left-padded, right-padded, packed, and in a static cache."""
    case = make(kind)
    with record_selection() as sel, site(NAME):
        expected = attend(kind, case)
    mirrored = dict(case, iq=-case["iq"])
    left = {n: torch.nn.functional.pad(x, (0, 0, 5, 0)) for n, x in mirrored.items()}
    right = {n: torch.nn.functional.pad(x, (0, 0, 0, 5)) for n, x in mirrored.items()}
    slots = torch.arange(KEYS + 5)[None]
    cache = {n: right[n] if n in OF_KEYS else mirrored[n] for n in right}
    length = torch.tensor([KEYS])
    edges = torch.tensor([0, KEYS], dtype=torch.int32)
    with replay_selection(sel), site(NAME):
        assert close(attend(kind, left, key_mask=slots >= 5)[:, :, 5:], expected)
        assert close(attend(kind, cache, kv_len=length), expected)
        assert close(attend(kind, right, cu_seqlens_q=edges)[:, :, :KEYS], expected)


@every_kind
def test_documents_are_sequences(kind):
    parts = [make(kind, seed=s, keys=n) for s, n in enumerate((9, 20))]
    packed = {n: torch.cat([p[n] for p in parts], 2) for n in parts[0]}
    edges = torch.tensor([0, 9, 29], dtype=torch.int32)
    with record_selection() as sel, site(NAME):
        attend(kind, packed, cu_seqlens_q=edges)
    assert sel.blocks(NAME).shape[0] == 2
    assert sel.known(NAME).sum(-1).tolist() == [9, 20]
    batch = {
        n: torch.cat([torch.nn.functional.pad(p[n], (0, 0, 20 - p[n].shape[2], 0)) for p in parts])
        for n in parts[0]
    }
    mask = torch.arange(20) >= torch.tensor([[11], [0]])
    with replay_selection(sel), site(NAME):
        out = attend(kind, batch, key_mask=mask)
    assert close(out[1:], attend(kind, parts[1]))
    assert close(out[:1, :, 11:], attend(kind, parts[0]))


def test_a_later_record_of_a_row_replaces_an_earlier_one():
    case = make("msa")
    flipped = dict(case, iq=-case["iq"])
    with record_selection() as sel, site(NAME):
        attend("msa", case)
        attend("msa", cut(flipped, 20, 30))
    lists = sel.blocks(NAME)
    assert torch.equal(lists[:, :, :20], select("msa", case, BLOCK, TOPK)[:, :, :20])
    assert torch.equal(lists[:, :, 20:30], select("msa", flipped, BLOCK, TOPK)[:, :, 20:30])
    assert torch.equal(lists[:, :, 30:], select("msa", case, BLOCK, TOPK)[:, :, 30:])


@every_kind
def test_missing_rows_and_sites_are_named(kind):
    case = make(kind)
    with record_selection() as sel, site(NAME):
        attend(kind, cut(case, 0, 20))
    with replay_selection(sel):
        with site(NAME), pytest.raises(UsageError, match="no row for position 20 of sequence 0"):
            attend(kind, case)
        with site("other#0"), pytest.raises(UsageError, match=r"nothing for 'other#0'.*layers\.7"):
            attend(kind, case)
        with pytest.raises(UsageError, match="nothing for 'call:0'"):
            attend(kind, case)


def test_rows_without_a_visible_key_need_no_record():
    case = make(keys=12)
    mask = torch.arange(12)[None] >= 4
    with record_selection() as sel:
        expected = attend("moba", case, key_mask=mask)
    with replay_selection(sel):
        assert torch.equal(attend("moba", case, key_mask=mask), expected)
    anchored = {"key_mask": mask, "block_origin": torch.tensor([0])}
    late = Selection()
    late.add("call:0", BLOCK, 0, 4, select("moba", case, BLOCK, TOPK, **anchored)[0, :, 4:])
    with replay_selection(late):
        assert not bool(attend("moba", case, **anchored)[:, :, :4].any())


def test_what_does_not_fit_is_refused():
    case = make("moba")
    with record_selection() as sel:
        attend("moba", case, topk=4)
    with replay_selection(sel), pytest.raises(UsageError, match="more than 2 blocks in a row"):
        attend("moba", case, topk=2)
    with replay_selection(sel), pytest.raises(UsageError, match=r"blocks of 8.*blocks of 4"):
        run("moba", case, 4, 4)
    with replay_selection(sel), pytest.raises(UsageError, match=r"is for 4 heads.*needs 2"):
        attend("msa", case, topk=4)


@every_kind
def test_backward_replays_what_the_forward_replayed(kind):
    case = make(kind)
    changed, options = other(kind, case)
    grads = []
    with record_selection() as sel:
        lists = select(kind, case, BLOCK, TOPK)
    for fused in (False, True):
        leaves = {n: x.clone().requires_grad_() for n, x in changed.items()}
        if fused:
            with replay_selection(sel):
                out = attend(kind, leaves, **options)
        else:
            qkv = (leaves[n] for n in ("q", "k", "v"))
            out = schemas.block_attention(*qkv, lists, block_size=BLOCK)[0]
        out.square().sum().backward()
        grads.append([leaves[n].grad for n in ("q", "k", "v")])
    for a, b in zip(*grads, strict=True):
        assert torch.equal(a, b)


@every_kind
def test_backward_records_nothing_and_counts_as_no_call(kind):
    case = {n: x.requires_grad_() for n, x in make(kind).items()}
    with record_selection() as sel:
        attend(kind, case).sum().backward()
        attend(kind, case).sum().backward()
    assert sel.sites() == ["call:0", "call:1"]


@every_kind
def test_backward_that_chooses_otherwise_than_the_forward_is_an_error(kind):
    """What a graph compiled outside of a replay would do when it runs inside one."""
    case = make(kind)
    changed, options = other(kind, case)
    with record_selection() as sel:
        attend(kind, case)
    with replay_selection(sel):
        out, lse = run(kind, changed, BLOCK, TOPK, **options)
    op = f"{'moba' if kind == 'moba' else 'msa'}_attention_backward"
    own = [changed[n] for n in (("q", "k", "v") if kind == "moba" else changed)]
    lay = [None] * 7 + ([options["block_means"]] if kind == "moba" else [])
    sizes = {"block_size": BLOCK, "topk": TOPK}
    if kind == "union":
        sizes["local"] = "union"
    with pytest.raises(RuntimeError, match="chose other blocks"):
        getattr(torch.ops.sparsify, op)(out, None, *own, out, lse, *lay, **sizes)


def test_checkpointing_under_record_and_replay():
    case = make("msa")
    flipped = dict(case, iq=-case["iq"])
    names = list(case)

    def recomputed(*tensors):
        with site(NAME):
            return attend("msa", dict(zip(names, tensors, strict=True)))

    def step(data):
        leaves = {n: x.clone().requires_grad_() for n, x in data.items()}
        tensors = [leaves[n] for n in names]
        out = torch.utils.checkpoint.checkpoint(recomputed, *tensors, use_reentrant=False)
        out.square().sum().backward()
        return out.detach(), leaves["k"].grad

    with record_selection() as sel:
        out, grad = step(case)
    assert sel.sites() == [NAME]
    with replay_selection(sel):
        again, grad_again = step(flipped)
    assert torch.equal(again, out)
    assert torch.equal(grad_again, grad)


def test_contexts_act_in_other_threads_and_nest():
    case = make("msa")
    results = []
    with record_selection() as outer:
        thread = threading.Thread(target=lambda: results.append(attend("msa", case)))
        thread.start()
        thread.join()
        with record_selection() as inner:
            attend("msa", case)
    assert outer.sites() == ["call:0", "call:1"]
    assert inner.sites() == ["call:0"]
    with replay_selection(outer), record_selection() as copy:
        attend("msa", dict(case, iq=-case["iq"]))
    assert torch.equal(copy.blocks("call:0"), outer.blocks("call:0"))


def test_an_error_inside_leaves_nothing_active():
    with pytest.raises(KeyError), record_selection() as sel:
        raise KeyError
    attend("moba", make())
    assert sel.sites() == []


def test_sites_nest_and_end():
    case = make()
    with record_selection() as sel:
        with site("a#0"):
            with site("b#0"):
                attend("moba", case)
            attend("moba", case)
        attend("moba", case)
    assert sel.sites() == ["b#0", "a#0", "call:0"]


def test_diff_counts_rows():
    case = make("msa")
    flipped = dict(case, iq=-case["iq"])
    with record_selection() as one, site(NAME):
        attend("msa", case)
    with record_selection() as two, site(NAME):
        attend("msa", cut(flipped, 0, 30))
        with site("b#0"):
            attend("msa", case)
    same = one.diff(one)[NAME]
    assert (same.differing, same.total, same.unmatched) == (0, 2 * KEYS, 0)
    diff = one.diff(two)
    lists = [select("msa", c, BLOCK, TOPK)[:, :, :30] for c in (case, flipped)]
    assert diff[NAME].differing == int((lists[0] != lists[1]).any(-1).sum()) > 0
    assert diff[NAME].total == 2 * 30
    assert diff[NAME].unmatched == 2 * 7
    assert diff["b#0"] == (0, 0, 2 * KEYS)


def test_save_and_load(tmp_path):
    case = make("union", batch=2)
    mask = torch.arange(KEYS) >= torch.tensor([[0], [9]])
    with record_selection() as sel:
        with site(NAME):
            attend("union", case, key_mask=mask)
        with site("b#1"):
            run("moba", case, 4, 2)
    path = tmp_path / "chosen.npz"
    sel.save(path)
    loaded = Selection.load(path)
    assert loaded.sites() == sel.sites()
    for name in sel.sites():
        assert torch.equal(loaded.blocks(name), sel.blocks(name))
        assert torch.equal(loaded.known(name), sel.known(name))
        assert loaded.block_size(name) == sel.block_size(name)
    assert [p.name for p in tmp_path.iterdir()] == ["chosen.npz"]
    with np.load(path, allow_pickle=False) as arrays:
        assert all(arrays[n].dtype.hasobject is False for n in arrays.files)
    with replay_selection(loaded), site(NAME):
        flipped = dict(case, iq=-case["iq"])
        expected = attend("union", case, key_mask=mask)
    with replay_selection(loaded), site(NAME):
        assert torch.equal(attend("union", flipped, key_mask=mask), expected)


def test_an_empty_selection_survives_a_file(tmp_path):
    Selection().save(tmp_path / "none.npz")
    assert Selection.load(tmp_path / "none.npz").sites() == []


@pytest.mark.parametrize("content", [b"", b"no archive", b"PK\x03\x04 broken"])
def test_damaged_files_are_refused(tmp_path, content):
    path = tmp_path / "bad.npz"
    path.write_bytes(content)
    with pytest.raises(ArtefactError, match="not a readable selection file"):
        Selection.load(path)


def test_pickled_and_foreign_files_are_refused(tmp_path):
    np.savez(tmp_path / "pickle.npz", format=np.array(1), sites=np.array([{}], dtype=object))
    np.savez(tmp_path / "foreign.npz", x=np.zeros(3))
    np.savez(tmp_path / "newer.npz", format=np.array(99))
    for path in tmp_path.iterdir():
        with pytest.raises(ArtefactError):
            Selection.load(path)
    with pytest.raises(UsageError, match="no selection file"):
        Selection.load(tmp_path / "missing.npz")


def test_a_failed_save_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "chosen.npz"
    Selection().save(path)
    before = path.read_bytes()
    monkeypatch.setattr(np, "savez_compressed", lambda *a, **k: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        Selection().save(path)
    assert path.read_bytes() == before
    assert len(list(tmp_path.iterdir())) == 1
