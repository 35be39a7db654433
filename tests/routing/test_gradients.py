"""Gradients of parameters, written in place before that of x goes on."""

from flax import traverse_util
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from deltajax.models.transformer import TransformerLM
from deltajax.routing.gradients import write_first
from tests.helpers import (
  random_params,
  random_tokens,
  tiny_config,
)

LAYERS, WIDTH = 3, 4


def random_arrays():
  rng = np.random.default_rng(0)
  return (
    {"w": rng.normal(size=(LAYERS, WIDTH, WIDTH)).astype(np.float32)},
    rng.normal(size=(LAYERS, WIDTH)).astype(np.float32),
    rng.normal(size=(2, WIDTH)).astype(np.float32),
  )


def layers(stacked, more, x, in_order):
  for i in range(LAYERS):
    params, bias = jax.tree.map(lambda x, i=i: x[i], (stacked, more))
    if in_order:
      params = jax.lax.stop_gradient(params)
      params, stacked, bias, x = write_first(params, stacked, i, bias, x)
    x = jnp.sin(x @ params["w"] + bias)
  return x.sum()


def test_the_gradient_is_the_same():
  expected, found = (
    jax.grad(layers, (0, 1, 2))(*random_arrays(), in_order)
    for in_order in (False, True)
  )
  for a, b in zip(
    jax.tree.leaves(expected), jax.tree.leaves(found), strict=True
  ):
    np.testing.assert_allclose(b, a, rtol=1e-5, atol=1e-6)


def barriers_in(jaxpr):
  """What waits for each other: lists of shapes."""
  for equation in jaxpr.eqns:
    if equation.primitive.name == "optimization_barrier":
      yield [variable.aval.shape for variable in equation.outvars]
    for parameter in jax.tree.leaves(equation.params):
      inner = getattr(parameter, "jaxpr", parameter)
      if hasattr(inner, "eqns"):
        yield from barriers_in(inner)


@pytest.mark.parametrize(
  "variant", ["standard", "attnres_block", "delta_block", "delta"]
)
def test_each_sublayer_of_a_model_writes_first(variant):
  """All of its stacks, before one vector of the state: no other is given.

  A second may be one whose gradient is always zero, and then is no longer.
  """
  config = tiny_config(
    variant, num_layers=3, dtype="float32", param_dtype="float32"
  )
  params, tokens = random_params(config), random_tokens(config)

  def loss(params):
    output = TransformerLM(config).apply({"params": params}, tokens)
    return output.logits_BxTxV.sum()

  mlp, attention = barriers_in(jax.make_jaxpr(jax.grad(loss))(params).jaxpr)
  shapes = mlp + attention
  vector = (*tokens.shape, config.width)
  assert mlp.count(vector) == attention.count(vector) == 1
  for path, stack in jax.tree_util.tree_leaves_with_path(params["layers"]):
    if "router" not in jax.tree_util.keystr(path):
      assert stack.shape in shapes


@pytest.mark.parametrize("frozen", ["attention/", "mlp_norm", "mlp_router"])
def test_what_is_frozen_does_not_change_the_other_gradients(frozen):
  config = tiny_config(
    "delta", num_layers=3, dtype="float32", param_dtype="float32"
  )
  params, tokens = random_params(config), random_tokens(config)
  flat = traverse_util.flatten_dict(params, sep="/")
  fixed = {path: x for path, x in flat.items() if f"/{frozen}" in path}
  trained = {path: x for path, x in flat.items() if path not in fixed}
  assert fixed
  assert trained

  def loss(trained, fixed):
    params = traverse_util.unflatten_dict(trained | fixed, sep="/")
    output = TransformerLM(config).apply({"params": params}, tokens)
    return jnp.sin(output.logits_BxTxV).sum()

  some = jax.jit(jax.grad(loss))(trained, fixed)
  every = jax.jit(jax.grad(loss))(flat, {})
  for path, gradient in some.items():
    np.testing.assert_allclose(
      gradient, every[path], rtol=1e-5, atol=1e-6, err_msg=path
    )
