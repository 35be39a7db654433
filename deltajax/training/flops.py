"""Floating point operations of a training step, counted from the config.

`cost_analysis()` of a compiled step counts a scanned layer once; this does not.
"""

from deltajax.config import ModelConfig, RunConfig


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
