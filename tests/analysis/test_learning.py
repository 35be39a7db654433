"""Loss curves, chosen pictures, and totals side by side."""

import pytest

from deltajax.analysis import figures, learning, style
from deltajax.analysis.table import totals_table
from deltajax.config import ConfigError
from tests.analysis.test_observe import packed_batch, run
from tests.helpers import random_params, tiny_config

PNG = b"\x89PNG\r\n\x1a\n"
RUN = [
  {"step": 0, "validation/loss": 5.0},
  {"step": 1, "train/loss": 4.0},
  {"step": 2, "train/loss": 3.0, "train/lr": 0.1},
  {"step": 3, "train/loss": float("nan")},
  {"step": 2, "validation/loss": 3.5},
]


@pytest.fixture(scope="module")
def analyses():
  found = {}
  for variant in ("rd_delta_block", "standard"):
    config = tiny_config(variant, num_layers=2)
    found[variant] = run(
      config, random_params(config), packed_batch(config), gradients=False
    )
  return found


def test_losses_are_drawn_where_they_are():
  drawing = learning.draw_losses({"one": RUN, "two": RUN[1:4]})
  assert drawing.png.startswith(PNG)
  figure = learning._losses({"one": RUN, "two": RUN[1:4]})
  lines = [line.get_xydata().tolist() for line in figure.axes[0].get_lines()]
  assert lines == [
    [[1, 4], [2, 3]],
    [[0, 5], [2, 3.5]],
    [[1, 4], [2, 3]],
  ]
  (legend,) = figure.legends
  labels = [x.get_text() for x in legend.get_texts()]
  assert labels == ["one: 3.500", "two"]


@pytest.mark.parametrize("looks", [("color", "marker"), ("color", "linestyle")])
def test_many_models_are_told_apart(looks):
  """By markers where dashes mean something else, and the other way round."""
  for colours in (style.RUN_COLOURS, style.RUN_COLOURS[:6]):
    styles = [style.series_style(i, colours) for i in range(24)]
    assert len({tuple(x[name] for name in looks) for x in styles}) == 24


def test_losses_of_many_runs_are_told_apart():
  figure = learning._losses({f"run {i}": RUN for i in range(15)})
  lines = figure.axes[0].get_lines()
  for kind in (lines[::2], lines[1::2]):
    looks = {(x.get_color(), x.get_linestyle(), x.get_marker()) for x in kind}
    assert len(looks) == 15
  (legend,) = figure.legends
  assert len(legend.get_texts()) == 15


def test_a_run_without_a_loss_is_named():
  with pytest.raises(ConfigError, match="two has no loss yet"):
    learning.draw_losses({"one": RUN, "two": [{"step": 1}]})


def test_a_notebook_shows_a_drawing():
  drawing = learning.draw_losses({"one": RUN})
  png, shown = drawing._repr_png_()
  assert png == drawing.png
  inches, _ = learning._losses({"one": RUN}).get_size_inches()
  assert abs(shown["width"] - 100 * inches) < 2


def test_pictures_are_chosen_by_kind(analyses):
  drawn = figures.draw(analyses, ["divergence", "weights"])
  assert [x.kind for x in drawn] == ["weights", "divergence"]
  with pytest.raises(ConfigError, match="did you mean 'weights'"):
    figures.draw(analyses, ["weight"])


def test_totals_stand_beside_uniform_ones(analyses):
  head, routed, standard = totals_table(analyses).splitlines()
  totals = analyses["rd_delta_block"].totals
  assert routed.split()[:5] == [
    "rd_delta_block",
    f"{analyses['rd_delta_block'].loss:.4f}",
    str(totals.reads),
    f"{totals.max_weight:.3f}",
    f"{totals.uniform_weight:.3f}",
  ]
  assert head.split()[:5] == ["model", "loss", "reads", "max", "uniform"]
  assert standard.split() == ["standard", f"{analyses['standard'].loss:.4f}"]
