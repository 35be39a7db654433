"""Several hosts as one run: how they find each other, and who does what."""

from collections.abc import Callable, Mapping
import contextlib
import glob
import hashlib
import importlib.util
import os
import threading
from typing import Any, TypeVar

import jax
from jax.experimental import multihost_utils
import numpy as np

from deltajax.config import ConfigError, HostsConfig
from deltajax.routing.sharding import Sharding

Result = TypeVar("Result")

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

  Raises:
    ConfigError: if the environment says too little, or hosts do not join.
  """
  if config.cluster == "none" or jax.distributed.is_initialized():
    return
  who = "the hosts that the environment names"
  options: dict[str, Any] = {}
  optional = False
  if config.cluster == "explicit":
    who = (
      f"{config.count} hosts at {config.coordinator} (this is host"
      f" {config.index})"
    )
    options = {
      "coordinator_address": config.coordinator,
      "num_processes": config.count,
      "process_id": config.index,
    }
  elif os.environ.get("JAX_COORDINATOR_ADDRESS"):
    options = _named_by_jax(os.environ)
  elif not several_hosts(os.environ):
    # The workers of a Cloud TPU VM are known to its metadata server alone.
    if not _is_tpu_vm():
      return
    optional = True
  try:
    with waiting_hint(who, log, hint_after):
      jax.distributed.initialize(**options)
  except (ValueError, OSError) as error:
    if not optional:
      raise ConfigError(f"this host cannot join {who}: {error}") from None
    log(f"hosts     this one alone: no TPU workers are named here ({error})")
  except RuntimeError as error:
    raise ConfigError(f"this host cannot join {who}: {error}") from None


def several_hosts(environment: Mapping[str, str]) -> bool:
  """Whether the environment itself says that this is one host among several.

  A Slurm allocation counts where `srun` has started this process; `sbatch`
  alone runs a script once, whatever it has been allocated.
  """
  if environment.get("MEGASCALE_COORDINATOR_ADDRESS"):
    return True
  if len(environment.get("TPU_WORKER_HOSTNAMES", "").split(",")) > 1:
    return True
  if not {"SLURM_PROCID", "SLURM_STEP_NODELIST"} <= environment.keys():
    return False
  return int(environment.get("SLURM_NTASKS") or 1) > 1


def _named_by_jax(environment: Mapping[str, str]) -> dict[str, Any]:
  """Arguments of `jax.distributed.initialize` from JAX_ variables."""
  names = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")
  missing = [name for name in names if not environment.get(name)]
  if missing:
    raise ConfigError(
      f"JAX_COORDINATOR_ADDRESS is set, {' and '.join(missing)} not; set all"
      f" three, or start with --hosts.cluster none or explicit."
    )
  address, count, index = (environment[name] for name in names)
  if not (count.isdecimal() and index.isdecimal()):
    raise ConfigError(
      f"JAX_NUM_PROCESSES is {count!r} and JAX_PROCESS_ID {index!r}; they must"
      " be numbers."
    )
  if int(index) >= int(count):
    raise ConfigError(
      f"JAX_PROCESS_ID is {index}; of {count} processes it must be less."
    )
  return {
    "coordinator_address": address,
    "num_processes": int(count),
    "process_id": int(index),
  }


def _is_tpu_vm() -> bool:
  """Whether this machine has TPU chips, JAX can use them, and may ask."""
  if importlib.util.find_spec("libtpu") is None:
    return False
  if os.environ.get("TPU_SKIP_MDS_QUERY"):
    return False
  platforms = os.environ.get("JAX_PLATFORMS") or "tpu"
  if "tpu" not in platforms.split(","):
    return False
  return bool(glob.glob("/dev/accel[0-9]*") or glob.glob("/dev/vfio/[0-9]*"))


def agree(facts: Mapping[str, str], error: Exception | None = None) -> None:
  """Raises on every host if something is wrong on one, or hosts differ.

  All hosts must call it, with the same names: before a step is compiled, since
  hosts that run different programs would wait for each other for ever.

  Args:
    facts: what must be the same everywhere.
    error: what is wrong on this host, if anything.

  Raises:
    ConfigError: `error` itself here; on other hosts, which host it came from.
  """
  if jax.process_count() > 1:
    digests = [
      np.frombuffer(hashlib.sha256(value.encode()).digest()[:4], np.int32)[0]
      for value in facts.values()
    ]
    mine = np.array([error is not None, *digests], np.int32)
    with waiting_hint("the other hosts", print, HINT_AFTER_SECONDS):
      table = multihost_utils.process_allgather(mine)
    if error is None and table[:, 0].any():
      host = int(table[:, 0].argmax())
      error = ConfigError(
        f"host {host} cannot go on; its own message says why."
      )
    for column, name in enumerate(facts, 1):
      if error is None and (table[:, column] != table[0, column]).any():
        other = int((table[:, column] != table[0, column]).argmax())
        error = ConfigError(
          f"host {other} has another {name} than host 0; every host must run"
          " the same command on the same files."
        )
  if error is not None:
    raise error


def any_host(mine: bool) -> bool:
  """Whether something is so on any host; all hosts must ask."""
  if jax.process_count() == 1:
    return mine
  return bool(multihost_utils.process_allgather(np.array([mine])).any())


def together(work: Callable[[], Result]) -> Result:
  """Runs `work` on this host; raises on all hosts if it fails on one.

  All hosts must call it. The work itself must not wait for other hosts: one
  that failed would never come.

  Raises:
    Exception: of `work` on this host.
    ConfigError: if it failed on another host; which one.
  """
  problem: Exception | None = None
  results = []
  try:
    results.append(work())
  except Exception as error:
    problem = error
  agree({}, problem)
  return results[0]


def on_main_host(work: Callable[[], Result]) -> Result | None:
  """Runs `work` on the main host alone, as `together`; None on the others."""
  return together(lambda: work() if is_main_host() else None)


def main_host_first(work: Callable[[], Result]) -> Result:
  """Runs `work` on the main host, then on the others, as `together`.

  What the main host leaves on a shared disk, the others find.
  """
  first: Any = on_main_host(work)
  return together(lambda: first if is_main_host() else work())


def fetch(x: jax.Array) -> np.ndarray:
  """A global array as NumPy; all hosts must ask for it."""
  if x.is_fully_addressable or x.is_fully_replicated:
    return np.asarray(x)
  return multihost_utils.process_allgather(x, tiled=True)


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


def rows_of_host(
  sharding: Sharding, batch_size: int, host: int | None = None
) -> np.ndarray:
  """Which rows of a batch a host's devices hold, in ascending order.

  They need not lie together: a mesh follows the wires between chips, not the
  numbers of hosts. Hosts that share rows (because `tensor` or `context` crosses
  hosts) get the same answer.

  Args:
    sharding: of the run.
    batch_size: rows of the batch, over all hosts.
    host: index of the host; None for this one.

  Raises:
    ConfigError: if hosts share some of their rows and not all.
  """
  host = jax.process_index() if host is None else host
  held: dict[int, np.ndarray] = {}
  rows_of = sharding.named("batch").devices_indices_map
  indices: Mapping[Any, Any] = rows_of((batch_size,))
  for device, index in indices.items():
    rows = held.setdefault(device.process_index, np.zeros(batch_size, bool))
    rows[index] = True
  # Whoever asks finds the same fault: no row may be in two different sets.
  owners = list({rows.tobytes(): one for one, rows in held.items()}.values())
  count_B = np.sum([held[one] for one in owners], axis=0)
  if count_B.max() > 1:
    one, other, *_ = (i for i in owners if held[i][count_B.argmax()])
    raise ConfigError(
      f"host {one} holds rows {np.flatnonzero(held[one]).tolist()} of"
      f" {batch_size}, host {other} {np.flatnonzero(held[other]).tolist()};"
      " hosts must hold the same rows or none in common. Give the mesh axes"
      " sizes in which hosts are whole."
    )
  return np.flatnonzero(held[host])
