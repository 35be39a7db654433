"""Compiles a training step for devices that need not be there.

Nothing is materialised: the state and the batch are shapes with shardings.
"""

import dataclasses
import re
import time
from typing import Any

import jax
import jax.numpy as jnp

from deltajax.config import RunConfig
from deltajax.training.collectives import Collective, count_collectives
from deltajax.training.dtypes import check_dtypes
from deltajax.training.flops import model_flops
from deltajax.training.mesh import make_sharding
from deltajax.training.step import Trainer
from deltajax.training.summary import attention_choice, depth_choice
from deltajax.training.targets import GIB, Target


class DoesNotFitError(RuntimeError):
  """The program needs more memory than a device has."""


@dataclasses.dataclass(frozen=True)
class MemoryUse:
  """Bytes on each device.

  Attributes:
    argument: the state and the batch.
    output: the new state and the metrics.
    temp: everything in between.
    alias: of output, what takes the place of arguments.
    peak: the most that is in use at any time.
  """

  argument: int
  output: int
  temp: int
  alias: int
  peak: int


@dataclasses.dataclass(frozen=True)
class Report:
  """What is known about a step that was compiled.

  Attributes:
    target: name of the machine.
    config: name of the config.
    variant: of the routing.
    layers: of the model.
    devices: how many.
    device_kind: what they are.
    mesh: size of each axis.
    attention: its implementation, and why not the others.
    depth_attention: its implementation, and why not the others.
    fits: True; a step that does not fit does not compile.
    memory: on each device.
    hbm_bytes: of a device, where known.
    collectives: on one device in one step.
    compile_seconds: of XLA, without tracing.
    model_flops: of one step, all devices together; see
      `deltajax.training.flops`.
  """

  target: str
  config: str
  variant: str
  layers: int
  devices: int
  device_kind: str
  mesh: dict[str, int]
  attention: str
  depth_attention: str
  fits: bool
  memory: MemoryUse
  hbm_bytes: int | None
  collectives: list[Collective]
  compile_seconds: float
  model_flops: int


def abstract_batch(trainer: Trainer) -> dict[str, jax.ShapeDtypeStruct]:
  """Shapes and shardings of an update's batch."""
  config = trainer.config
  rows = jax.ShapeDtypeStruct(
    (config.training.batch_size, config.data.sequence_length + 1),
    jnp.int32,
    sharding=trainer.sharding.named("batch", None),
  )
  return dict.fromkeys(("tokens", "segment_ids", "positions"), rows)


def compile_step(config: RunConfig, target: Target, name: str) -> Report:
  """Compiles `Trainer.update` for a target.

  Args:
    config: of the run.
    target: what to compile for.
    name: of the config, for the report.

  Raises:
    ConfigError: if the run does not fit the mesh, or JAX would not compute in
      its dtype.
    DoesNotFitError: if it does not fit the memory.
  """
  check_dtypes(config.model)
  trainer = Trainer(config, make_sharding(config, target.devices))
  lowered = trainer.jit_update().lower(
    trainer.abstract_state(), abstract_batch(trainer)
  )
  device = target.devices[0]
  begin = time.perf_counter()
  compiled = compile_lowered(lowered)
  seconds = time.perf_counter() - begin
  return Report(
    target=target.name,
    config=name,
    variant=config.model.routing.variant,
    layers=config.model.num_layers,
    devices=len(target.devices),
    device_kind=device.device_kind,
    mesh=dict(trainer.sharding.mesh.shape),
    attention=str(attention_choice(config, trainer.sharding)),
    depth_attention=str(depth_choice(config, trainer.sharding)),
    fits=True,
    memory=memory_use(compiled, device.platform),
    hbm_bytes=target.hbm_bytes,
    collectives=count_collectives(compiled.as_text()),
    compile_seconds=round(seconds, 1),
    model_flops=model_flops(config),
  )


def compile_lowered(lowered: Any) -> Any:
  """Compiles; raises DoesNotFitError with the compiler's own figures."""
  try:
    return lowered.compile()
  except jax.errors.JaxRuntimeError as error:
    if "RESOURCE_EXHAUSTED" not in str(error):
      raise
    raise DoesNotFitError(_figures(str(error))) from None


def _figures(message: str) -> str:
  """The part of an out-of-memory message that says how much of what."""
  before_details = re.split(r"\n\s*(?:Largest|={3,})", message)[0]
  return before_details.strip()


def memory_use(compiled: Any, platform: str) -> MemoryUse:
  """What the compiler says about a program's memory.

  Args:
    compiled: the program.
    platform: that it is compiled for.
  """
  stats = compiled.memory_analysis()
  peak = stats.peak_memory_in_bytes
  if platform == "cpu":
    peak += stats.temp_size_in_bytes  # XLA's figure for CPUs leaves them out.
  return MemoryUse(
    argument=stats.argument_size_in_bytes,
    output=stats.output_size_in_bytes,
    temp=stats.temp_size_in_bytes,
    alias=stats.alias_size_in_bytes,
    peak=peak,
  )


def report_lines(report: Report) -> list[str]:
  """A report for the console."""
  memory = report.memory
  mesh = ", ".join(f"{axis} {n}" for axis, n in report.mesh.items())
  lines = [
    f"target       {report.target}: {report.devices} x {report.device_kind}"
    f" ({mesh})",
    f"step         {report.config}, {report.variant}, {report.layers} layers,"
    f" {report.model_flops:.4g} model FLOPs",
    f"attention    {report.attention}",
    f"depth        {report.depth_attention}",
    f"compiled     in {report.compile_seconds:.1f} s",
    "memory       on each device:",
  ]
  for field in dataclasses.fields(memory):
    lines.append(f"  {field.name:<11}{_gib(getattr(memory, field.name))}")
  if report.hbm_bytes:
    share = memory.peak / report.hbm_bytes
    lines.append(f"  {'HBM':<11}{_gib(report.hbm_bytes)}, {share:.0%} at peak")
  lines.append("collectives  on each device, in one step:")
  for c in report.collectives:
    some = (
      f"; {c.data_dependent} in loops over sources, one trip counted"
      if c.data_dependent
      else ""
    )
    lines.append(f"  {c.kind:<19}{c.count:>7} x, {_gib(c.bytes).strip()}{some}")
  if not report.collectives:
    lines.append("  none")
  return lines


def _gib(count: int) -> str:
  return f"{count / GIB:9.3f} GiB"
