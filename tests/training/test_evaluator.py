"""What one host finds in the rows of an evaluation, all are told."""

from unittest import mock

import numpy as np
import pytest

from deltajax.training import evaluator as module
from deltajax.training.evaluator import Evaluator
from deltajax.training.run_data import digest_of_rows


@pytest.mark.parametrize("problem", [OSError, KeyError, RuntimeError])
def test_whatever_keeps_the_test_split_from_being_read(monkeypatch, problem):
  """On other hosts it is one and the same error: none may leave alone."""
  lines = []
  monkeypatch.setattr(module.hosts, "rows_of_host", mock.Mock())
  trainer = mock.MagicMock()
  trainer.config.training.eval_routing = False
  evaluator = Evaluator(trainer, mock.MagicMock(), mock.Mock(), lines.append)
  monkeypatch.setattr(module, "find_mixture", mock.Mock(side_effect=problem(7)))
  assert evaluator.test({}) == {}
  (line,) = lines
  assert line.startswith("WARNING   the test split cannot be used: ")


def test_rows_that_differ_have_another_digest():
  rows = {"tokens": np.arange(6), "segment_ids": np.ones(6)}
  other = rows | {"tokens": np.arange(6) % 5}
  assert digest_of_rows([rows]) == digest_of_rows([dict(rows)])
  assert digest_of_rows([rows]) != digest_of_rows([other])
  assert digest_of_rows([rows]) != digest_of_rows([rows, rows])
