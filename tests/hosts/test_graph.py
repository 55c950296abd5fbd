"""The graph host: calls, state, phases, padding, documents; what it refuses and how it says so."""

import copy
import pickle

import pytest
import torch
from torch import nn
from transformers import DynamicCache

import sparsify as sp
from sparsify.errors import CaptureError, UsageError
from sparsify.kernels.selection import record_selection, replay_selection
from tests._util.planned import SIZE, TOPK, relative
from tests._util.tiny_models import CACHE, build, tokens

POLICY = sp.Policy.moba(block_size=SIZE, topk=TOPK)
FULL = sp.Policy.moba(block_size=SIZE, topk=10**6)


class Attention(nn.Module):
    """Causal attention over `[batch, length, 16]` with an option and a buffer that is not saved."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 16)
        self.register_buffer("gain", torch.tensor(2.0), persistent=False)

    def forward(self, x, shift=0.0, *, twice=False):
        q, k, v = (t.unflatten(-1, (2, 8)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        y = self.out(y.transpose(1, 2).flatten(2)) * self.gain + shift
        return {"y": y + y if twice else y, "x": x}


@pytest.fixture(scope="module")
def llama():
    model = build("llama")
    return model, sp.sparsify(model, POLICY, host="graph").model


@pytest.fixture(scope="module")
def full():
    model = build("llama")
    return model, sp.sparsify(model, FULL, host="graph").model


def hand_written(policy=POLICY, length=40):
    model = Attention().eval()
    return model, sp.sparsify(model, policy, (torch.randn(2, length, 16),)).model


@torch.no_grad()
def logits(model, ids, mask=None, **inputs):
    return model(ids, attention_mask=mask, **inputs).logits


# how it is called


def test_arguments_go_by_position_or_by_name_as_in_the_original():
    model, graph = hand_written(FULL)
    x = torch.randn(2, 40, 16)
    wanted = model(x)
    for found in (graph(x), graph(x=x), graph(x, 0.0), graph(x, shift=0.0, twice=False)):
        assert found.keys() == wanted.keys()
        assert relative(found["y"], wanted["y"]) < 1e-6 and torch.equal(found["x"], x)


@pytest.mark.parametrize(
    ("args", "kwargs", "said"),
    [
        ((), {}, "missing a required argument"),
        ((torch.randn(2, 4, 16),), {"shift": 1.0}, "does not take shift"),
        ((torch.randn(2, 4, 16),), {"other": 1}, "does not fit"),
        ((torch.randn(2, 4, 16, dtype=torch.float64),), {}, "float64"),
        ((torch.randn(4, 16),), {}, "2 axes"),
        ((torch.randn(2, 4, 15),), {}, "dim 2 of x is 15; the program was captured for 16"),
        (("text",), {}, "must be a tensor"),
    ],
)
def test_a_call_that_does_not_fit_is_refused_in_one_sentence(args, kwargs, said):
    _, graph = hand_written()
    with pytest.raises(UsageError, match=said) as error:
        graph(*args, **kwargs)
    assert "\n" not in str(error.value)


def test_options_are_fixed_at_what_was_captured():
    model = Attention().eval()
    x = torch.randn(2, 40, 16)
    graph = sp.sparsify(model, FULL, (x,), {"twice": True}).model
    assert relative(graph(x, twice=True)["y"], model(x, twice=True)["y"]) < 1e-6
    with pytest.raises(UsageError, match="twice is False; the program was captured with True"):
        graph(x, twice=False)


@pytest.mark.parametrize(("batch", "length"), [(1, 1), (1, 33), (3, 8), (5, 50)])
def test_batch_and_length_are_dynamic(full, batch, length):
    model, graph = full
    ids = tokens(batch, length)
    assert relative(logits(graph, ids), logits(model, ids)) < 1e-5


# state


def test_parameters_are_the_originals_under_their_names(llama):
    model, graph = llama
    assert list(graph.state_dict()) == list(model.state_dict())
    own = dict(graph.named_parameters(remove_duplicate=False))
    for name, parameter in model.named_parameters(remove_duplicate=False):
        assert own[name] is parameter


def test_tied_weights_stay_tied():
    model = build("llama", tie_word_embeddings=True)
    graph = sp.sparsify(model, POLICY, host="graph").model
    for twin in (graph, copy.deepcopy(graph), pickle.loads(pickle.dumps(graph))):
        assert twin.lm_head.weight is twin.model.embed_tokens.weight


def test_loading_a_state_dict_changes_the_outputs(llama):
    _, graph = llama
    graph, ids = copy.deepcopy(graph), tokens(1, 20)
    before = logits(graph, ids)
    other = build("llama", seed=1)
    graph.load_state_dict(other.state_dict())
    assert relative(logits(graph, ids), before) > 1e-2


def test_copies_and_pickles_compute_the_same_bits_on_weights_of_their_own(llama):
    _, graph = llama
    ids = tokens(2, 30)
    for twin in (copy.deepcopy(graph), pickle.loads(pickle.dumps(graph))):
        assert torch.equal(logits(twin, ids), logits(graph, ids))
        with torch.no_grad():
            twin.lm_head.weight.zero_()
        assert not torch.equal(logits(twin, ids), logits(graph, ids))


def test_buffers_that_are_not_saved_come_along():
    model, graph = hand_written(FULL)
    assert "gain" not in graph.state_dict() and "gain" in dict(graph.named_buffers())
    x = torch.randn(1, 12, 16)
    graph.gain.fill_(3.0)
    assert relative(graph(x)["y"], model(x)["y"]) < 1e-6  # shared with the original
    assert torch.equal(model.gain, torch.tensor(3.0))


def test_hooks_run(llama):
    _, graph = llama
    seen = []
    handle = graph.register_forward_hook(lambda *_: seen.append(1))
    logits(graph, tokens(1, 4))
    handle.remove()
    assert seen == [1]


def test_it_is_for_inference_and_says_so(llama):
    _, graph = llama
    assert not graph.training and not graph.eval().training
    with pytest.raises(UsageError, match="for inference"):
        graph.train()
    assert not graph(tokens(1, 4)).logits.requires_grad


def test_a_change_of_dtype_is_refused_and_changes_nothing(llama):
    model, graph = llama
    with pytest.raises(UsageError, match="dtype of an exported program is fixed"):
        graph.to(torch.bfloat16)
    assert {p.dtype for p in model.parameters()} == {torch.float32}


def test_it_moves_to_another_device_with_the_devices_in_its_graph(llama):
    _, graph = llama
    moved = copy.deepcopy(graph).to("meta")
    program = moved.sparsify_programs[0].exported
    devices = [node.kwargs.get("device") for node in program.graph.nodes]
    assert {d for d in devices if d is not None} == {torch.device("meta")}
    assert moved(tokens(1, 9).to("meta")).logits.device.type == "meta"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu_it_computes_what_it_does_on_the_processor(llama):
    _, graph = llama
    there, (ids, mask, _) = copy.deepcopy(graph).to("cuda"), padded((40, 17), 40, left=True)
    with record_selection() as chosen:
        here = logits(graph, ids, mask)
    with replay_selection(chosen):
        found = logits(there, ids.cuda(), mask.cuda()).cpu()
    real = mask.bool()
    assert relative(found[real], here[real]) < 1e-4
    step = there(ids[:, :30].cuda(), attention_mask=mask[:, :30].cuda())
    assert step[CACHE].get_seq_length() == 30 and step.logits.is_cuda


# padding, phases, documents


def padded(lengths, width, left):
    """Tokens, mask, and the slots of every sequence."""
    ids, mask, slots = tokens(len(lengths), width), torch.zeros(len(lengths), width).long(), []
    for row, n in enumerate(lengths):
        where = slice(width - n, width) if left else slice(0, n)
        mask[row, where] = 1
        slots.append(where)
    return ids, mask, slots


@pytest.mark.parametrize("left", [True, False])
def test_a_padded_batch_equals_each_sequence_alone(llama, left):
    _, graph = llama
    ids, mask, slots = padded((41, 17, 30, 1), 41, left)
    together = logits(graph, ids, mask)
    for row, where in enumerate(slots):
        with record_selection():
            alone = logits(graph, ids[row : row + 1, where])
        assert relative(together[row : row + 1, where], alone) < 1e-5


def test_hidden_tokens_in_the_middle_are_not_read(llama):
    _, graph = llama
    ids, mask = tokens(2, 40), torch.ones(2, 40).long()
    mask[0, 11:15] = 0
    other = ids.clone()
    other[0, 11:15] = 5
    real = mask.bool()
    assert torch.equal(logits(graph, ids, mask)[real], logits(graph, other, mask)[real])
    assert not torch.equal(logits(graph, ids)[real], logits(graph, other)[real])


@pytest.mark.parametrize("ends", [(40,), (17, 18, 40), (1, 2, 3, 39, 40)])
def test_chunks_over_a_cache_equal_the_whole_prompt(llama, ends):
    _, graph = llama
    ids, cache, parts, start = tokens(2, 40), DynamicCache(), [], 0
    with record_selection() as whole:
        wanted = logits(graph, ids)
    with replay_selection(whole):
        for end in ends:
            parts.append(logits(graph, ids[:, start:end], use_cache=True, **{CACHE: cache}))
            start = end
    assert cache.get_seq_length() == 40
    assert relative(torch.cat(parts, 1), wanted) < 1e-5


def test_a_padded_batch_decodes_as_each_sequence_alone(llama):
    _, graph = llama
    ids, mask, slots = padded((40, 23), 40, left=True)
    first = graph(ids[:, :-1], attention_mask=mask[:, :-1])
    together = logits(graph, ids[:, -1:], mask, **{CACHE: first[CACHE]})
    for row, where in enumerate(slots):
        alone = logits(graph, ids[row : row + 1, where])[:, -1:]
        assert relative(together[row : row + 1], alone) < 1e-5


def test_without_a_cache_in_the_call_the_result_can_be_without_one(llama):
    _, graph = llama
    assert graph(tokens(1, 5))[CACHE] is not None
    assert graph(tokens(1, 5), use_cache=False).get(CACHE) is None


def test_generating_text_is_left_to_the_other_host(llama):
    with pytest.raises(UsageError, match=r"no generate\(\)"):
        llama[1].generate(tokens(1, 6), max_new_tokens=3)


def test_positions_that_the_program_does_not_know_are_refused(llama):
    _, graph = llama
    with pytest.raises(UsageError, match="does not take position_ids"):
        logits(graph, tokens(1, 6), position_ids=torch.arange(6)[None])


@pytest.mark.parametrize("method", ["moba", "msa"])
def test_packed_documents_equal_each_document_alone(method):
    model = build("llama")
    lengths = (37, 1, 24)
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    ids = tokens(1, positions.shape[1])
    inputs = {"input_ids": ids, "position_ids": positions, "use_cache": False}
    policy = getattr(sp.Policy, method)(block_size=SIZE, topk=TOPK)
    graph = sp.sparsify(model, policy, kwargs=inputs, host="graph").model
    packed = graph(**inputs).logits
    other = sp.sparsify(model, policy, host="transformers").model
    start = 0
    for n in lengths:
        alone = logits(other, ids[:, start : start + n], use_cache=False)
        assert relative(packed[:, start : start + n], alone) < 1e-5
        start += n
    with torch.no_grad():
        assert relative(packed, other(ids, use_cache=False).logits) > 1e-2


# policies and refusals


def test_below_min_context_and_in_dense_decode_every_block_is_attended():
    model, ids = build("llama"), tokens(1, 40)
    policy = sp.Policy.moba(block_size=SIZE, topk=TOPK, min_context=30, decode="dense")
    graph = sp.sparsify(model, policy, host="graph").model
    assert relative(logits(graph, ids[:, :29]), logits(model, ids[:, :29])) < 1e-5
    assert relative(logits(graph, ids), logits(model, ids)) > 1e-3
    cache = DynamicCache()
    with torch.no_grad():
        model(ids[:, :39], use_cache=True, **{CACHE: cache})
    twin = copy.deepcopy(cache)
    step = logits(graph, ids[:, 39:], **{CACHE: cache})
    assert relative(step, logits(model, ids[:, 39:], **{CACHE: twin})) < 1e-5


def test_switched_off_every_block_is_attended(llama, monkeypatch):
    model, graph = llama
    ids = tokens(1, 40)
    assert relative(logits(graph, ids), logits(model, ids)) > 1e-3
    monkeypatch.setenv("SPARSIFY_DISABLE", "1")
    assert relative(logits(graph, ids), logits(model, ids)) < 1e-5


def test_layers_kept_dense_stay_what_they_were():
    model, ids = build("llama"), tokens(1, 40)
    policy = sp.Policy.moba(block_size=SIZE, topk=TOPK, dense_last=2)
    result = sp.sparsify(model, policy, host="graph")
    assert result.report.counts == {
        "detected": 3,
        "rewritten": 1,
        "kept_dense": 2,
        "refused": 0,
    }
    other = sp.sparsify(model, policy, host="transformers").model
    assert relative(logits(result.model, ids), logits(other, ids)) < 1e-5


def test_it_has_nothing_to_restore_and_nothing_in_place(llama):
    model = build("llama")
    with pytest.raises(UsageError, match="in place"):
        sp.sparsify(model, POLICY, host="graph", inplace=True)
    with pytest.raises(UsageError, match="nothing to restore"):
        sp.sparsify(model, POLICY, host="graph").restore()


def test_a_result_cannot_be_rewritten_again(llama):
    with pytest.raises(CaptureError, match="rewritten already"):
        sp.sparsify(llama[1], POLICY, host="graph")


def test_other_modules_need_example_inputs():
    with pytest.raises(UsageError, match="needs example inputs"):
        sp.sparsify(Attention().eval(), POLICY)
    with pytest.raises(CaptureError, match="not a transformers model"):
        sp.sparsify(Attention().eval(), POLICY, (torch.randn(2, 40, 16),), host="transformers")
