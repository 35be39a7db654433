"""A scan over depth whose gradient keeps one copy of the depth memory.

A plain scan that carries the memory saves the whole carry at every layer for
the backward pass, so that memory grows with the square of depth. But slots are
appended and never changed: every earlier state of the memory is a prefix of the
last one. Here the forward scan saves one vector per token before each layer and
whatever the remat policy lets it save of the inside of a layer. The backward
scan runs each layer's gradient at the final memory, of which the layer sees its
prefix, and carries one gradient of the memory.

The vector is the stream; what a block has added so far is then a difference of
streams. Where sublayers do not read the stream (AttnRes), it is what the block
has added so far. What the policies save for each layer besides [B, T, D]:

  none  everything that the layer's gradient needs, except the memory.
  dots  results of matrix products with parameters that it needs (Q, K, V, the
        attention output, and two of the MLP's three); the rest is computed
        again.
  full  nothing; the whole layer is computed again.

Shapes: L layers, B batch, T sequence, D width, S slots.
"""

from collections.abc import Callable, Mapping
import dataclasses
from functools import partial
import types
from typing import Any

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np

from deltajax.routing.memory import DepthMemory, DepthState
from deltajax.routing.schedule import Schedule, Step

_policies = jax.checkpoint_policies
# What a layer may save of its inside, by `ModelConfig.remat`.
REMAT_POLICIES: Mapping[str, Callable[..., Any]] = types.MappingProxyType(
  {
    "none": _policies.everything_saveable,
    "dots": _policies.dots_with_no_batch_dims_saveable,
    "full": _policies.nothing_saveable,
  }
)

# (params of one layer, state before it, its two rows of the schedule, consts)
# -> state after it.
Layer = Callable[[Any, DepthState, Step, Any], DepthState]


@dataclasses.dataclass(frozen=True)
class _Plan:
  """What is static about a scan.

  Attributes:
    layer: the layer.
    first_layers: [L], the first layer of the block that is open before each
      layer; the layer itself where a block starts.
    reads_stream: as in `Schedule`.
    policy: of `jax.checkpoint`.
  """

  layer: Layer
  first_layers: tuple[int, ...]
  reads_stream: bool
  policy: Callable[..., Any]


def depth_scan(
  layer: Layer,
  params: Any,
  state: DepthState,
  schedule: Schedule,
  consts: Any,
  remat: str,
) -> DepthState:
  """Applies all layers; returns the state after the last.

  Args:
    layer: applies one layer; a pure function.
    params: parameters of all layers, stacked on axis 0.
    state: the state before the first layer.
    schedule: of the model.
    consts: what every layer is given besides: arrays without a gradient.
    remat: a name of `REMAT_POLICIES`.
  """
  steps = jax.tree.map(jnp.asarray, schedule.by_layer())
  plan = _Plan(
    layer=layer,
    first_layers=_first_layers(schedule),
    reads_stream=schedule.reads_stream,
    policy=REMAT_POLICIES[remat],
  )
  return _scan(plan, params, state, steps, lax.stop_gradient(consts))


def _first_layers(schedule: Schedule) -> tuple[int, ...]:
  """The layer at whose start the open block began, before each layer."""
  closed_before = np.roll(schedule.by_layer().closes[:, 1], 1)
  layers = np.arange(len(closed_before))
  starts = np.where(closed_before, layers, 0)
  return tuple(np.maximum.accumulate(starts).tolist())


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _scan(plan, params, state, steps, consts):
  def body(state, xs):
    params_l, steps_l = xs
    return plan.layer(params_l, state, steps_l, consts), None

  return lax.scan(body, state, (params, steps))[0]


def _forward(plan, params, state, steps, consts):
  def body(state, xs):
    params_l, steps_l = xs

    @partial(jax.checkpoint, policy=plan.policy, prevent_cse=False)
    def layer(params_l, state, consts):
      return plan.layer(params_l, state, steps_l, consts)

    gradient: Any
    new_state, gradient = jax.vjp(layer, params_l, state, consts)
    # The arguments are given back in the backward pass; what is left of the
    # gradient is what the policy saved.
    gradient.args_res = []
    saved = state.stream_BxTxD if plan.reads_stream else state.running_BxTxD
    return new_state, (saved, gradient)

  final, (saved_LxBxTxD, gradients) = lax.scan(body, state, (params, steps))
  memory = final.memory.slots_SxBxTxD
  return final, (params, memory, saved_LxBxTxD, gradients, consts)


def _backward(plan, residuals, d_final):
  params, memory_SxBxTxD, saved_LxBxTxD, gradients, consts = residuals

  def body(d_state, xs):
    params_l, saved_BxTxD, gradient, first_layer = xs
    running_BxTxD = saved_BxTxD
    if plan.reads_stream:
      running_BxTxD = saved_BxTxD - saved_LxBxTxD[first_layer]
    state = DepthState(
      memory=DepthMemory(memory_SxBxTxD),
      stream_BxTxD=saved_BxTxD,
      running_BxTxD=running_BxTxD,
    )
    gradient.args_res = [params_l, state, consts]
    d_params_l, d_state, _ = gradient(d_state)
    return d_state, d_params_l

  first_layers = jnp.array(plan.first_layers)
  d_state, d_params = lax.scan(
    body,
    d_final,
    (params, saved_LxBxTxD, gradients, first_layers),
    reverse=True,
  )
  return d_params, d_state, None, None


_scan.defvjp(_forward, _backward)
