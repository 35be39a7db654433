"""Floating point operations of a training step, counted from the config.

`cost_analysis()` of a compiled step counts a scanned layer once; this does not.
"""

from deltajax.config import ModelConfig, RunConfig

# Dense bfloat16 (T4: float16) FLOP/s of one device as JAX counts them, from the
# makers' data sheets, by how its device_kind begins.
PEAK_FLOPS = {
  "TPU v3": 61.5e12,  # a core, which is what JAX calls a device there
  "TPU v4 lite": 138e12,
  "TPU v4": 275e12,
  "TPU v5 lite": 197e12,
  "TPU v5": 459e12,
  "TPU v6 lite": 918e12,
  "NVIDIA A100": 312e12,
  "NVIDIA H100 PCIe": 756e12,
  "NVIDIA H100": 989e12,
  "NVIDIA H200": 989e12,
  "NVIDIA L4": 121e12,
  "Tesla T4": 65e12,
  "Tesla V100": 125e12,
}


def peak_flops(device_kind: str) -> float | None:
  """FLOP/s that a device can do at most; None if it is not known."""
  found = [name for name in PEAK_FLOPS if device_kind.startswith(name)]
  return PEAK_FLOPS[max(found, key=len)] if found else None


def utilization(
  config: RunConfig, updates_per_second: float, devices: int, device_kind: str
) -> float | None:
  """Model FLOPs utilisation (MFU); None if the device is not known.

      model_flops * updates per second / (devices * peak FLOP/s of one)

  Args:
    config: of the run.
    updates_per_second: validation and checkpoints left out.
    devices: how many.
    device_kind: as JAX names them.
  """
  peak = peak_flops(device_kind)
  if peak is None:
    return None
  return model_flops(config) * updates_per_second / (devices * peak)


def matrix_parameters(model: ModelConfig) -> int:
  """Parameters that a token is multiplied with: N.

  Kernels of attention and MLP, and the output head (tied or not). Looking up
  an embedding multiplies nothing.
  """
  heads = model.num_heads + model.num_kv_heads  # Q and output; K and V
  layer = model.width * (2 * heads * model.head_dim + 3 * model.mlp_width)
  return model.num_layers * layer + model.width * model.vocab_size


def model_flops(config: RunConfig) -> int:
  """Model FLOPs of one update: what it takes, however it is computed.

      6 * N * tokens  +  12 * layers * heads * head_dim * T * tokens

  The first term is 2 for each parameter forward and 4 backward; the second is
  Q K^T and the product with V, likewise, over all T keys: causal masking is not
  deducted (as in PaLM, arXiv 2204.02311, appendix B). Recomputation does not
  count. Norms, softmax and routing are left out: a read over S sources takes
  about 12 * S * D a token and sublayer, 0.1% of a 1B model with 4 blocks.
  """
  model, length = config.model, config.data.sequence_length
  tokens = config.training.batch_size * length
  attention = 12 * model.num_layers * model.num_heads * model.head_dim * length
  return tokens * (6 * matrix_parameters(model) + attention)
