"""Who attends to a cache attends as if the texts were run whole."""

import jax.numpy as jnp
import numpy as np
import pytest

from deltajax.models import cache
from deltajax.models.attention import dot_product_attention
from deltajax.models.cache import LayerCache, Places
from tests.helpers import quick_jit, tiny_config


def test_slots_before_a_text_and_after_it_are_not_seen():
  places = Places.create(jnp.int32(3), jnp.array([0, 2]), 1, 6)
  np.testing.assert_array_equal(
    places.visible_BxTxS, [[[1, 1, 1, 1, 0, 0]], [[0, 0, 1, 1, 0, 0]]]
  )
  np.testing.assert_array_equal(places.positions_BxT, [[3], [1]])


@pytest.mark.parametrize("block", [1, 4, 128])
@pytest.mark.parametrize(
  ("new", "extent"), [(1, 11), (5, 11), (11, 11), (8, 13), (11, 16)]
)
def test_new_tokens_attend_as_in_the_whole_text(
  monkeypatch, block, new, extent
):
  monkeypatch.setattr(cache, "QUERY_BLOCK", block)
  config = tiny_config(dtype="float32")
  length, first = 11, (0, 4)
  rng = np.random.default_rng(0)
  query, key, value = (
    jnp.asarray(rng.standard_normal((2, length, heads, config.head_dim)), "f")
    for heads in (4, 2, 2)
  )
  written = LayerCache.create(config, 2, 16).write(key, value, jnp.int32(0))
  places = Places.create(jnp.int32(length - new), jnp.array(first), new, extent)
  mixed = quick_jit(LayerCache.attend)(
    written, query[:, -new:], places.visible_BxTxS
  )
  assert np.isfinite(mixed).all()
  for row, start in enumerate(first):
    expected = quick_jit(dot_product_attention)(
      *(x[row : row + 1, start:] for x in (query, key, value))
    )[0, -new:]
    np.testing.assert_allclose(
      mixed[row, -len(expected) :], expected, rtol=1e-5, atol=1e-5
    )
