"""One update, and one validation batch, as pure functions to be jitted.

Shapes: B batch, T sequence, A micro-batches of an update.
"""

from collections.abc import Mapping
import functools
from typing import Any

from flax import linen as nn
import flax.struct
import jax
import jax.numpy as jnp
import optax

from deltajax.config import RunConfig
from deltajax.data.packing import Batch as Batch, target_mask
from deltajax.models.transformer import (
  join_routing,
  output_head,
  split_routing,
  TransformerLM,
)
from deltajax.routing.sharding import Sharding, use_sharding
from deltajax.training.health import choose, Health, judge
from deltajax.training.loss import LossSums, token_loss
from deltajax.training.mesh import make_sharding, placed_shapes
from deltajax.training.optimizer import (
  learning_rate_schedule,
  make_optimizer,
  routing_rates,
)


@flax.struct.dataclass
class TrainState:
  """Everything that an update changes.

  Attributes:
    step: int32, completed updates, those that were skipped among them.
    params: unboxed parameters, float32.
    opt_state: of the optimizer, for the parameters that learn.
    health: which updates were skipped.
  """

  step: jax.Array
  params: Any
  opt_state: Any
  health: Health


def batch_loss(
  model: TransformerLM, variables: Mapping[str, Any], batch: Batch
) -> LossSums:
  """Sums of the next-token loss over a batch of packed rows.

  Args:
    model: is run on all tokens but the last.
    variables: its unboxed parameters, and whatever else it is given.
    batch: the rows.
  """
  inputs = {name: x[:, :-1] for name, x in batch.items()}
  hidden_BxTxD: Any = model.apply(
    variables,
    inputs["tokens"],
    segment_ids=inputs["segment_ids"],
    positions=inputs["positions"],
    method="hidden",
  )
  return token_loss(
    hidden_BxTxD,
    output_head(model.config, variables["params"]),
    batch["tokens"][:, 1:],
    target_mask(batch["segment_ids"]),
  )


class Trainer:
  """The functions of a run, built once from its config.

  Attributes:
    config: of the run.
    sharding: the mesh that everything is compiled for, with its rules.
    model: its model.
  """

  def __init__(self, config: RunConfig, sharding: Sharding | None = None):
    self.config = config
    self.sharding = sharding or make_sharding(config)
    self.model = TransformerLM(config.model)
    steps = config.training.steps
    self._optimizer = make_optimizer(config.optimizer, steps)
    self._learning_rate = learning_rate_schedule(config.optimizer, steps)

  def init(self) -> TrainState:
    """The state before the first update.

    The same seed gives the same values to every parameter that two variants
    share.
    """
    return self.start(nn.meta.unbox(self._boxed_params()))

  def start(self, params: Any) -> TrainState:
    """The state before the first update of parameters that are given."""
    learned, _ = self._split(params)
    return TrainState(
      step=jnp.int32(0),
      params=params,
      opt_state=self._optimizer.init(learned),
      health=Health.new(),
    )

  def abstract_state(self) -> TrainState:
    """Shapes, dtypes and shardings of the state; nothing is computed."""
    return self._abstract_state

  @functools.cached_property
  def _abstract_state(self) -> TrainState:
    state = jax.eval_shape(self.init)
    boxed = jax.eval_shape(self._boxed_params)
    return placed_shapes(self.sharding, boxed, state)

  def compiled_init(self) -> TrainState:
    """`init`, run where the state lies: no device ever holds all of it."""
    return jax.jit(self.init, out_shardings=self._shardings())()

  def compiled_start(self, params: Any) -> TrainState:
    """`start`, run where the state lies; the parameters are given up."""
    return jax.jit(
      self.start, donate_argnums=0, out_shardings=self._shardings()
    )(params)

  def jit_update(self) -> Any:
    """`update`, jitted; the old state is given up."""
    return jax.jit(
      self.update, donate_argnums=0, out_shardings=(self._shardings(), None)
    )

  def loss(self, params: Any, batch: Batch) -> LossSums:
    """Sums of the next-token loss over a batch of packed rows."""
    with use_sharding(self.sharding):
      return batch_loss(self.model, {"params": params}, batch)

  def update(
    self, state: TrainState, batch: Batch
  ) -> tuple[TrainState, dict[str, jax.Array]]:
    """One update; returns the new state and metrics.

    An update that `judge` rejects changes nothing but counts: not the
    parameters, the moments or the place in the learning rate's schedule.

    Micro-batches are scanned inside the step. Each adds its sum of losses
    over the number of tokens of the whole batch, so that their gradients add
    up to those of one big batch, however unequal their counts.
    """
    training = self.config.training
    learned, fixed = self._split(state.params)
    num_tokens = jnp.sum(target_mask(batch["segment_ids"]))
    denominator = jnp.maximum(num_tokens, 1)

    def objective(learned, micro_batch):
      sums = self.loss(join_routing(fixed, learned), micro_batch)
      total = sums.loss + training.z_loss * sums.z_loss
      return total / denominator, sums

    def add_micro_batch(carry, micro_batch):
      gradient, sums = carry
      new, new_sums = jax.grad(objective, has_aux=True)(learned, micro_batch)
      gradient = jax.tree.map(jnp.add, gradient, new)
      return (gradient, sums + new_sums), None

    # Micro-batch i has rows i, i + count, ...: of every device's rows its part.
    count = training.accumulation
    micro_batches = {
      name: x.reshape(-1, count, *x.shape[1:]).swapaxes(0, 1)
      for name, x in batch.items()
    }
    zero = jax.tree.map(jnp.zeros_like, learned)
    zero_loss = jnp.zeros(
      (), jnp.promote_types(self.config.model.dtype, jnp.float32)
    )
    no_loss = LossSums(zero_loss, zero_loss, jnp.int32(0))
    (gradient, sums), _ = jax.lax.scan(
      add_micro_batch, (zero, no_loss), micro_batches
    )
    updates, opt_state = self._optimizer.update(
      gradient, state.opt_state, learned
    )
    loss, norm = sums.loss / denominator, optax.tree.norm(gradient)
    good, health = judge(self.config.health, state.health, loss, norm)
    learned, opt_state = choose(
      good,
      (optax.apply_updates(learned, updates), opt_state),
      (learned, state.opt_state),
    )
    rate = self._learning_rate(state.health.made)
    metrics = {
      "train/loss": loss,
      "train/z_loss": sums.z_loss / denominator,
      "train/grad_norm": norm,
      "train/learning_rate": rate,
      "train/tokens": sums.tokens,
      "train/skipped": health.skipped,
      "train/skipped_in_a_row": health.in_a_row,
    }
    _, routing_gradient = split_routing(gradient)
    if routing_gradient:
      metrics["train/routing_grad_norm"] = optax.tree.norm(routing_gradient)
      for name, relative in routing_rates(self.config.optimizer).items():
        metrics[f"train/{name}_learning_rate"] = relative * rate
    new_state = TrainState(
      step=state.step + 1,
      params=join_routing(fixed, learned),
      opt_state=opt_state,
      health=health,
    )
    return new_state, metrics

  def _split(self, params: Any) -> tuple[Any, Any]:
    """Parameters that learn, and those that stay, as two trees."""
    if self.config.freeze == "none":
      return params, {}
    base, routing = split_routing(params)
    return routing, base

  def _shardings(self) -> Any:
    return jax.tree.map(lambda x: x.sharding, self.abstract_state())

  def _boxed_params(self) -> Any:
    key = jax.random.key(self.config.training.seed)
    return self.model.init(key, jnp.zeros((1, 1), jnp.int32))["params"]
