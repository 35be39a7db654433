"""Constructed cases whose answers are known."""

import math

import jax.numpy as jnp
import numpy as np
import pytest

from deltajax.analysis import statistics

MASK = np.ones((1, 1), bool)
BINS = np.ones((1, 1, 1), bool)


def of_weights(*reads, columns=4, seen=None):
  """Sums of one layer, one head and one token with these reads."""
  weights = np.zeros((1, len(reads), 1, columns, 1, 1))
  for i, read in enumerate(reads):
    weights[0, i, 0, : len(read), 0, 0] = read
  seen = len(reads[0]) if seen is None else seen
  table = np.arange(columns)[None] < seen
  sums = statistics.weight_sums(jnp.array(weights), table, MASK, BINS)
  return {name: np.asarray(x) for name, x in sums.items()}


def test_uniform_reads_are_exactly_uniform():
  sums = of_weights([1 / 3, 1 / 3, 1 / 3])
  np.testing.assert_allclose(sums["weight"][0, 0, :3], 0, atol=1e-7)
  np.testing.assert_allclose(sums["largest"], 0, atol=1e-7)
  np.testing.assert_allclose(sums["entropy"], 0, atol=1e-6)
  np.testing.assert_allclose(sums["effective"], 3, rtol=1e-6)


def test_one_hot_reads_have_no_entropy_and_one_effective_source():
  sums = of_weights([0, 1, 0, 0])
  assert sums["largest"] == 1 - 1 / 4
  np.testing.assert_allclose(sums["entropy"], -math.log(4), rtol=1e-6)
  np.testing.assert_allclose(sums["effective"], 1, rtol=1e-6)
  np.testing.assert_allclose(
    sums["weight"][0, 0], [-0.25, 0.75, -0.25, -0.25], rtol=1e-6
  )


def test_sources_that_are_not_seen_do_not_count():
  sums = of_weights([0.5, 0.5], columns=9)
  np.testing.assert_allclose(sums["largest"], 0, atol=1e-7)
  np.testing.assert_allclose(sums["entropy"], 0, atol=1e-6)
  assert not sums["weight"][0, 0].any()


@pytest.mark.parametrize(
  ("one", "other", "expected"),
  [
    ([0.2, 0.3, 0.5], [0.2, 0.3, 0.5], 0),
    ([1, 0, 0], [0, 0.5, 0.5], math.log(2)),
    ([1, 0], [0, 1], math.log(2)),
    # M = (3/4, 1/4): (KL(1, 0 | M) + KL(1/2, 1/2 | M)) / 2
    (
      [1, 0],
      [0.5, 0.5],
      (math.log(4 / 3) + 0.5 * math.log(2 / 3) + 0.5 * math.log(2)) / 2,
    ),
  ],
)
def test_jensen_shannon(one, other, expected):
  sums = of_weights(one, other)
  np.testing.assert_allclose(sums["divergence"], expected, rtol=1e-6)
  if not expected:
    assert not sums["divergence"].any()


def test_positions_fall_into_bins_of_powers_of_two():
  edges = statistics.position_edges(9)
  assert edges.tolist() == [0, 1, 2, 4, 8]
  bins = np.asarray(statistics.in_bins(jnp.arange(9)[None], edges))[0]
  assert bins.sum() == 9
  assert bins.argmax(1).tolist() == [0, 1, 2, 2, 3, 3, 3, 3, 4]
  for length, last in ((1, 0), (2, 1), (8, 4), (9, 8)):
    assert statistics.position_edges(length)[-1] == last


def test_cosines_of_parallel_opposed_and_zero_vectors():
  x = np.array([[1.0, 2.0], [2.0, 4.0], [-1.0, -2.0], [-2.0, 1.0], [0, 0]])
  cosines = statistics.cosine_sums(jnp.array(x)[:, None, None], MASK)
  expected = np.zeros((5, 5))
  expected[:3, :3] = [[1, 1, -1], [1, 1, -1], [-1, -1, 1]]
  expected[3, 3] = 1
  np.testing.assert_allclose(cosines, expected, atol=1e-6)


def test_tokens_that_do_not_count():
  x = jnp.array([[[[3.0, 4.0], [np.nan, np.inf]]]])
  mask = np.array([[True, False]])
  np.testing.assert_allclose(statistics.norm_sums(x, mask), [5], rtol=1e-6)


@pytest.mark.parametrize(
  ("cosines", "expected"),
  [
    (np.eye(5), 5),
    (np.ones((5, 5)), 1),
    (np.kron(np.eye(2), np.ones((3, 3))), 2),
    (np.zeros((3, 3)), 0),
  ],
)
def test_effective_rank(cosines, expected):
  np.testing.assert_allclose(
    statistics.effective_rank(cosines), expected, rtol=1e-6
  )


def test_effective_rank_is_that_of_the_singular_values():
  rng = np.random.default_rng(0)
  x = rng.standard_normal((4, 50, 6)) + 2 * rng.standard_normal((50, 6))
  x /= np.linalg.norm(x, axis=-1, keepdims=True)
  singular = np.linalg.svd(x.reshape(4, -1), compute_uv=False)
  share = singular / singular.sum()
  expected = np.exp(-(share * np.log(share)).sum())
  cosines = np.einsum("std,utd->su", x, x) / 50
  np.testing.assert_allclose(statistics.effective_rank(cosines), expected)
