"""Several processes on loopback are one run."""

import json
import os
import pathlib
import socket
import subprocess
import sys
import time

import jax
import numpy as np
import pytest

from deltajax.config import ConfigError, HostsConfig
from deltajax.training import hosts
from deltajax.training.mesh import make_sharding
from tests.training.mesh_program import run_config
from tests.training.test_loop import losses

ROOT = pathlib.Path(__file__).parents[2]


def free_port():
  with socket.socket() as listener:
    listener.bind(("127.0.0.1", 0))
    return listener.getsockname()[1]


def run_hosts(count, devices, **options):
  """Runs `count` processes with `devices` CPU devices each to their end."""
  options = {"count": count, "port": free_port(), "mesh": {}, **options}
  flags = f"--xla_force_host_platform_device_count={devices}"
  processes = [
    subprocess.Popen(
      [
        *(sys.executable, "-m", "tests.training.host_program"),
        json.dumps({**options, "index": index}, default=str),
      ],
      cwd=ROOT,
      env=os.environ | {"XLA_FLAGS": flags},
      stdout=subprocess.PIPE,
      stderr=subprocess.PIPE,
      text=True,
    )
    for index in range(count)
  ]
  outputs = [process.communicate(timeout=300) for process in processes]
  for process, (_, stderr) in zip(processes, outputs, strict=True):
    assert process.returncode == 0, stderr
  return [stdout for stdout, _ in outputs]


def test_two_processes_train_as_one_and_resume_each_other(corpus, tmp_path):
  one, two = tmp_path / "one", tmp_path / "two"
  run_hosts(1, 4, corpus=corpus, workdir=one, stop_after=20)
  host_0, host_1 = run_hosts(2, 2, corpus=corpus, workdir=two, stop_after=10)
  assert "host      0 of 2" in host_0
  assert "step 10/10" in host_0
  assert "step" not in host_1  # one host speaks
  # One process on another mesh takes over, and hands back.
  mesh = {"data": 1, "fsdp": 2}
  (alone,) = run_hosts(
    1, 2, corpus=corpus, workdir=two, stop_after=15, mesh=mesh
  )
  assert "resumed after 10 of 20 updates" in alone
  host_0, _ = run_hosts(2, 2, corpus=corpus, workdir=two, stop_after=20)
  assert "resumed after 15 of 20 updates" in host_0
  expected, found = losses(one), losses(two)
  assert [step for step, *_ in found] == [step for step, *_ in expected]
  np.testing.assert_allclose(found, expected, rtol=1e-4)


def test_hint_comes_only_after_a_while():
  lines = []
  with hosts.waiting_hint("host 1", lines.append, after=0.05):
    time.sleep(0.3)
  assert len(lines) == 1
  assert "still waiting for host 1" in lines[0]
  with hosts.waiting_hint("host 1", lines.append, after=5):
    pass
  assert len(lines) == 1


@pytest.mark.parametrize(
  ("environment", "expected"),
  [
    ({}, False),
    ({"TPU_WORKER_HOSTNAMES": "localhost"}, False),
    ({"TPU_WORKER_HOSTNAMES": "a,b"}, True),
    ({"SLURM_NTASKS": "1"}, False),
    ({"SLURM_NTASKS": "16"}, True),
    ({"JAX_COORDINATOR_ADDRESS": "10.0.0.1:1234"}, True),
    ({"MEGASCALE_COORDINATOR_ADDRESS": "10.0.0.1"}, True),
  ],
)
def test_environment_of_several_hosts(environment, expected):
  assert hosts.several_hosts(environment) is expected


@pytest.mark.parametrize(
  ("options", "message"),
  [
    ({"cluster": "slurm"}, "unknown hosts.cluster 'slurm'"),
    ({"coordinator": "a:1"}, "hosts.coordinator is for hosts.cluster 'explic"),
    (
      {"cluster": "explicit", "count": 2},
      "needs hosts.coordinator, hosts.index too",
    ),
    (
      {"cluster": "explicit", "coordinator": "a:1", "count": 2, "index": 2},
      "hosts.index is 2; of 2 hosts it must be 0 to 1",
    ),
  ],
)
def test_bad_options(options, message):
  with pytest.raises(ConfigError, match=message):
    HostsConfig(**options)


def test_one_host_holds_every_row():
  sharding = make_sharding(run_config("delta", (1, 1, 1, 1)), jax.devices()[:1])
  assert hosts.rows_of_this_host(sharding, 16) == (0, 1)
