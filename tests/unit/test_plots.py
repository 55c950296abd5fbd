"""Pictures of estimates: what they say, and how they are written."""

import sys
from dataclasses import replace

import pytest

from sparsify import plots
from sparsify.errors import MissingExtraError, UsageError
from sparsify.plots import CostCurves, CurvePoint, Range, draw_costs


def point(context, ratio=1.0, spread=2.0):
    dense = 1e-6 * context**2
    sparse = dense / ratio
    return CurvePoint(
        context,
        Range(dense, dense, dense),
        Range(sparse / spread, sparse, sparse * spread),
        Range(ratio / spread, ratio, ratio * spread),
        min(1.0, context / 1e6),
    )


CURVES = CostCurves(
    model="tiny-llama",
    gpu="H200-SXM-141GB",
    phase="prefill",
    batch=1,
    configuration="MoBA 128/8",
    points=[point(1 << n, ratio=2.0 ** (n - 14)) for n in range(10, 21)],
    crossover_tokens=20_000,
    full_tokens=None,
    asked_tokens=[32_768],
    layers=32,
    sparse_layers=32,
    range_means="shaded: the truth may be anywhere in it",
    source="from datasheets",
)


def texts(curves, folder):
    """Everything that is written in the picture."""
    path = folder / "out.svg"
    draw_costs(curves, path, force=True)
    return path.read_text()


def test_a_picture_says_what_it_shows(tmp_path):
    said = texts(CURVES, tmp_path)
    for part in (
        "tiny-llama on H200-SXM-141GB, prefill: dense attention against MoBA 128/8",
        "Attention of all 32 layers",
        "context (tokens; 1k = 1,024)",
        "end-to-end speed-up: dense time / sparse time (1 = no change)",
        "dense attention",
        "shaded: the truth may be anywhere in it",
        "from datasheets",
        "crossover at 20,000 tokens:",
        "2.00x",
        "share of the dense model",
        "128k",
        "1 s",
    ):
        assert part in said, part


@pytest.mark.parametrize(
    ("crossover", "part"),
    [
        (None, "no crossover: expected to be slower than dense"),
        (1 << 24, "no crossover: expected to be slower than dense"),
        (1, "expected to be faster than dense at every context shown"),
        (1 << 19, "crossover at 524,288 tokens"),
    ],
)
def test_what_is_said_of_the_crossover(tmp_path, crossover, part):
    assert part in texts(replace(CURVES, crossover_tokens=crossover), tmp_path)


def test_without_a_range_no_range_is_explained(tmp_path):
    points = [point(1 << n, spread=1.0) for n in range(10, 21)]
    assert CURVES.range_means not in texts(replace(CURVES, points=points), tmp_path)


@pytest.mark.parametrize("full", [None, 1 << 19])
def test_contexts_beyond_the_memory_are_marked(tmp_path, full):
    said = texts(replace(CURVES, full_tokens=full), tmp_path)
    assert ("exceed the GPU" in said) is (full is not None)


def test_lines_that_are_one_are_not_called_slower(tmp_path):
    alike = [point(1 << n, ratio=1.0, spread=1.0) for n in range(10, 21)]
    dense = replace(CURVES, points=alike, crossover_tokens=None, sparse_layers=0)
    said = texts(dense, tmp_path)
    assert "MoBA 128/8 keeps all attention dense here: both lines are one" in said
    assert "slower" not in said
    assert "slower" in texts(replace(dense, sparse_layers=1), tmp_path)


def test_the_legend_has_room_where_the_curve_is_high_at_its_start():
    def speedups(*ratios):
        return [Range(ratio, ratio, ratio) for ratio in ratios]

    flat, late, early = speedups(1, 1, 1), speedups(1, 1, 5), speedups(5, 2, 1)
    assert [plots._headroom(found) for found in (flat, late, early)] == [1.5, 1.25, 1.5]


def test_one_layer_and_batches_are_named(tmp_path):
    assert "all 32 layers, without" in texts(CURVES, tmp_path)
    assert "all 32 layers (29 of them sparse)," in texts(
        replace(CURVES, sparse_layers=29), tmp_path
    )
    said = texts(replace(CURVES, layers=1, sparse_layers=1, batch=8), tmp_path)
    assert "Attention of one layer" in said and "prefill, batch 8" in said


@pytest.mark.parametrize(("ending", "magic"), [(".png", b"\x89PNG"), (".PDF", b"%PDF")])
def test_kinds_of_files(tmp_path, ending, magic):
    path = tmp_path / "new" / f"out{ending}"
    draw_costs(CURVES, path)
    assert path.read_bytes().startswith(magic) and path.stat().st_size > 5000
    assert [p.name for p in path.parent.iterdir()] == [path.name]


@pytest.mark.parametrize("name", ["out.gif", "out", "png", "out.png.txt", ""])
def test_other_endings_are_refused(tmp_path, name):
    with pytest.raises(UsageError, match=r"must end in \.png, \.svg or \.pdf"):
        plots.check_plot(tmp_path / name if name else "")
    assert not list(tmp_path.iterdir())


def test_a_picture_in_the_way_is_kept(tmp_path):
    path = tmp_path / "out.png"
    path.write_text("mine")
    with pytest.raises(UsageError, match="--force"):
        draw_costs(CURVES, path)
    assert path.read_text() == "mine"
    draw_costs(CURVES, path, force=True)
    assert path.read_bytes().startswith(b"\x89PNG")


def test_a_fault_while_drawing_leaves_nothing(tmp_path, monkeypatch):
    from matplotlib.figure import Figure

    def stop(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(Figure, "savefig", stop)
    with pytest.raises(KeyboardInterrupt):
        draw_costs(CURVES, tmp_path / "out.png")
    assert not list(tmp_path.iterdir())


def test_without_matplotlib_the_command_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(MissingExtraError, match=r'pip install "sparsify-attention\[plot\]"'):
        plots.check_plot(tmp_path / "out.png")


@pytest.mark.parametrize(
    ("count", "text"), [(1024, "1k"), (1 << 20, "1m"), (3 << 19, "1536k"), (1000, "1,000")]
)
def test_contexts(count, text):
    assert plots.tokens(count) == text


@pytest.mark.parametrize(
    ("ms", "text"),
    [
        (1e12, "1,000,000,000 s"),
        (1e6, "1,000 s"),
        (1000, "1 s"),
        (10, "10 ms"),
        (0.1, "0.1 ms"),
        (0.01, "10 us"),
    ],
)
def test_durations(ms, text):
    assert plots.duration(ms) == text


@pytest.mark.parametrize(
    ("number", "text"), [(0.5, "0.50x"), (9.99, "9.99x"), (14.26, "14.3x"), (1642.08, "1,640x")]
)
def test_factors(number, text):
    assert plots.factor(number) == text


def test_many_octaves_have_labels_that_do_not_overlap(tmp_path):
    points = [point(1 << n) for n in range(31)]
    said = texts(replace(CURVES, points=points, asked_tokens=[1, 1 << 30]), tmp_path)
    assert ">1<" in said and ">8<" in said and ">1024m<" in said and ">512m<" not in said


def test_what_is_asked_for_at_an_end_is_said_inside_the_picture(tmp_path):
    from matplotlib.figure import Figure

    axes = Figure().subplots()
    first, last = CURVES.points[0].context_tokens, CURVES.points[-1].context_tokens
    plots._label_asked(axes, replace(CURVES, asked_tokens=[first, 1 << 15, last]))
    assert [text.get_ha() for text in axes.texts] == ["left", "center", "right"]
