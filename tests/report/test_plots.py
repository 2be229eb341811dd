"""What pictures show and how they are told apart; needs matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from colorsys import rgb_to_hsv
from itertools import combinations, pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("matplotlib", reason="the report needs matplotlib (extra lab)")

from matplotlib.colors import to_rgb
from matplotlib.figure import Figure

from mismatch_plugin.report.curves import CURVES, GUIDE
from mismatch_plugin.report.data import read_run_folder
from mismatch_plugin.report.mechanism import mechanism
from mismatch_plugin.report.plots import DASHES, MARKERS, PALETTE, Plotter, label_ends, spread, windows
from tests.report.synthetic import ENDS, write_comparison, write_run


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_comparison(tmp_path_factory.mktemp("plots"), check=False)


@given(st.lists(st.tuples(st.floats(0, 1), st.floats(0.02, 0.1)), max_size=9))
def test_labels_do_not_overlap_and_keep_their_order(labels: list[tuple[float, float]]):
    wanted, heights = [w for w, _ in labels], [h for _, h in labels]
    placed = spread(wanted, heights)
    order = sorted(range(len(labels)), key=lambda i: wanted[i])
    for low, high in pairwise(order):
        assert placed[high] - placed[low] >= 0.5 * (heights[low] + heights[high]) - 1e-9
    if labels:  # moved as a group around its mean: the means are those wanted
        assert np.mean(placed) == pytest.approx(np.mean(wanted))


@pytest.mark.parametrize(
    ("wanted", "placed"), [([0.1, 0.5], [0.1, 0.5]), ([0.5, 0.5], [0.45, 0.55]), ([0.9, 0.1, 0.1], [0.9, 0.05, 0.15])]
)
def test_labels_move_only_where_they_must(wanted: Sequence[float], placed: Sequence[float]):
    assert spread(wanted, [0.1] * len(wanted)) == pytest.approx(placed)


def test_a_name_is_at_the_end_of_its_line():
    axis = Figure().subplots()
    lines = [axis.plot([0, 1], [0, end], label=name)[0] for name, end in (("low", 0.2), ("high", 1.0))]
    axis.set_ylim(0, 1)
    label_ends(axis, lines)
    heights = {text.get_text(): text.get_position()[1] for text in axis.texts}
    assert heights == {"low": pytest.approx(0.2), "high": pytest.approx(1.0)}


def lightness(colour: str) -> float:
    """Relative luminance to CIE L*."""
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in to_rgb(colour)]
    y = float(np.dot(linear, (0.2126, 0.7152, 0.0722)))
    return 116 * y ** (1 / 3) - 16 if y > 0.008856 else 903.3 * y


def test_variants_are_told_apart_in_colour_and_in_grey():
    """One blue alone; where two are alike in lightness, the dashes differ, and markers always do."""
    hues = [rgb_to_hsv(*to_rgb(colour)) for colour in PALETTE]
    assert sum(0.5 < hue < 0.7 and saturation > 0.2 for hue, saturation, _ in hues) == 1
    styles = [(DASHES[i % len(DASHES)], MARKERS[i % len(MARKERS)]) for i in range(len(PALETTE))]
    for i, j in combinations(range(len(PALETTE)), 2):
        assert styles[i][0] != styles[j][0] or abs(lightness(PALETTE[i]) - lightness(PALETTE[j])) > 40
        assert styles[i][1] != styles[j][1]


def test_windows_keep_a_spike_where_the_largest_is_asked_for():
    values = np.ones((1, 400))
    values[0, 203] = 500.0
    steps, means = windows(np.arange(400.0), values)
    assert len(steps) == 40 and means.max() == pytest.approx(50.9)
    assert windows(np.arange(400.0), values, "max")[1].max() == 500.0
    assert windows(np.arange(3.0), values[:, :3])[1].tolist() == [[1, 1, 1]]


def test_panels_of_zeros_are_not_drawn_and_known(root: Path):
    folder = read_run_folder(root)
    control, stale = Plotter(folder, "control"), Plotter(folder, "stale32")
    of = {panel.name: panel for panel in (*CURVES, *GUIDE)}
    for plotter in (control, stale):  # nothing is ever rejected or vetoed
        for name in ("rejection", "guide_veto"):
            assert plotter.panel(of[name]) is None and plotter.all_zero(of[name])
    assert not stale.all_zero(of["kl"]) and not control.all_zero(of["kl"])  # bypass measures against π_θ
    assert control.all_zero(of["impossible_tokens"]) and not stale.all_zero(of["impossible_tokens"])


def test_quantiles_are_drawn_where_the_engines_are_apart(root: Path, tmp_path: Path):
    assert Plotter(read_run_folder(root), "stale32").quantiles() is not None
    write_run(tmp_path, "control", "0", 100, ratio=1.0)
    assert Plotter(read_run_folder(tmp_path), "control").quantiles() is None


def test_the_first_picture_has_the_single_seeds_of_algorithm_0(root: Path):
    plotter = Plotter(read_run_folder(root), "stale32")
    axis = Figure().subplots()
    drawn = plotter.draw(axis, of_exact(), seeds_of="0")
    assert set(drawn) == set(ENDS["stale32"])
    assert len(axis.lines) == len(drawn) + 12
    picture = plotter.outcome("exact", seeds_of="0")
    assert picture is not None and picture.caption == (
        "Exact match on held-out prompts against optimizer steps, mean over seeds; the thin lines are the single seeds "
        "of 0 PPO."
    )


def of_exact():
    from mismatch_plugin.report.curves import Part

    return Part("held_out_exact", "exact match", span=(0.0, 1.0))


def test_mechanism_says_what_its_pictures_show(root: Path):
    norm, kl, impossible = mechanism(read_run_folder(root), "stale32")
    assert norm.sentence == (
        "Largest gradient norm of a run, median over seeds. Algorithm 0: 300, the highest. 0 dual clip: 5, 1 bypass "
        "PPO: 5, 2 sequence truncate: 5, 2 IcePop: 5, 2 token truncate: 2."
    )
    assert "Algorithm 0: 0.50, the lowest." in kl.sentence
    assert (
        "Algorithm 0: 9.0 %, the highest." in impossible.sentence and "2 token truncate: 2.2 %." in impossible.sentence
    )
    assert mechanism(read_run_folder(root), "no such setting") == []
