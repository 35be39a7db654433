"""Runs a model on a batch and sums up what it did, on any mesh.

Shapes: L layers, R reads, H heads, N sources, B batch, T sequence, D width, S
stacked vectors, U roles, P bins of positions.
"""

from collections.abc import Iterable
from typing import Any, NamedTuple

from flax import linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from deltajax.analysis import statistics
from deltajax.analysis.reads import model_reads
from deltajax.analysis.weights import routing_weights, running_sources
from deltajax.config import ModelConfig
from deltajax.data.packing import target_mask
from deltajax.models.transformer import (
  OBSERVED,
  output_head,
  partitionable,
  PROBES,
  TransformerLM,
)
from deltajax.routing.schedule import build_schedule
from deltajax.routing.sharding import constrain, Sharding, use_sharding
from deltajax.training import hosts
from deltajax.training.loss import token_loss
from deltajax.training.mesh import place_own_rows
from deltajax.training.step import Batch, batch_loss

Sums = dict[str, Any]
SUBLAYERS = ("attention", "mlp")


class Observed(NamedTuple):
  """What a model did with a batch.

  Attributes:
    embedded_BxTxD: the token embedding.
    outputs_SxBxTxD: what its sublayers put out, [2L].
    streams_SxBxTxD: the stream before each of them, and after the last.
    slots_SxBxTxD: the final memory.
    hidden_BxTxD: the input of the output head.
    input_rms_LxUxBxT: of what attention and MLP read, for each role.
    weights_LxRxHxNxBxT: of each router that reads; `reads.model_reads` tells
      which columns are which sources.
  """

  embedded_BxTxD: jax.Array
  outputs_SxBxTxD: jax.Array
  streams_SxBxTxD: jax.Array
  slots_SxBxTxD: jax.Array
  hidden_BxTxD: jax.Array
  input_rms_LxUxBxT: dict[str, jax.Array]
  weights_LxRxHxNxBxT: dict[str, jax.Array]


class Observer:
  """What is summed up of a batch, compiled once.

  Attributes:
    config: of the model, as it is run.
    edges_P: first positions of the bins of positions.
    position_bins: first and last position of each.
  """

  def __init__(
    self,
    config: ModelConfig,
    sequence_length: int,
    sharding: Sharding | None = None,
    gradients: bool = True,
  ):
    """Compiles nothing yet.

    Args:
      config: of the model.
      sequence_length: T.
      sharding: of a mesh; None for arrays as they lie.
      gradients: whether to take them, which costs two more passes.
    """
    self.config = partitionable(config)
    self.edges_P = statistics.position_edges(sequence_length)
    ends = [*self.edges_P[1:].tolist(), sequence_length]
    self.position_bins = [
      [start, end - 1]
      for start, end in zip(self.edges_P.tolist(), ends, strict=True)
    ]
    self._model = TransformerLM(self.config)
    self._sharding = sharding
    self._seen = _seen_columns(config)
    self._observe = jax.jit(self._in_mesh(self.observe))
    self._gradients = jax.jit(self._in_mesh(self.gradient_sums))
    self._takes_gradients = gradients

  def total(self, params: Any, batches: Iterable[Batch]) -> Sums:
    """Sums over batches, in float64 on the host; one batch at a time.

    Args:
      params: of the model, unboxed.
      batches: tokens, segment_ids and positions, each int32 [B, T + 1].
    """
    total: Sums | None = None
    for batch in batches:
      if self._sharding is not None:
        batch = place_own_rows(self._sharding, batch)
      sums = self._observe(params, batch)
      if self._takes_gradients:
        sums["gradient_norm"] = self._gradients(params, batch)
      sums = jax.tree.map(lambda x: hosts.fetch(x).astype(np.float64), sums)
      total = sums if total is None else jax.tree.map(np.add, total, sums)
    assert total is not None
    return total

  def run(self, params: Any, batch: Batch) -> Observed:
    """Runs the model on the inputs of a batch; nothing is summed up.

    Args:
      params: of the model, unboxed.
      batch: tokens, segment_ids and positions, each [B, T + 1].
    """
    inputs = {name: x[:, :-1] for name, x in batch.items()}
    run: Any = nn.apply(_run, self._model, mutable=[OBSERVED])
    (embedded_BxTxD, state, hidden_BxTxD), found = run(
      {"params": params}, **inputs
    )
    observed = found[OBSERVED]["layers"]
    outputs_SxBxTxD = _alternate(observed, "output")
    streams_SxBxTxD = _streams(embedded_BxTxD, outputs_SxBxTxD)
    slots_SxBxTxD = state.memory.slots_SxBxTxD
    return Observed(
      embedded_BxTxD=embedded_BxTxD,
      outputs_SxBxTxD=outputs_SxBxTxD,
      streams_SxBxTxD=streams_SxBxTxD,
      slots_SxBxTxD=slots_SxBxTxD,
      hidden_BxTxD=hidden_BxTxD,
      input_rms_LxUxBxT={
        name: observed[f"{name}_input_rms"] for name in SUBLAYERS
      },
      weights_LxRxHxNxBxT=routing_weights(
        self._model,
        params,
        slots_SxBxTxD,
        running_sources(self._model, outputs_SxBxTxD, streams_SxBxTxD),
        self._seen,
      ),
    )

  def observe(self, params: Any, batch: Batch) -> Sums:
    """Sums of one batch; see `total`."""
    mask_BxT = batch["segment_ids"][:, :-1] != 0
    positions_BxT = batch["positions"][:, :-1]
    bins_BxTxP = statistics.in_bins(positions_BxT, self.edges_P)
    found = self.run(params, batch)
    loss = token_loss(
      found.hidden_BxTxD,
      output_head(self.config, params),
      batch["tokens"][:, 1:],
      target_mask(batch["segment_ids"]),
    )
    return {
      "tokens": mask_BxT.sum(),
      "tokens_by_position": (bins_BxTxP & mask_BxT[..., None]).sum((0, 1)),
      "targets": loss.tokens,
      "loss": loss.loss,
      "reads": {
        name: statistics.weight_sums(x, self._seen[name], mask_BxT, bins_BxTxP)
        for name, x in found.weights_LxRxHxNxBxT.items()
      },
      "cosines": {
        name: statistics.cosine_sums(x, mask_BxT)
        for name, x in self._families(found).items()
      },
      "stream_rms": statistics.rms_sums(found.streams_SxBxTxD, mask_BxT),
      "output_rms": statistics.rms_sums(found.outputs_SxBxTxD, mask_BxT),
      "input_rms": {
        name: statistics.token_sums(x_LxUxBxT, mask_BxT)
        for name, x_LxUxBxT in found.input_rms_LxUxBxT.items()
      },
    }

  def gradient_sums(self, params: Any, batch: Batch) -> jax.Array:
    """Sums over tokens of the norms of what the loss asks of each sublayer.

    The gradient, by what a sublayer put out, of the sum of all token losses;
    what follows a token in its document counts too.

    Returns:
      [2L], in nats for each unit of the output.
    """
    config = self.config
    inputs = {name: x[:, :-1] for name, x in batch.items()}
    zeros_LxBxTxD = constrain(
      jnp.zeros(
        (config.num_layers, *inputs["tokens"].shape, config.width), config.dtype
      ),
      *("layers", "batch", "sequence", "features"),
    )

    def total_loss(probes):
      variables = {"params": params, PROBES: {"layers": probes}}
      return batch_loss(self._model, variables, batch).loss

    gradients = jax.grad(total_loss)(dict.fromkeys(SUBLAYERS, zeros_LxBxTxD))
    mask_BxT = inputs["segment_ids"] != 0
    norms = [statistics.norm_sums(gradients[x], mask_BxT) for x in SUBLAYERS]
    return jnp.stack(norms, 1).reshape(-1)

  def _families(self, found: Observed) -> dict[str, jax.Array]:
    """Stacks of vectors to be compared; see `family_names`."""
    embedded_BxTxD = found.embedded_BxTxD
    outputs_SxBxTxD = found.outputs_SxBxTxD
    stacks = {
      "deltas": jnp.concatenate([embedded_BxTxD[None], outputs_SxBxTxD]),
      "cumulative": found.streams_SxBxTxD,
    }
    row = self.config.routing.row
    ends = block_ends(self.config)
    if ends:
      wide = jnp.promote_types(outputs_SxBxTxD.dtype, jnp.float32)
      starts = (0, *ends[:-1])
      blocks = [
        outputs_SxBxTxD[start:end].astype(wide).sum(0)
        for start, end in zip(starts, ends, strict=True)
      ]
      stacks["block_deltas"] = jnp.stack([embedded_BxTxD.astype(wide), *blocks])
    if row.appends == "difference":
      stacks["released"] = found.slots_SxBxTxD
    return stacks

  def _in_mesh(self, function):
    def run(*args):
      with use_sharding(self._sharding):
        return function(*args)

    return run


def block_ends(config: ModelConfig) -> list[int]:
  """One past the last sublayer of each block of layers; none without blocks."""
  if config.routing.row.block != "layers":
    return []
  schedule = build_schedule(config.routing, config.num_layers)
  closing = np.flatnonzero(schedule.steps.closes) + 1
  return [*closing.tolist(), schedule.num_sublayers]


def family_names(config: ModelConfig) -> dict[str, list[str]]:
  """Names of the vectors of each family that are compared.

  `deltas`: the embedding and what every sublayer put out; `cumulative`: the
  stream before each, and after the last; `block_deltas`: the embedding and
  what each block added, for variants that have blocks of layers; `released`:
  the slots of the released recurrence.
  """
  total = 2 * config.num_layers
  names = {
    "deltas": ["e", *(f"v{s}" for s in range(total))],
    "cumulative": [f"p{s}" for s in range(total + 1)],
  }
  ends = block_ends(config)
  if ends:
    names["block_deltas"] = ["e", *(f"b{i}" for i in range(1, len(ends) + 1))]
  if config.routing.row.appends == "difference":
    schedule = build_schedule(config.routing, config.num_layers)
    names["released"] = list(schedule.slot_names)
  return names


def _run(model, tokens, segment_ids, positions):
  """The embedding, the state after the last layer, and what the head sees."""
  state, rotation = model.embed(tokens, positions)
  embedded_BxTxD = state.stream_BxTxD
  state = model.run_layers(state, (rotation, segment_ids))
  return embedded_BxTxD, state, model.read_out(state)


def _seen_columns(config: ModelConfig) -> dict[str, np.ndarray]:
  """Router -> seen_LxN; routers that read nothing are not there."""
  schedule = build_schedule(config.routing, config.num_layers)
  row = config.routing.row
  columns = config.routing.null_source + schedule.num_slots
  columns += row.running_source != "none"
  seen: dict[str, np.ndarray] = {}
  for read in model_reads(config):
    layers = 1 if read.layer is None else config.num_layers
    table = seen.setdefault(read.router, np.zeros((layers, columns), bool))
    table[read.layer or 0, list(read.columns)] = True
  return seen


def _alternate(observed, what: str) -> jax.Array:
  """Of attention and MLP in turn, [2L, ...]."""
  both = [observed[f"{name}_{what}"] for name in SUBLAYERS]
  return jnp.stack(both, 1).reshape(-1, *both[0].shape[1:])


def _streams(embedded_BxTxD, outputs_SxBxTxD) -> jax.Array:
  """The stream before each sublayer and after the last, as the model adds."""

  def add(stream_BxTxD, output_BxTxD):
    stream_BxTxD = stream_BxTxD + output_BxTxD
    return stream_BxTxD, stream_BxTxD

  _, later_SxBxTxD = jax.lax.scan(
    add, embedded_BxTxD, outputs_SxBxTxD.astype(embedded_BxTxD.dtype)
  )
  return jnp.concatenate([embedded_BxTxD[None], later_SxBxTxD])
