"""Names and rows that stand for many layers."""

from sparsify.cli.grouping import collapse, group


def test_collapse():
    layers = [f"model.layers.{i}.self_attn" for i in (3, 0, 1, 2, 5)]
    assert collapse(layers) == "model.layers.{0..3,5}.self_attn"
    assert collapse(["a.b"]) == "a.b"
    assert collapse(["h.10", "h.2"]) == "h.{2,10}"


def rows(names, facts=lambda _: None):
    return [(name, len(members)) for name, members in group(names, str, facts)]


def test_equal_layers_share_a_row():
    names = [f"m.{i}.attn" for i in range(4)] + ["head.attn"]
    assert rows(names) == [("m.{0..3}.attn", 4), ("head.attn", 1)]


def test_different_facts_and_paths_do_not():
    names = [f"m.{i}.attn" for i in range(4)]
    assert rows(names, lambda name: int(name[2]) % 2) == [("m.{0,2}.attn", 2), ("m.{1,3}.attn", 2)]
    assert rows(["m.0.a", "m.0.b", "m.1.a"]) == [("m.{0..1}.a", 2), ("m.0.b", 1)]
    assert rows(["s.0.b.0.a", "s.0.b.1.a", "s.1.b.0.a"]) == [
        ("s.{0..1}.b.0.a", 2),
        ("s.0.b.1.a", 1),
    ]


def test_ordinals_and_words_with_digits_stay_apart():
    assert rows(["m.0#1", "m.1#1", "m.1"]) == [("m.{0..1}#1", 2), ("m.1", 1)]
    assert rows(["layer1.attn", "layer2.attn"]) == [("layer1.attn", 1), ("layer2.attn", 1)]
    assert rows(["", "(root)"]) == [("", 1), ("(root)", 1)]
