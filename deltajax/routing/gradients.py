"""When the gradients of parameters are made, and where they are written."""

from typing import Any, TypeVar

import jax
from jax import lax

_Params = TypeVar("_Params")
_More = TypeVar("_More")


@jax.custom_vjp
def write_first(
  params: _Params, stacked: _Params, index: Any, more: _More, x: jax.Array
) -> tuple[_Params, _Params, _More, jax.Array]:
  """The identity, before a part of a layer that turns x and parameters into y.

  Its gradient writes that of the parameters into that of their stack, in place,
  and lets that of x go on once this and that of `more` are there. What these
  are made of, a hidden activation of an MLP above all, is then free. Left to
  itself the compiler puts such products off: nothing waits for them.

  Args:
    params: what the stack holds at `index`.
    stacked: parameters of all layers, stacked on axis 0. Its values are not
      used; whoever takes parameters of the same layers next should be given
      the one that is returned, so that one gradient runs through all of them.
      None in place of a stack whose gradient nobody wants.
    index: which layer; may be traced.
    more: other arguments whose gradients come first.
    x: what the gradient goes on through. Give no array whose gradient is always
      zero: the compiler could no longer see that it is.

  Returns:
    All but the index, to go on with.
  """
  del index
  return params, stacked, more, x


def _forward(params, stacked, index, more, x):
  # Not by way of `write_first`: to a remat policy these are then arguments, not
  # results, and it does not save parameters.
  return (params, stacked, more, x), index


def _backward(index, cotangents):
  d_params, d_stacked, d_more, d_x = cotangents
  d_stacked = jax.tree.map(
    lambda stack, new: (
      None
      if stack is None
      else lax.dynamic_update_index_in_dim(stack, new, index, 0)
    ),
    d_stacked,
    d_params,
    is_leaf=lambda x: x is None,
  )
  d_stacked, d_more, d_x = lax.optimization_barrier((d_stacked, d_more, d_x))
  # The parameters' own gradient is in the stack.
  return None, d_stacked, None, d_more, d_x


write_first.defvjp(_forward, _backward)
