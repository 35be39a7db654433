"""The files that an analysis leaves: whole, and of one piece."""

import base64
import dataclasses
from html.parser import HTMLParser
import importlib.util
import io
import json
import math
import pathlib
import re

from matplotlib.image import imread
import numpy as np
import pytest

from deltajax.analysis import curves, figures, maps, report, results
from deltajax.analysis.style import Scales
from deltajax.config import ConfigError, to_dict
from tests.analysis.test_observe import packed_batch, run
from tests.helpers import documented_fields, random_params, tiny_config

DOCS = pathlib.Path(__file__).parents[2] / "docs" / "analysis.md"
PNG = b"\x89PNG\r\n\x1a\n"
DATA = {"dataset": "here", "fingerprint": "0" * 64}


@pytest.fixture(scope="module")
def models():
  """Models with names that files and HTML cannot hold as they are."""
  found = []
  for name, variant in (
    ("a/b & <script>", "rd_delta_block"),
    ("a/b", "attnres_block"),
    ("plain", "standard"),
  ):
    config = tiny_config(variant, num_layers=2, num_blocks=2)
    analysis = run(
      config, random_params(config), packed_batch(config), gradients=True
    )
    found.append(
      report.AnalysedModel(name, "somewhere", to_dict(config), analysis)
    )
  return found


@pytest.fixture(scope="module")
def drawings(models):
  return figures.draw({model.name: model.analysis for model in models})


@pytest.fixture
def written(models, drawings, tmp_path):
  report.write_report(tmp_path / "out", DATA, models, drawings)
  return tmp_path / "out"


class Page(HTMLParser):
  """What a page refers to, and its text."""

  def __init__(self, text):
    super().__init__()
    self.references, self.tags, self.words = [], [], []
    self.feed(text)

  def handle_starttag(self, tag, attrs):
    self.tags.append(tag)
    names = ("src", "href", "srcset", "data", "action", "poster")
    self.references += [value for name, value in attrs if name in names]

  def handle_data(self, data):
    self.words.append(data)


def test_every_kind_is_drawn_where_there_is_something_to_draw(drawings):
  kinds = [(drawing.kind, drawing.model) for drawing in drawings]
  routed = ["a/b & <script>", "a/b"]
  for kind in ("weights", "sharpness", "position"):
    assert [name for k, name in kinds if k == kind] == routed
  similar = [name for k, name in kinds if k == "similarity"]
  assert similar == [*routed, "plain"]
  assert [name for k, name in kinds if k == "divergence"] == [None]
  assert [name for k, name in kinds if k == "norms"] == [None]
  names = [drawing.name for drawing in drawings]
  assert len(set(names)) == len(names)
  assert all(re.fullmatch(r"[\w.-]+\.png", name) for name in names)
  for drawing in drawings:
    # Decoded whole: the reader checks the sums of all chunks.
    picture = imread(io.BytesIO(drawing.png), format="png")
    height, width, _ = picture.shape
    assert min(height, width) > 200, drawing.name


def test_the_report_holds_everything_and_refers_to_nothing(written, drawings):
  text = (written / "report.html").read_text(encoding="utf-8")
  page = Page(text)
  inside = "data:image/png;base64,"
  assert len(page.references) == len(drawings)
  assert all(reference.startswith(inside) for reference in page.references)
  pictures = {
    base64.b64decode(reference.removeprefix(inside), validate=True)
    for reference in page.references
  }
  assert pictures == {drawing.png for drawing in drawings}
  assert not {"script", "link", "iframe"} & set(page.tags)
  assert "url(" not in text
  assert "@import" not in text
  assert not re.search(r"https?://", text)
  words = " ".join(page.words)
  assert "a/b & <script>" in words
  assert "no weights to analyse" in words
  files = {path.name: path.read_bytes() for path in written.glob("figures/*")}
  assert files == {drawing.name: drawing.png for drawing in drawings}


def documented(of):
  return documented_fields(DOCS, "routing.json", of)


@pytest.mark.parametrize(
  ("of", "cls"),
  [
    ("`analysis`:", results.Analysis),
    ("`totals`, means", results.Totals),
    ("One of `reads`:", results.ReadStatistics),
    ("One of `divergences`:", results.Divergence),
    ("One of `similarities`:", results.Similarity),
    ("`norms`:", results.Norms),
  ],
)
def test_the_schema_is_what_the_docs_say(of, cls):
  assert documented(of) == [field.name for field in dataclasses.fields(cls)]


def test_json_is_strict_and_holds_what_was_found(written, models):
  text = (written / "routing.json").read_text()

  def refuse(constant):
    raise AssertionError(constant)

  values = json.loads(text, parse_constant=refuse)
  assert list(values) == documented("Version 2.")
  assert values["schema"] == "deltajax.routing"
  assert values["version"] == results.VERSION
  assert f"| `version` | {results.VERSION} |" in DOCS.read_text()
  assert values["data"] == DATA
  for found, model in zip(values["models"], models, strict=True):
    assert set(found) == {"name", "source", "config", "analysis"}
    assert found == json.loads(json.dumps(dataclasses.asdict(model)))
  standard = values["models"][-1]["analysis"]
  assert standard["totals"] is None
  assert standard["reads"] == []
  assert len(standard["norms"]["stream_rms"]) == 5


def test_an_analysis_is_replaced_and_nothing_else(written, models, drawings):
  (written / "figures" / "old.png").write_bytes(PNG)
  report.write_report(written, DATA, models[:1], drawings[:1])
  assert [path.name for path in written.glob("figures/*")] == [drawings[0].name]
  (written / "notes.txt").write_text("mine")
  with pytest.raises(ConfigError, match=r"'notes\.txt', which is no part of"):
    report.check_output(written)


def test_a_directory_of_others_is_refused(tmp_path):
  (tmp_path / "report.html").write_text("mine")
  with pytest.raises(ConfigError, match=r"holds 'report\.html'"):
    report.check_output(tmp_path)
  (tmp_path / "routing.json").write_text('{"schema": "other"}')
  with pytest.raises(ConfigError, match="which is no part of an analysis"):
    report.check_output(tmp_path)
  with pytest.raises(ConfigError, match="is a file"):
    report.check_output(tmp_path / "report.html")
  with pytest.raises(ConfigError, match=r"cannot be written: .*report\.html"):
    report.check_output(tmp_path / "report.html" / "out")


def test_nothing_is_left_behind_by_a_failure(models, drawings, tmp_path):
  broken = dataclasses.replace(drawings[0], png=None)
  with pytest.raises(TypeError):
    report.write_report(tmp_path / "out", DATA, models, [broken])
  assert not list(tmp_path.iterdir())


def test_a_name_for_each_source_that_is_seen(models):
  reads = models[0].analysis.reads
  assert maps.source_columns(reads) == ["e", "b1", "b2"]
  config = tiny_config("delta_replace", num_layers=2)
  found = run(config, random_params(config), packed_batch(config))
  columns = maps.source_columns(found.reads)
  assert columns == ["v0", "v1", "v2", "stream"]


def test_curves_lie_where_the_numbers_are(models):
  analysis = models[0].analysis
  scales = Scales.of([analysis])
  figure = curves.sharpness("name", analysis, scales)
  top, bottom = figure.axes
  reads = [read for read in analysis.reads if len(read.sources) > 1]
  for axes, field, uniform in (
    (top, "max_weight", "uniform_weight"),
    (bottom, "entropy", "uniform_entropy"),
  ):
    line, *others = axes.get_lines()
    assert line.get_linestyle() == "--"
    np.testing.assert_allclose(
      line.get_ydata(), [getattr(read, uniform) for read in reads]
    )
    drawn = sorted(y for other in others for y in other.get_ydata())
    np.testing.assert_allclose(
      drawn, sorted(getattr(read, field) for read in reads)
    )
    low, high = axes.get_ylim()
    assert low <= min(drawn)
    assert max(drawn) <= high
  assert "nats" in bottom.get_ylabel()
  named = {model.name: model.analysis for model in models}
  for figure in (curves.divergence(named), curves.norms(named)):
    for axes in figure.axes:
      assert axes.get_xlabel()
      assert axes.get_ylabel()


def test_curves_of_many_models_are_told_apart(models):
  many = {f"model {i}": models[0].analysis for i in range(15)}
  for figure in (curves.norms(many), curves.divergence(many)):
    lines = figure.axes[0].get_lines()[:15]
    looks = {(x.get_color(), x.get_linestyle(), x.get_marker()) for x in lines}
    assert len(looks) == 15


def test_maps_show_the_weights(models):
  analysis = models[0].analysis
  figure = maps.weights("name", analysis, Scales.of([analysis]))
  left, right = figure.axes[:2]
  for row, read in enumerate(analysis.reads):
    shown = left.images[0].get_array()[row]
    ratio = right.images[0].get_array()[row]
    assert shown.count() == len(read.sources)
    np.testing.assert_allclose(shown.compressed(), read.weight)
    expected = np.log2(np.array(read.weight) / read.uniform_weight)
    np.testing.assert_allclose(ratio.compressed(), expected)
  labels = [label.get_text() for label in left.get_yticklabels()]
  assert labels[0] == "0 MLP"
  assert labels[1] == "1 attn Q/K"


def test_without_matplotlib_the_extra_is_named(monkeypatch):
  find_spec = importlib.util.find_spec
  monkeypatch.setattr(
    importlib.util,
    "find_spec",
    lambda name: None if name == "matplotlib" else find_spec(name),
  )
  with pytest.raises(ConfigError, match=r"'.\[analysis\]'"):
    figures.check_matplotlib()


def test_scales_of_models_without_a_read(models):
  scales = Scales.of([models[-1].analysis])
  assert scales.weight == 1
  assert not math.isnan(scales.entropy)
