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
