"""Several processes on loopback are one run."""

import json
import os
import pathlib
import re
import shutil
import socket
import subprocess
import sys
import time

import jax
import numpy as np
import pytest

from deltajax.config import ConfigError, HostsConfig, MeshConfig
from deltajax.routing.sharding import Sharding
from deltajax.training import hosts
from deltajax.training.mesh import make_mesh, make_sharding, RULES
from deltajax.training.run_directory import RunDirectory
from deltajax.training.stopping import PREEMPTED, USAGE_ERROR
from deltajax.training.targets import get_target
from tests.training.mesh_program import run_config
from tests.training.test_loop import losses, tiny_config

ROOT = pathlib.Path(__file__).parents[2]


def free_port():
  with socket.socket() as listener:
    listener.bind(("127.0.0.1", 0))
    return listener.getsockname()[1]


def run_hosts(count, devices, *, code=0, term_at=None, **options):
  """Runs `count` processes with `devices` CPU devices each to their end.

  The last one gets SIGTERM once the first prints a line that begins with
  `term_at`. All must end with `code`. Returns what they printed; if they are to
  fail, their messages.
  """
  options = {"count": count, "port": free_port(), **options}
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
  if term_at is not None:
    next(x for x in processes[0].stdout if x.startswith(term_at))
    processes[-1].terminate()
  outputs = [process.communicate(timeout=300) for process in processes]
  for process, (_, stderr) in zip(processes, outputs, strict=True):
    assert process.returncode == code, stderr
  return [output[bool(code)] for output in outputs]


def test_two_processes_train_as_one_and_resume_each_other(
  corpus, tmp_path, monkeypatch
):
  # In float64, where losses can be told from rounding.
  monkeypatch.setenv("JAX_ENABLE_X64", "1")
  model = {"dtype": "float64", "param_dtype": "float64"}
  one, two, other = (tmp_path / name for name in ("one", "two", "other"))
  run_hosts(1, 4, corpus=corpus, workdir=one, stop_after=20, model=model)
  # Parameters are split over both hosts; nobody has packed this corpus yet.
  both = {
    "corpus": shutil.copytree(corpus, tmp_path / "a/b/c"),
    "workdir": two,
    "mesh": {"data": 1, "fsdp": 4},
    "model": model,
  }
  host_0, host_1 = run_hosts(2, 2, **both, stop_after=10)
  assert "encoded 60 texts" in host_0
  assert "host      0 of 2" in host_0
  assert "step 10/10" in host_0
  assert "sample:\ndef " in host_0
  assert "layer 1 attention" in host_0
  said = [x for x in host_1.splitlines() if not x.startswith("[Gloo]")]
  # One host speaks; one tokenises, the other finds the rows.
  assert said == ["host      1 of 2", "encoded 0 texts"]
  # One device takes over to the end; elsewhere four of another mesh take over
  # and hand back.
  shutil.copytree(two, other)
  (alone,) = run_hosts(
    1, 1, **both | {"workdir": other, "mesh": {"data": 1}}, stop_after=20
  )
  assert "resumed after 10 of 20 updates" in alone
  (alone,) = run_hosts(
    1, 4, **both | {"mesh": {"data": 2, "fsdp": 2}}, stop_after=15
  )
  assert "resumed after 10 of 20 updates" in alone
  host_0, _ = run_hosts(2, 2, **both, stop_after=20)
  assert "resumed after 15 of 20 updates" in host_0
  expected = losses(one)
  for directory in (two, other):
    found = losses(directory)
    assert [step for step, *_ in found] == [step for step, *_ in expected]
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-6)


def test_sigterm_on_one_host_saves_the_same_update_on_both(corpus, tmp_path):
  one, two = tmp_path / "one", tmp_path / "two"
  run_hosts(1, 2, corpus=corpus, workdir=one, steps=40)
  both = {"corpus": corpus, "workdir": two, "steps": 40}
  errors = run_hosts(2, 1, code=PREEMPTED, term_at="step  5", **both)
  pattern = r"stopped: .*; (\d+) of 40 updates are done and saved"
  first, second = (int(re.search(pattern, error)[1]) for error in errors)
  assert first == second < 40
  assert (two / "checkpoints" / str(first)).is_dir()
  host_0, _ = run_hosts(2, 1, **both)
  assert f"resumed after {first} of 40 updates" in host_0
  np.testing.assert_allclose(losses(two), losses(one), rtol=1e-4)


@pytest.mark.parametrize(
  ("different", "message"),
  [
    ({"seed": [0, 1]}, "host 1 has another config than host 0"),
    (
      {"dtype": ["float32", "float64"]},
      "host 1 cannot go on; its own message says why",
    ),
  ],
)
def test_hosts_that_differ_all_stop(corpus, tmp_path, different, message):
  workdir = tmp_path / "run"
  errors = run_hosts(
    2, 1, code=USAGE_ERROR, corpus=corpus, workdir=workdir, different=different
  )
  assert message in errors[0]
  assert "error: " in errors[1]
  assert not workdir.exists()


def test_a_host_that_fails_alone_ends_the_others(corpus, tmp_path):
  """One host alone opens the metrics; the other would wait for its updates."""
  RunDirectory(tmp_path).claim(tiny_config(corpus))
  (tmp_path / "metrics.jsonl").write_text("broken\nlines\n")
  first, second = run_hosts(
    2, 1, code=USAGE_ERROR, corpus=corpus, workdir=tmp_path
  )
  assert "metrics.jsonl, line 1: not JSON" in first
  assert "host 0 cannot go on; its own message says why" in second


def test_the_main_host_goes_first(monkeypatch):
  assert hosts.main_host_first(lambda: 5) == 5
  order = []
  monkeypatch.setattr(hosts, "is_main_host", lambda: False)
  monkeypatch.setattr(hosts, "agree", lambda *args: order.append(args))
  hosts.main_host_first(lambda: order.append("work"))
  assert order == [({}, None), "work", ({}, None)]


def test_work_on_the_main_host_alone(monkeypatch):
  assert hosts.on_main_host(lambda: 5) == 5
  monkeypatch.setattr(hosts, "is_main_host", lambda: False)
  assert hosts.on_main_host(lambda: 5) is None


def test_work_that_fails_is_told_to_all_hosts():
  with pytest.raises(OSError, match="No such file"):
    hosts.main_host_first(lambda: pathlib.Path("/no/disk").read_text())


def test_hint_comes_only_after_a_while():
  lines = []
  with hosts.waiting_hint("host 1", lines.append, after=0.05):
    time.sleep(0.3)
  assert len(lines) == 1
  assert "still waiting for host 1" in lines[0]
  with hosts.waiting_hint("host 1", lines.append, after=5):
    pass
  assert len(lines) == 1


SRUN = {"SLURM_PROCID": "0", "SLURM_STEP_NODELIST": "n[1-16]"}


@pytest.mark.parametrize(
  ("environment", "expected"),
  [
    ({}, False),
    ({"TPU_WORKER_HOSTNAMES": "localhost"}, False),
    ({"TPU_WORKER_HOSTNAMES": "a,b"}, True),
    ({"SLURM_NTASKS": "1", **SRUN}, False),
    ({"SLURM_NTASKS": "16", **SRUN}, True),
    ({"SLURM_NTASKS": "16"}, False),  # sbatch without srun
    ({"MEGASCALE_COORDINATOR_ADDRESS": "10.0.0.1"}, True),
  ],
)
def test_environment_of_several_hosts(environment, expected):
  assert hosts.several_hosts(environment) is expected


@pytest.mark.parametrize(
  ("environment", "message"),
  [
    ({}, "JAX_NUM_PROCESSES and JAX_PROCESS_ID not; set all three"),
    (
      {"JAX_NUM_PROCESSES": "two", "JAX_PROCESS_ID": "0"},
      "JAX_NUM_PROCESSES is 'two'",
    ),
    (
      {"JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": "2"},
      "JAX_PROCESS_ID is 2; of 2 processes",
    ),
  ],
)
def test_half_an_environment_is_one_message(monkeypatch, environment, message):
  monkeypatch.setenv("JAX_COORDINATOR_ADDRESS", "127.0.0.1:1")
  for name, value in environment.items():
    monkeypatch.setenv(name, value)
  with pytest.raises(ConfigError, match=message):
    hosts.start(HostsConfig())


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
  np.testing.assert_array_equal(hosts.rows_of_host(sharding, 16), range(16))


@pytest.mark.parametrize(
  ("topology", "mesh"),
  [
    ("v5e:4x4", {"data": 16}),
    ("v5e:4x4", {"data": 1, "fsdp": 16}),
    ("v5p:4x4x4", {"data": 1, "fsdp": 64}),
    ("v5p:4x4x4", {"data": 2, "fsdp": 4, "tensor": 4, "context": 2}),
    ("v5p:8x8x8", {"data": 1, "fsdp": 128, "tensor": 4}),
    ("2*v5e:4x4", {"data": 2, "fsdp": 16}),
    ("2*v5e:4x4", {"data": 4, "fsdp": 4, "context": 2}),
  ],
)
def test_hosts_of_a_pod_hold_every_row_between_them(topology, mesh):
  """On real topologies, in which the rows of a host do not lie together."""
  pytest.importorskip("libtpu")
  devices = get_target(topology).devices
  sharding = Sharding(make_mesh(MeshConfig(**mesh), devices), RULES)
  batch_size = 2 * mesh.get("data", 1) * mesh.get("fsdp", 1)
  num_hosts = len({device.process_index for device in devices})
  assert num_hosts > 1
  held = [hosts.rows_of_host(sharding, batch_size, i) for i in range(num_hosts)]
  assert set().union(*map(tuple, held)) == set(range(batch_size))
  assert len({len(rows) for rows in held}) == 1  # Equal shares.


def test_slices_are_split_by_data_alone():
  pytest.importorskip("libtpu")
  devices = get_target("2*v5e:4x4").devices
  mesh = make_mesh(MeshConfig(data=4, fsdp=8), devices)
  for i, part in enumerate(np.split(mesh.devices, 2)):
    assert {device.slice_index for device in part.flat} == {i}
  with pytest.raises(ConfigError, match=r"mesh\.data is 1, .* in 2 slices"):
    make_mesh(MeshConfig(data=1, fsdp=32), devices)


def test_hosts_that_share_only_some_rows_are_refused():
  class Device:
    def __init__(self, host):
      self.process_index = host

  class Halves:
    def named(self, axis):
      del axis
      return self

    def devices_indices_map(self, shape):
      del shape
      parts = [(0, 0, 4), (0, 4, 8), (1, 4, 8), (1, 8, 12)]
      return {Device(host): (slice(a, b),) for host, a, b in parts}

  for host in (0, 1):
    with pytest.raises(ConfigError, match="same rows or none in common"):
      hosts.rows_of_host(Halves(), 12, host)
