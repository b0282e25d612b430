"""The pictures of the strategies' ideas."""

import pytest

from labkit import LabError, plot_paths
from labkit.pipelines import STRATEGIES


def test_every_strategy_has_a_picture_with_words_for_all_that_is_in_it():
    figure = plot_paths(*STRATEGIES)
    for name, axes in zip(STRATEGIES, figure.axes, strict=True):
        assert name in axes.get_title(loc="left")
        assert f"in {name}:" in figure.get_label()
        for text in axes.texts:
            assert " ".join(text.get_text().split()) in figure.get_label()


def test_no_words_are_wider_than_their_box(tmp_path):
    figure = plot_paths(*STRATEGIES)
    figure.savefig(tmp_path / "paths.png")
    for axes in figure.axes:
        boxes = [patch.get_window_extent() for patch in axes.patches]
        for text in axes.texts:
            place = text.get_window_extent()
            middle = (place.x0 + place.x1) / 2, (place.y0 + place.y1) / 2
            box = next((box for box in boxes if box.contains(*middle)), None)
            assert box is None or box.x0 <= place.x0 <= place.x1 <= box.x1, text.get_text()


def test_an_unknown_strategy_gives_one_line():
    with pytest.raises(LabError, match="no picture of 'best': choose sequential"):
        plot_paths("best")
