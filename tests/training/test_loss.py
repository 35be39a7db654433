import jax
import jax.numpy as jnp
import numpy as np
import pytest

from deltajax.training.loss import token_loss

B, T, D, V = 2, 11, 8, 37


def inputs(dtype=jnp.float32):
  keys = jax.random.split(jax.random.key(0), 4)
  hidden = jax.random.normal(keys[0], (B, T, D), dtype)
  head = jax.random.normal(keys[1], (D, V))
  targets = jax.random.randint(keys[2], (B, T), 0, V)
  mask = jax.random.bernoulli(keys[3], 0.6, (B, T))
  return hidden, head, targets, mask


def plain_loss(hidden, head, targets, mask):
  logits = hidden.astype(jnp.float32) @ head.astype(hidden.dtype)
  log_z = jax.nn.logsumexp(logits, -1)
  picked = jnp.take_along_axis(logits, targets[..., None], -1)[..., 0]
  return jnp.sum((log_z - picked) * mask), jnp.sum(log_z**2 * mask)


@pytest.mark.parametrize("tile_length", [None, 1, 3, 4, 10, 11, 50])
def test_equals_the_plain_loss_for_any_tile(tile_length):
  args = inputs()

  def tiled(hidden, head):
    sums = token_loss(hidden, head, *args[2:], tile_length=tile_length)
    return sums.loss + 0.1 * sums.z_loss, sums

  def plain(hidden, head):
    loss, z_loss = plain_loss(hidden, head, *args[2:])
    return loss + 0.1 * z_loss, (loss, z_loss)

  (_, sums), grads = jax.value_and_grad(tiled, (0, 1), has_aux=True)(*args[:2])
  (_, expected), expected_grads = jax.value_and_grad(
    plain, (0, 1), has_aux=True
  )(*args[:2])
  np.testing.assert_allclose((sums.loss, sums.z_loss), expected, rtol=1e-5)
  assert sums.tokens == args[3].sum()
  for grad, expected_grad in zip(grads, expected_grads, strict=True):
    np.testing.assert_allclose(grad, expected_grad, rtol=1e-4, atol=1e-5)


def test_masked_positions_have_no_gradient_and_no_say():
  hidden, head, targets, mask = inputs()

  def loss(hidden, targets):
    return token_loss(hidden, head, targets, mask, tile_length=3).loss

  grad = jax.grad(loss)(hidden, targets)
  assert not np.any(np.asarray(grad)[~np.asarray(mask)])
  assert np.all(np.any(np.asarray(grad)[np.asarray(mask)], axis=-1))
  other = jnp.where(mask, targets, (targets + 1) % V)
  assert loss(hidden, targets) == loss(hidden, other)


def test_bfloat16_inputs_give_float32_sums():
  args = inputs(jnp.bfloat16)
  sums = token_loss(*args, tile_length=4)
  assert sums.loss.dtype == jnp.float32
  np.testing.assert_allclose(sums.loss, plain_loss(*args)[0], rtol=2e-2)


def shapes_in(jaxpr):
  for equation in jaxpr.eqns:
    for variable in equation.outvars:
      yield variable.aval.shape
    for parameter in equation.params.values():
      inner = getattr(parameter, "jaxpr", parameter)
      if hasattr(inner, "eqns"):
        yield from shapes_in(inner)


def test_never_holds_the_logits_of_the_whole_batch():
  hidden, head, targets, mask = inputs()

  def count_largest(tile_length):
    jaxpr = jax.make_jaxpr(
      jax.grad(
        lambda h, w: (
          token_loss(h, w, targets, mask, tile_length=tile_length).loss
        ),
        (0, 1),
      )
    )(hidden, head)
    return max(np.prod(shape) for shape in shapes_in(jaxpr.jaxpr))

  assert count_largest(2) < B * T * V
  assert count_largest(T) >= B * T * V  # the check can see them


def test_fewer_tokens_than_a_tile_and_nothing_to_count():
  hidden, head, targets, mask = inputs()
  sums = token_loss(hidden, head, targets, jnp.zeros_like(mask))
  assert (sums.loss, sums.tokens) == (0, 0)
