import jax
import jax.numpy as jnp
import numpy as np
import pytest

from deltajax.checkpoints.checksums import check, ChecksumError, checksums


@pytest.mark.parametrize(
  "dtype", ["float64", "float32", "bfloat16", "int32", "int8"]
)
def test_any_bit_counts(dtype):
  with jax.enable_x64(dtype == "float64"):
    x = np.array(jnp.arange(24).reshape(2, 3, 4).astype(dtype))
    expected = checksums({"x": x, "y": x})
    raw = x.view(np.uint8).reshape(-1)
    for byte in range(len(raw)):
      changed = raw.copy()
      changed[byte] ^= 1 << byte % 8
      other = changed.view(x.dtype).reshape(x.shape)
      with pytest.raises(ChecksumError, match=r"1 of 2 .* \['y'\]"):
        check({"x": x, "y": other}, expected)
    check({"x": x, "y": x}, expected)


def test_places_count():
  x = np.arange(12, dtype=np.float32).reshape(3, 4)
  expected = checksums([x])
  for other in (x[::-1], x[:, ::-1], x[:, [1, 0, 2, 3]]):
    with pytest.raises(ChecksumError):
      check([other], expected)


def test_scalars_and_empty_arrays():
  tree = {"a": jnp.float32(1.5), "b": jnp.zeros((0, 3)), "c": jnp.int32(7)}
  assert len(checksums(tree)) == 3
  check(tree, checksums(tree))
