import jax
import jax.numpy as jnp
import numpy as np
import pytest

from deltajax.checkpoints.arrays import assemble, contiguous, copy

SHAPES = [(), (3,), (65, 1), (1, 513), (64, 512), (130, 1025), (67, 3, 400)]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_copy_is_a_copy_whatever_the_strides(shape, dtype):
  x = np.random.default_rng(0).standard_normal(shape[::-1], np.float32).T
  expected = x.astype(jnp.dtype(dtype))
  for row_axes in range(1, max(len(shape), 2)):
    out = np.full(shape, np.nan, jnp.dtype(dtype))
    copy(out, x, row_axes)
    np.testing.assert_array_equal(out, expected)
  found = contiguous(x, dtype)
  assert found.flags.c_contiguous
  np.testing.assert_array_equal(found, expected)


def test_what_is_contiguous_is_not_copied():
  x = np.ones((3, 4), np.float32)
  assert contiguous(x, "float32") is x


@pytest.mark.parametrize("stacked", [True, False])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_parameter_is_its_layers(shape, stacked):
  layers = np.random.default_rng(0).standard_normal((3, *shape), np.float32)
  layers = layers if stacked else layers[:1]
  found = assemble(
    [lambda x=x: x for x in layers],
    layers.shape if stacked else shape,
    "bfloat16",
    stacked=stacked,
    sharding=jax.sharding.SingleDeviceSharding(jax.devices()[0]),
  )
  expected = layers if stacked else layers[0]
  np.testing.assert_array_equal(found, expected.astype(jnp.bfloat16))
