"""From a model and batches to statistics of its routing."""

from collections.abc import Iterable
import math
from typing import Any

import numpy as np

from deltajax.analysis import statistics
from deltajax.analysis.observe import family_names, Observer, SUBLAYERS, Sums
from deltajax.analysis.reads import model_reads, Read
from deltajax.analysis.results import (
  Analysis,
  Divergence,
  Norms,
  ReadStatistics,
  Similarity,
  summarize,
)
from deltajax.config import ModelConfig
from deltajax.routing.sharding import Sharding
from deltajax.training.step import Batch


def analyze(
  config: ModelConfig,
  params: Any,
  batches: Iterable[Batch],
  *,
  sequence_length: int,
  sharding: Sharding | None = None,
  gradients: bool = True,
) -> Analysis:
  """Runs a model over batches, one at a time, and says what it routes.

  Args:
    config: of the model; its `dtype` is what is computed in.
    params: its unboxed parameters.
    batches: tokens, segment_ids and positions, each int32 [B, T + 1], as
      `deltajax.data.pipeline.validation_batches` makes them; at least one.
    sequence_length: T.
    sharding: of the mesh that the parameters lie on, to lay batches there; None
      to run wherever the parameters are.
    gradients: whether to take norms of gradients.

  References:
    AttnRes, arXiv 2603.15031. Delta Attention Residuals, arXiv 2605.18855.
    Role-Decoupled AttnRes, arXiv 2608.01075 (divergence of the routes).
  """
  observer = Observer(config, sequence_length, sharding, gradients)
  return conclude(observer, observer.total(params, batches))


def conclude(observer: Observer, sums: Sums) -> Analysis:
  """Means, spreads and ranks from the sums of all batches.

  Args:
    observer: that made them.
    sums: as `Observer.total` returns them.
  """
  config, tokens = observer.config, sums["tokens"]
  bins = sums["tokens_by_position"]
  reads = [_read(read, sums, bins) for read in model_reads(config)]
  divergences = _divergences(config, sums)
  return Analysis(
    variant=config.routing.variant,
    num_layers=config.num_layers,
    width=config.width,
    tokens=int(tokens),
    loss=float(sums["loss"] / max(sums["targets"], 1)),
    position_bins=observer.position_bins,
    tokens_by_position=[int(x) for x in bins],
    totals=summarize(reads, divergences),
    reads=reads,
    divergences=divergences,
    similarities=_similarities(config, sums["cosines"], tokens),
    norms=_norms(sums, tokens),
    notes=_notes(config),
  )


def _read(read: Read, sums: Sums, bins_P: np.ndarray) -> ReadStatistics:
  """Statistics of one read."""
  at = (read.layer or 0, read.index)
  found = {
    name: x[at]
    for name, x in sums["reads"][read.router].items()
    if not name.startswith("divergence")
  }
  tokens, columns = sums["tokens"], list(read.columns)
  uniform, most = 1 / len(columns), math.log(len(columns))
  by_position_PxN = found["weight_by_position"][:, columns]
  return ReadStatistics(
    name=read.name,
    kind=read.kind,
    layer=read.layer,
    role=read.role,
    sources=list(read.sources),
    open_source=read.open_source,
    weight=(uniform + found["weight"][columns] / tokens).tolist(),
    weight_std=_std(
      found["weight"][columns], found["weight_squared"][columns], tokens
    ).tolist(),
    max_weight=float(uniform + found["largest"] / tokens),
    max_weight_std=float(
      _std(found["largest"], found["largest_squared"], tokens)
    ),
    uniform_weight=uniform,
    entropy=float(most + found["entropy"] / tokens),
    entropy_std=float(_std(found["entropy"], found["entropy_squared"], tokens)),
    uniform_entropy=most,
    effective_sources=float(found["effective"] / tokens),
    weight_by_position=[
      (uniform + sums_N / count).tolist() if count else None
      for sums_N, count in zip(by_position_PxN, bins_P, strict=True)
    ],
    max_weight_by_position=[
      float(uniform + x / count) if count else None
      for x, count in zip(found["largest_by_position"], bins_P, strict=True)
    ],
  )


def _divergences(config: ModelConfig, sums: Sums) -> list[Divergence]:
  """Of the layers whose Q/K and V reads have a choice."""
  layers = [
    read.layer
    for read in model_reads(config)
    if read.role == "V" and read.layer is not None and len(read.sources) > 1
  ]
  if not layers:
    return []
  found, tokens = sums["reads"]["attention_router"], sums["tokens"]
  total_L, squared_L = found["divergence"], found["divergence_squared"]
  return [
    Divergence(
      layer=layer,
      jensen_shannon=float(total_L[layer] / tokens),
      jensen_shannon_std=float(_std(total_L[layer], squared_L[layer], tokens)),
    )
    for layer in layers
  ]


def _similarities(
  config: ModelConfig, cosines: dict[str, np.ndarray], tokens: float
) -> list[Similarity]:
  found = []
  for family, names in family_names(config).items():
    cosine_SxS = cosines[family] / tokens
    apart = cosine_SxS[~np.eye(len(names), dtype=bool)]
    found.append(
      Similarity(
        family=family,
        vectors=names,
        cosine=cosine_SxS.tolist(),
        mean_cosine=float(apart.mean()) if apart.size else 1.0,
        effective_rank=statistics.effective_rank(cosine_SxS),
      )
    )
  return found


def _norms(sums: Sums, tokens: float) -> Norms:
  inputs_LxU = [sums["input_rms"][name] / tokens for name in SUBLAYERS]
  gradient = sums.get("gradient_norm")
  return Norms(
    stream_rms=(sums["stream_rms"] / tokens).tolist(),
    output_rms=(sums["output_rms"] / tokens).tolist(),
    input_rms=[
      of_layer.tolist()
      for both in zip(*inputs_LxU, strict=True)
      for of_layer in both
    ],
    gradient_norm=None if gradient is None else (gradient / tokens).tolist(),
  )


def _notes(config: ModelConfig) -> list[str]:
  """What one should know to read the statistics of a variant."""
  routing, row, notes = config.routing, config.routing.row, []
  variant = repr(routing.variant)
  if not model_reads(config):
    notes.append(
      f"{variant} has no routing over depth: there are no weights to analyse,"
      " only norms and the similarity of what sublayers put out."
    )
  elif not row.learned:
    notes.append(f"{variant} learns no read: its weights are always uniform.")
  if len(set(row.roles.inputs)) < len(row.roles.inputs):
    notes.append(
      f"{variant}: Q, K and V all get the mean of both reads, which are shown"
      " as Q/K and V."
    )
  if (
    model_reads(config) and not row.additive and row.running_source != "stream"
  ):
    notes.append(
      f"{variant}: sublayers read sources alone. The stream is the sum of all"
      " outputs so far, for comparison; nothing reads it."
    )
  if routing.gate_function is not None:
    notes.append(
      "A learned gate scales what is read before it is added to the stream;"
      " weights are those before it."
    )
  return notes


def _std(total: Any, squared: Any, tokens: float) -> Any:
  """Standard deviation from sums of a value and of its square."""
  mean = total / tokens
  return np.sqrt(np.maximum(squared / tokens - mean**2, 0))
