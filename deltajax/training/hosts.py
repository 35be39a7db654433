"""Several hosts as one run: how they find each other, and who does what."""

from collections.abc import Callable, Mapping
import contextlib
import os
import threading

import jax
import numpy as np

from deltajax.config import ConfigError, HostsConfig
from deltajax.routing.sharding import Sharding

HINT_AFTER_SECONDS = 30.0


def start(
  config: HostsConfig,
  log: Callable[[str], None] = print,
  hint_after: float = HINT_AFTER_SECONDS,
) -> None:
  """Joins the other hosts, if there are any; must come before any JAX call.

  Waiting for hosts that never come would be silent: after `hint_after`
  seconds a line says what is being waited for.

  Args:
    config: how the hosts find each other.
    log: takes lines for the console.
    hint_after: seconds.
  """
  if config.cluster == "none":
    return
  if config.cluster == "auto" and not several_hosts(os.environ):
    return
  if jax.distributed.is_initialized():
    return
  who = "the hosts that the environment names"
  if config.cluster == "explicit":
    who = (
      f"{config.count} hosts at {config.coordinator} (this is host"
      f" {config.index})"
    )
  with waiting_hint(who, log, hint_after):
    jax.distributed.initialize(
      coordinator_address=config.coordinator,
      num_processes=config.count,
      process_id=config.index,
    )


def several_hosts(environment: Mapping[str, str]) -> bool:
  """Whether the environment is that of one host among several."""
  if environment.get("JAX_COORDINATOR_ADDRESS"):
    return True
  if environment.get("MEGASCALE_COORDINATOR_ADDRESS"):
    return True
  if len(environment.get("TPU_WORKER_HOSTNAMES", "").split(",")) > 1:
    return True
  return int(environment.get("SLURM_NTASKS") or 1) > 1


@contextlib.contextmanager
def waiting_hint(who: str, log: Callable[[str], None], after: float):
  """Logs a hint if the block takes longer than `after` seconds."""
  hint = threading.Timer(
    after,
    log,
    [
      f"still waiting for {who} after {after:.0f} s: the same command must run"
      " on every host, and every host must reach host 0."
    ],
  )
  hint.daemon = True
  hint.start()
  try:
    yield
  finally:
    hint.cancel()


def is_main_host() -> bool:
  """Whether this host writes metrics and the console."""
  return jax.process_index() == 0


def rows_of_this_host(sharding: Sharding, batch_size: int) -> tuple[int, int]:
  """Which rows of a batch this host's devices hold, as (shard, shards).

  Hosts that share the same rows (because `tensor` or `context` crosses hosts)
  get the same answer.

  Args:
    sharding: of the run.
    batch_size: rows of the batch, over all hosts.

  Raises:
    ConfigError: if the rows of this host are not one run of equal shards.
  """
  rows = sharding.named("batch").addressable_devices_indices_map((batch_size,))
  held = np.zeros(batch_size, bool)
  for index in rows.values():
    held[index] = True
  count = int(held.sum())
  first = int(held.argmax())
  if not held[first : first + count].all() or first % count:
    raise ConfigError(
      f"host {jax.process_index()} holds rows {np.flatnonzero(held).tolist()}"
      f" of {batch_size}, which is not one of equal contiguous parts; give"
      " the mesh axes `data` and `fsdp` sizes in which hosts are whole."
    )
  return first // count, batch_size // count
