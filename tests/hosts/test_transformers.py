"""A plan applied to transformers models: masks, phases, caches, saving, undoing."""

import copy
import dataclasses
import pickle

import pytest
import torch
from transformers import AutoModelForCausalLM, DynamicCache

import sparsify as sp
from sparsify.errors import ArtefactError, CaptureError, StrictError
from sparsify.hosts import transformers as host
from sparsify.hosts.calls import observing
from sparsify.kernels.selection import record_selection, replay_selection
from sparsify.plans import Plan
from tests._util.planned import SIZE, TOPK, plan_for, relative, rewrite
from tests._util.tiny_models import CACHE, FAMILIES, build, tokens

METHODS = ("moba", "msa")


@torch.no_grad()
def logits(model, ids, mask=None, **kwargs):
    return model(ids, attention_mask=mask, use_cache=False, **kwargs).logits


def left_padded(lengths, width):
    ids, mask = tokens(len(lengths), width), torch.zeros(len(lengths), width, dtype=torch.long)
    for row, n in enumerate(lengths):
        mask[row, width - n :] = 1
    return ids * mask, mask


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("family", FAMILIES)
def test_at_top_k_all_the_logits_equal_the_originals(family, method):
    model = build(family)
    full = rewrite(model, method, topk=10**6)
    for length in (1, 7, 9, 40):
        ids = tokens(2, length)
        assert relative(logits(full, ids), logits(model, ids)) <= 1e-4


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("family", FAMILIES)
def test_with_few_blocks_only_the_rows_beyond_them_change(family, method):
    model, ids = build(family), tokens(1, 41)
    a, b = logits(rewrite(model, method), ids), logits(model, ids)
    border = SIZE * TOPK
    assert relative(a[:, :border], b[:, :border]) <= 1e-4
    assert relative(a[:, border:], b[:, border:]) > 1e-3


@pytest.mark.parametrize("method", METHODS)
def test_a_left_padded_batch_equals_each_sequence_alone(method):
    rewritten = rewrite(build("llama"), method)
    ids, mask = left_padded([40, 27, 9], 40)
    with record_selection() as chosen:
        batch = logits(rewritten, ids, mask)
    for row, n in enumerate([40, 27, 9]):
        alone = logits(rewritten, ids[row : row + 1, 40 - n :])
        assert relative(batch[row, 40 - n :], alone[0]) <= 1e-4
    assert chosen.sites()


@pytest.mark.parametrize("method", METHODS)
def test_a_right_padded_batch_equals_each_sequence_alone(method):
    rewritten = rewrite(build("llama"), method)
    ids, mask = tokens(3, 40), torch.ones(3, 40, dtype=torch.long)
    mask[1, 27:], mask[2, 9:] = 0, 0
    batch = logits(rewritten, ids, mask)
    for row, n in enumerate([40, 27, 9]):
        alone = logits(rewritten, ids[row : row + 1, :n])
        assert relative(batch[row, :n], alone[0]) <= 1e-4


def test_padding_that_is_not_passed_changes_the_answer():
    rewritten = rewrite(build("llama"))
    ids, mask = left_padded([40, 27], 40)
    real = mask.bool()
    assert relative(logits(rewritten, ids)[real], logits(rewritten, ids, mask)[real]) > 1e-3


def in_steps(model, ids, ends, mask=None):
    cache, parts, start = DynamicCache(config=model.config), [], 0
    for end in ends:
        seen = None if mask is None else mask[:, :end]
        with torch.no_grad():
            out = model(ids[:, start:end], attention_mask=seen, use_cache=True, **{CACHE: cache})
        parts.append(out.logits)
        start = end
    return torch.cat(parts, 1)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("ends", [[40], [13, 29, 40], [30, *range(31, 41)], [8, 16, 40]])
def test_chunks_and_decode_equal_the_whole_prefill_given_its_selection(family, method, ends):
    rewritten, ids = rewrite(build(family), method), tokens(2, 40)
    with record_selection() as whole:
        wanted = logits(rewritten, ids)
    with replay_selection(whole):
        assert relative(in_steps(rewritten, ids, ends), wanted) <= 1e-4
    with record_selection() as own:
        in_steps(rewritten, ids, ends)
    differing = {site: d[0] for site, d in whole.diff(own).items()}
    assert set(differing.values()) == {0}


@pytest.mark.parametrize("method", METHODS)
def test_decode_of_a_left_padded_batch_equals_its_whole_prefill(method):
    rewritten = rewrite(build("llama"), method)
    ids, mask = left_padded([40, 27], 40)
    with record_selection() as whole:
        wanted = logits(rewritten, ids, mask)
    with replay_selection(whole):
        got = in_steps(rewritten, ids, [30, *range(31, 41)], mask)
    real = mask.bool()
    assert relative(got[real], wanted[real]) <= 1e-4


def test_dense_decode_by_policy_attends_to_everything_one_token_at_a_time():
    model, ids = build("llama"), tokens(1, 40)
    mixed = rewrite(model, decode="dense")
    sparse = rewrite(model)
    last = in_steps(mixed, ids, [39, 40])[:, -1]
    assert relative(last, in_steps(sparse, ids, [39, 40])[:, -1]) > 1e-4
    seen = []
    with observing(lambda call: seen.append(call.q.shape[2])):
        in_steps(mixed, ids, [39, 40])
    assert set(seen) == {39}


def test_below_min_context_everything_is_dense():
    model = build("llama")
    rewritten = rewrite(model, min_context=30)
    short, long = tokens(1, 29), tokens(1, 30)
    assert torch.equal(logits(rewritten, short), logits(model, short))
    assert not torch.equal(logits(rewritten, long), logits(model, long))


def test_an_all_dense_plan_is_bit_equal_alone_and_padded():
    for family in FAMILIES:
        model = build(family)
        rewritten = rewrite(model, dense=range(3))
        ids, mask = left_padded([40, 27], 40)
        assert torch.equal(logits(rewritten, ids, mask), logits(model, ids, mask))
        assert torch.equal(logits(rewritten, ids[:1]), logits(model, ids[:1]))


def test_generation_with_all_blocks_gives_the_same_tokens():
    for family in FAMILIES:
        model = build(family)
        full = rewrite(model, topk=10**6)
        ids, mask = left_padded([40, 27], 40)
        options = dict(attention_mask=mask, max_new_tokens=20, do_sample=False)
        assert torch.equal(full.generate(ids, **options), model.generate(ids, **options))


def test_generation_with_few_blocks_uses_the_sparse_rule_in_decode():
    rewritten = rewrite(build("llama"))
    seen = []
    with observing(lambda call: seen.append(call.q.shape[2])):
        rewritten.generate(tokens(1, 40), max_new_tokens=4, do_sample=False)
    assert seen == [40] * 3 + [1] * 9


def test_block_means_come_from_the_cache_and_change_nothing(monkeypatch):
    rewritten, ids = rewrite(build("llama")), tokens(1, 40)
    with_cache = in_steps(rewritten, ids, [33, *range(34, 41)])
    monkeypatch.setattr("sparsify.hosts.attention._block_means", lambda *a: None)
    assert relative(with_cache, in_steps(rewritten, ids, [33, *range(34, 41)])) <= 1e-5


def test_the_weights_are_shared_and_the_original_is_untouched():
    model, ids = build("llama"), tokens(1, 40)
    before, keys = logits(model, ids), list(model.state_dict())
    rewritten = rewrite(model)
    assert list(rewritten.state_dict()) == keys
    shared = zip(model.parameters(), rewritten.parameters(), strict=True)
    assert all(a.data_ptr() == b.data_ptr() for a, b in shared)
    assert torch.equal(logits(model, ids), before)
    assert model.config._attn_implementation == "sdpa"
    assert not hasattr(model.config, "sparsify")


def test_two_models_with_two_plans_live_side_by_side():
    model, ids = build("llama"), tokens(1, 40)
    a, b = rewrite(model, "moba"), rewrite(model, "msa", topk=3)
    first = logits(a, ids)
    other = logits(b, ids)
    assert relative(first, other) > 1e-4
    assert torch.equal(logits(a, ids), first)


def test_restore_gives_the_original_back_bit_for_bit():
    model, ids = build("llama"), tokens(1, 40)
    before, config = logits(model, ids), model.config.to_dict()
    handle = host.apply(model, plan_for(model))
    assert not torch.equal(logits(model, ids), before)
    handle.restore()
    assert torch.equal(logits(model, ids), before)
    assert model.config.to_dict() == config
    assert not any("sparsify" in name for m in model.modules() for name in vars(m))
    assert not any(m._forward_pre_hooks for m in model.modules())


def test_a_second_plan_replaces_the_first():
    model, ids = build("llama"), tokens(1, 40)
    host.apply(model, plan_for(model, "moba"))
    host.apply(model, plan_for(model, "msa"))
    assert torch.equal(logits(model, ids), logits(rewrite(build("llama"), "msa"), ids))
    assert host.plan_of(model) == plan_for(model, "msa")


@pytest.mark.parametrize("twin", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_copies_keep_the_plan(twin):
    rewritten, ids = rewrite(build("llama")), tokens(1, 40)
    again = twin(rewritten)
    assert torch.equal(logits(again, ids), logits(rewritten, ids))
    in_steps(again, ids, [33, 40])


def test_restoring_a_copy_leaves_the_first_one_as_it_was():
    model, ids = build("llama"), tokens(1, 40)
    rewritten = rewrite(model)
    hooks = sum(len(m._forward_pre_hooks) for m in rewritten.modules())
    twin = copy.deepcopy(rewritten)
    host._strip(twin, "sdpa")
    assert torch.equal(logits(twin, ids), logits(model, ids))
    assert sum(len(m._forward_pre_hooks) for m in rewritten.modules()) == hooks == 3
    assert not torch.equal(logits(rewritten, ids), logits(model, ids))


def test_a_mask_tensor_from_outside_runs_dense_and_is_counted(monkeypatch):
    model, ids = build("llama"), tokens(1, 40)
    rewritten = rewrite(model)
    mask = torch.ones(1, 1, 40, 40, dtype=torch.bool).tril(2)
    assert torch.equal(logits(rewritten, ids, mask), logits(model, ids, mask))
    assert "a mask tensor from outside" in host.fallbacks(rewritten).values()
    monkeypatch.setenv("SPARSIFY_STRICT", "1")
    with pytest.raises(StrictError, match="mask tensor"):
        logits(rewritten, ids, mask)


def test_a_fallback_is_told_once_per_module_and_reason(caplog):
    rewritten, ids = rewrite(build("llama")), tokens(1, 40)
    mask = torch.ones(1, 1, 40, 40, dtype=torch.bool).tril(2)
    logits(rewritten, ids, mask)
    logits(rewritten, ids, mask)
    told = [r.getMessage() for r in caplog.records]
    assert len(told) == 3
    assert all("mask tensor from outside" in text for text in told)


def test_a_static_cache_counts_the_keys_in_use_not_the_room():
    model, ids = build("llama"), tokens(1, 20)
    rewritten = rewrite(model, min_context=30)
    options = dict(max_new_tokens=5, do_sample=False, cache_implementation="static")
    assert torch.equal(rewritten.generate(ids, **options), model.generate(ids, **options))
    assert all("sparse" not in counts for counts in host.call_counts(rewritten).values())


@pytest.mark.parametrize("method", METHODS)
def test_a_static_cache_chooses_as_a_growing_one(method):
    rewritten = rewrite(build("llama"), method)
    ids, mask = left_padded([40, 27], 40)
    options = dict(attention_mask=mask, max_new_tokens=12, do_sample=False)
    with record_selection() as growing:
        wanted = rewritten.generate(ids, **options)
    with record_selection() as static:
        got = rewritten.generate(ids, cache_implementation="static", **options)
    assert torch.equal(got, wanted)
    assert not host.fallbacks(rewritten)
    for site, chosen in growing.diff(static).items():
        assert (chosen.differing, chosen.unmatched) == (0, 0), site


def test_disabling_by_environment_runs_dense(monkeypatch):
    model, ids = build("llama"), tokens(1, 40)
    rewritten = rewrite(model)
    monkeypatch.setenv("SPARSIFY_DISABLE", "1")
    assert torch.equal(logits(rewritten, ids), logits(model, ids))


def test_training_reaches_the_weights_through_the_sparse_op():
    model = build("llama").train()
    rewritten, ids = rewrite(model), tokens(2, 40)
    rewritten.gradient_checkpointing_enable()
    rewritten(ids, labels=ids).loss.backward()
    grads = {n: p.grad for n, p in rewritten.named_parameters() if "q_proj" in n}
    assert all(g is not None and g.isfinite().all() and g.abs().max() > 0 for g in grads.values())


def test_active_dropout_runs_dense():
    model = build("llama", attention_dropout=0.1).train()
    rewritten = rewrite(model)
    rewritten.train()
    rewritten(tokens(1, 40))
    assert "dropout is active" in host.fallbacks(rewritten).values()
    rewritten.eval()
    before = host.call_counts(rewritten)
    rewritten(tokens(1, 40))
    after = host.call_counts(rewritten)
    assert all(after[name]["sparse"] == before[name].get("sparse", 0) + 1 for name in after)


def test_save_pretrained_carries_the_plan_and_plain_from_pretrained_attaches_it(tmp_path):
    rewritten, ids = rewrite(build("llama"), dense=[2]), tokens(1, 40)
    rewritten.save_pretrained(tmp_path / "m")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "m")
    assert host.plan_of(again) == host.plan_of(rewritten)
    assert torch.equal(logits(again, ids), logits(rewritten, ids))
    again.save_pretrained(tmp_path / "n")
    third = AutoModelForCausalLM.from_pretrained(tmp_path / "n")
    assert torch.equal(logits(third, ids), logits(rewritten, ids))


def test_asking_for_another_attention_at_load_time_gives_the_dense_model(tmp_path):
    model, ids = build("llama"), tokens(1, 40)
    rewrite(model).save_pretrained(tmp_path)
    dense = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="sdpa")
    assert torch.equal(logits(dense, ids), logits(model, ids))


def test_a_plan_for_another_model_is_rejected_and_leaves_the_model_alone():
    model = build("llama")
    with pytest.raises(ArtefactError, match="another model"):
        host.apply(model, plan_for(build("gpt2")))
    assert model.config._attn_implementation == "sdpa"


def test_two_attention_calls_in_one_module_are_refused():
    model = build("llama")
    plan = plan_for(model)
    twice = dataclasses.replace(plan.layers[0], ordinal=1)
    with pytest.raises(CaptureError, match="2 times"):
        host.apply(model, Plan((*plan.layers, twice)))


def test_an_eager_model_stays_eager_where_it_is_dense():
    model, ids = build("llama"), tokens(1, 40)
    model.set_attn_implementation("eager")
    rewritten = rewrite(model, dense=range(3))
    assert torch.equal(logits(rewritten, ids), logits(model, ids))
    handle = host.apply(model, plan_for(model))
    handle.restore()
    assert model.config._attn_implementation == "eager"


def test_public_record_and_replay_are_those_of_the_ops():
    assert sp.record_selection is record_selection
    assert sp.replay_selection is replay_selection
