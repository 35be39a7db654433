"""Reads as text."""

import dataclasses

from deltajax.analysis.report import AnalysedModel, report_page
from deltajax.analysis.table import routing_table
from tests.analysis.test_observe import packed_batch, run
from tests.helpers import random_params, tiny_config, zero_queries


def test_table_shows_maximum_beside_uniform():
  config = tiny_config("rd_delta_block", num_layers=2, num_blocks=2)
  params = zero_queries(random_params(config))
  lines = routing_table(run(config, params, packed_batch(config)).reads)
  lines = lines.splitlines()
  assert lines[0].split() == ["read", "sources", "max", "uniform", "favourite"]
  assert lines[1].startswith("layer 0 mlp ")
  assert lines[1].split()[3:6] == ["2", "0.500", "0.500"]
  assert lines[2].startswith("layer 1 attention Q/K ")
  assert len({line.index("0.") for line in lines[1:]}) == 1


def test_of_equal_weights_the_first_is_the_favourite_everywhere():
  config = tiny_config("delta_block", num_layers=2, num_blocks=2)
  analysis = run(config, random_params(config), packed_batch(config))
  read = dataclasses.replace(
    analysis.reads[-1], sources=["e", "b1", "b2+"], weight=[0.25, 0.375, 0.375]
  )
  assert read.favourite == "b1"
  assert routing_table([read]).endswith("  b1 (0.375)")
  tied = dataclasses.replace(analysis, reads=[read])
  page = report_page({}, [AnalysedModel("tied", "here", {}, tied)], [])
  assert "<td>b1 (0.375)</td>" in page
