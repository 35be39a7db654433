"""Makes the models and texts in this directory: needs torch and transformers.

    python tests/testdata/generation/make_references.py

Tiny random models of transformers, in float32 on a CPU, and how each continues
a batch of unequal prompts: 64 tokens, greedily. Weights are large enough that
no token is nearly as likely as the one that is taken. They are stored under
deltajax's names, mapped here by hand, beside the prompts (`prompt_0`, ...) and
the new tokens. Written by torch 2.13.0 and transformers 5.24.0.
"""

import itertools
import json
import pathlib

import numpy as np
import safetensors.numpy
import torch
import transformers

HERE = pathlib.Path(__file__).parent
NEW_TOKENS = 64
PROMPT_LENGTHS = (1, 5, 18)
# The least by which the logit of a token that is taken exceeds all others.
MARGIN = 5e-3
SIZES = {
  "vocab_size": 61,
  "hidden_size": 24,
  "intermediate_size": 32,
  "num_hidden_layers": 3,
  "num_attention_heads": 4,
  "num_key_value_heads": 2,
  "max_position_embeddings": 128,
  "rms_norm_eps": 1e-5,
  "rope_theta": 500.0,
  "bos_token_id": None,
  "eos_token_id": None,
  "pad_token_id": None,
}
MODELS = {
  "qwen3-tied": ("Qwen3", {"head_dim": 8, "tie_word_embeddings": True}),
  "llama-untied": ("Llama", {"head_dim": 6, "tie_word_embeddings": False}),
}


def make_model(kind: str, options: dict, seed: int):
  config = getattr(transformers, f"{kind}Config")(**SIZES, **options)
  torch.manual_seed(seed)
  model = getattr(transformers, f"{kind}ForCausalLM")(config).eval()
  with torch.no_grad():
    for name, parameter in model.named_parameters():
      noise = torch.randn(parameter.shape)
      parameter.copy_(1 + 0.3 * noise if "norm" in name else 0.4 * noise)
  return model


def our_config(model: transformers.PreTrainedModel, kind: str) -> dict:
  config = model.config
  return {
    "vocab_size": config.vocab_size,
    "width": config.hidden_size,
    "num_layers": config.num_hidden_layers,
    "num_heads": config.num_attention_heads,
    "num_kv_heads": config.num_key_value_heads,
    "head_dim": config.head_dim,
    "mlp_width": config.intermediate_size,
    "rope_theta": SIZES["rope_theta"],
    "norm_eps": config.rms_norm_eps,
    "tie_embeddings": config.tie_word_embeddings,
    "qk_norm": kind == "Qwen3",
  }


def our_params(model: transformers.PreTrainedModel) -> dict[str, np.ndarray]:
  """Path -> array; linear maps are transposed, layers stacked."""
  config = model.config
  state = {k: x.numpy() for k, x in model.state_dict().items()}
  size = (-1, config.head_dim)

  def stacked(name, change):
    layers = range(config.num_hidden_layers)
    return np.stack([change(state[f"model.layers.{i}.{name}"]) for i in layers])

  def heads(x):  # [H C, D] -> [D, H, C]
    return x.T.reshape(x.shape[1], *size)

  def output(x):  # [D, H C] -> [H, C, D]
    return x.T.reshape(*size, x.shape[0])

  def same(x):
    return x

  rows = {
    "attention_norm/scale": ("input_layernorm", same),
    "attention/query/kernel": ("self_attn.q_proj", heads),
    "attention/key/kernel": ("self_attn.k_proj", heads),
    "attention/value/kernel": ("self_attn.v_proj", heads),
    "attention/output/kernel": ("self_attn.o_proj", output),
    "mlp_norm/scale": ("post_attention_layernorm", same),
    "mlp/gate/kernel": ("mlp.gate_proj", np.transpose),
    "mlp/up/kernel": ("mlp.up_proj", np.transpose),
    "mlp/down/kernel": ("mlp.down_proj", np.transpose),
  }
  if "model.layers.0.self_attn.q_norm.weight" in state:
    rows["attention/query_norm/scale"] = ("self_attn.q_norm", same)
    rows["attention/key_norm/scale"] = ("self_attn.k_norm", same)
  params = {
    f"layers/{path}": stacked(f"{name}.weight", change)
    for path, (name, change) in rows.items()
  }
  params["embedding"] = state["model.embed_tokens.weight"]
  params["final_norm/scale"] = state["model.norm.weight"]
  if not config.tie_word_embeddings:
    params["head"] = state["lm_head.weight"].T
  return params


def continue_prompts(model, prompts: list[torch.Tensor]):
  """New tokens, of a batch that is padded on the left, and their margin."""
  longest = max(map(len, prompts))
  padded = torch.stack(
    [torch.nn.functional.pad(p, (longest - len(p), 0)) for p in prompts]
  )
  mask = torch.stack(
    [(torch.arange(longest) >= longest - len(p)).long() for p in prompts]
  )
  found = model.generate(
    padded,
    attention_mask=mask,
    max_new_tokens=NEW_TOKENS,
    do_sample=False,
    pad_token_id=0,
    output_logits=True,
    return_dict_in_generate=True,
  )
  best = torch.stack(found.logits).topk(2, dim=-1).values
  margin = float((best[..., 0] - best[..., 1]).min())
  return found.sequences[:, longest:].numpy(), margin


def main() -> None:
  for name, (kind, options) in MODELS.items():
    generator = torch.Generator().manual_seed(2)
    prompts = [
      torch.randint(SIZES["vocab_size"], (length,), generator=generator)
      for length in PROMPT_LENGTHS
    ]
    for seed in itertools.count():
      model = make_model(kind, options, seed)
      new_tokens, margin = continue_prompts(model, prompts)
      kinds = [len(set(row)) for row in new_tokens.tolist()]
      if margin > MARGIN and min(kinds) > NEW_TOKENS // 6:
        break
    tensors = {
      **our_params(model),
      **{f"prompt_{i}": p.numpy() for i, p in enumerate(prompts)},
      "new_tokens": new_tokens,
    }
    safetensors.numpy.save_file(
      {k: np.ascontiguousarray(x) for k, x in tensors.items()},
      HERE / f"{name}.safetensors",
      metadata={"config": json.dumps(our_config(model, kind))},
    )
    print(f"{name}: seed {seed}, margin {margin:.4f}, kinds of token {kinds}")


if __name__ == "__main__":
  main()
