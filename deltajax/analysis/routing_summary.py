"""How sharply each read routes, beside what a uniform read would do.

Shapes: B batch, T sequence, R reads, H heads, N sources.
"""

from collections.abc import Iterator
import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from deltajax.models.transformer import partitionable, TransformerLM
from deltajax.routing.router import CAPTURE
from deltajax.routing.schedule import build_schedule, Schedule


@dataclasses.dataclass(frozen=True)
class ReadSummary:
  """One read of the model.

  Attributes:
    name: for example `layer 3 attention` or `final`.
    role: `Q/K`, `V`, or empty where all roles share the read.
    sources: names of the visible sources; `null` first if there is one.
    mean_weights: mean routing weight of each source over tokens and heads.
    mean_max_weight: mean over tokens and heads of the largest weight.
  """

  name: str
  role: str
  sources: tuple[str, ...]
  mean_weights: tuple[float, ...]
  mean_max_weight: float

  @property
  def uniform(self) -> float:
    """The largest weight of a uniform read; sharpness is relative to it."""
    return 1 / len(self.sources)


def capture_weights(
  model: TransformerLM, params: Any, tokens_BxT: jax.Array, **kwargs: Any
) -> dict[str, jax.Array]:
  """Routing weights of a batch: router -> weights_LxRxHxNxBxT.

  Args:
    model: the model.
    params: its unboxed parameters.
    tokens_BxT: token ids.
    **kwargs: `segment_ids` and `positions`, as for the model.

  Returns:
    `attention_router` and `mlp_router` with all layers on the first axis, and
    `final_router` with an axis of one, where the variant has it.
  """

  model = TransformerLM(partitionable(model.config))

  @jax.jit
  def run(params, tokens_BxT, kwargs):
    _, captured = model.apply(
      {"params": params}, tokens_BxT, **kwargs, mutable=CAPTURE, method="hidden"
    )
    return captured.get(CAPTURE, {})

  captured = run(params, tokens_BxT, kwargs)
  weights = {
    router: found["weights"]
    for router, found in captured.get("layers", {}).items()
  }
  if "final_router" in captured:
    weights["final_router"] = captured["final_router"]["weights"][None]
  return weights


def summarize_routing(
  model: TransformerLM, params: Any, tokens_BxT: jax.Array, **kwargs: Any
) -> list[ReadSummary]:
  """One summary for each read that sees any source, in order of depth.

  Args:
    model: the model.
    params: its unboxed parameters.
    tokens_BxT: token ids.
    **kwargs: `segment_ids` and `positions`, as for the model.
  """
  config = model.config
  schedule = build_schedule(config.routing, config.num_layers)
  weights = capture_weights(model, params, tokens_BxT, **kwargs)
  summaries = []
  for name, router, layer, sublayer in _reads(schedule):
    visible = _visible_sources(schedule, sublayer, config.routing.null_source)
    if not visible:
      continue
    columns = jnp.array(list(visible.values()))
    for read, weights_HxNxBxT in enumerate(weights[router][layer]):
      seen_HxNxBxT = weights_HxNxBxT[:, columns]
      roles = ("Q/K", "V") if len(weights[router][layer]) == 2 else ("",)
      summaries.append(
        ReadSummary(
          name=name,
          role=roles[read],
          sources=tuple(visible),
          mean_weights=tuple(seen_HxNxBxT.mean((0, 2, 3)).tolist()),
          mean_max_weight=float(seen_HxNxBxT.max(1).mean()),
        )
      )
  return summaries


def routing_table(summaries: list[ReadSummary]) -> str:
  """The summaries as text: maximum weight beside the uniform value."""
  lines = [f"{'read':<22}{'sources':>8}{'max':>8}{'uniform':>9}  favourite"]
  for read in summaries:
    favourite, weight = max(
      zip(read.sources, read.mean_weights, strict=True), key=lambda x: x[1]
    )
    lines.append(
      f"{' '.join((read.name, read.role)):<22}{len(read.sources):>8}"
      f"{read.mean_max_weight:>8.3f}{read.uniform:>9.3f}"
      f"  {favourite} ({weight:.3f})"
    )
  return "\n".join(lines)


def _reads(
  schedule: Schedule,
) -> Iterator[tuple[str, str, int, int | None]]:
  """Yields (name, router, index within the router, sublayer)."""
  for sublayer in range(schedule.num_sublayers):
    layer, is_mlp = divmod(sublayer, 2)
    kind = "mlp" if is_mlp else "attention"
    yield f"layer {layer} {kind}", f"{kind}_router", layer, sublayer
  if schedule.final is not None:
    yield "final", "final_router", 0, None


def _visible_sources(
  schedule: Schedule, sublayer: int | None, has_null: bool
) -> dict[str, int]:
  """Source name -> column of the captured weights."""
  step = schedule.final if sublayer is None else schedule.step(sublayer)
  assert step is not None
  names = schedule.sources(sublayer)
  columns = list(range(int(step.visible)))
  if step.reads_running:
    columns.append(schedule.num_slots)
  visible = {
    name: column + has_null for name, column in zip(names, columns, strict=True)
  }
  return {"null": 0, **visible} if has_null else visible
