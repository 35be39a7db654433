"""Makes the models and logits in this directory: needs torch and transformers.

    python tests/testdata/huggingface/make_references.py [NAME ...]

Tiny random models of transformers, saved as it saves them, and their logits at
every position, in float32 on a CPU. Weights are large enough for every part of
a model to show in its logits, which are of size one. README.md says what made
which.
"""

import pathlib
import shutil
import sys

import safetensors.torch
import torch
import transformers

HERE = pathlib.Path(__file__).parent
SIZES = {
  "vocab_size": 37,
  "hidden_size": 16,
  "num_hidden_layers": 3,
  "num_attention_heads": 4,
  "num_key_value_heads": 2,
  "intermediate_size": 24,
  "bos_token_id": 1,
  "eos_token_id": 2,
  "pad_token_id": 0,
}
LLAMA3 = {
  "rope_type": "llama3",
  "rope_theta": 1000.0,
  "factor": 4.0,
  "low_freq_factor": 1.0,
  "high_freq_factor": 4.0,
  "original_max_position_embeddings": 64,
}
QWEN3, LLAMA = transformers.Qwen3Config, transformers.LlamaConfig
# Each: the config's class, what differs from SIZES, and how it is saved.
MODELS = {
  # Grouped heads that are wider than width / heads.
  "qwen3-tied": (QWEN3, {"head_dim": 8, "tie_word_embeddings": True}, {}),
  # One head of keys each, biases, and shards.
  "qwen3-untied": (
    QWEN3,
    {"head_dim": 6, "num_key_value_heads": 4, "attention_bias": True},
    {"max_shard_size": "10KB"},
  ),
  "llama-tied": (LLAMA, {"tie_word_embeddings": True}, {}),
  "llama-untied": (
    LLAMA,
    {
      "head_dim": 8,
      "rope_parameters": LLAMA3,
      "attention_bias": True,
      "mlp_bias": True,
    },
    {},
  ),
  # Made with transformers 4, which spells rotary embeddings in another way.
  "llama-transformers4": (
    LLAMA,
    {
      "head_dim": 8,
      "rope_theta": LLAMA3["rope_theta"],
      "rope_scaling": {k: x for k, x in LLAMA3.items() if k != "rope_theta"},
    },
    {"safe_serialization": True},
  ),
}
STORED_AS = {"llama-transformers4": torch.bfloat16}


def make_model(config, seed: int) -> transformers.PreTrainedModel:
  """A model whose parameters are all random and none is small."""
  generator = torch.Generator().manual_seed(seed)
  model = transformers.AutoModelForCausalLM.from_config(
    config, attn_implementation="eager"
  )
  with torch.no_grad():
    for name, parameter in model.named_parameters():
      noise = torch.randn(parameter.shape, generator=generator)
      size = 0.1 if "embed_tokens" in name or "lm_head" in name else 0.3
      parameter.copy_(1 + 0.3 * noise if "norm" in name else size * noise)
  return model.eval()


def main() -> None:
  """Writes those that are named, or all."""
  for seed, (name, (kind, options, saving)) in enumerate(MODELS.items()):
    if name not in (sys.argv[1:] or MODELS):
      continue
    model = make_model(kind(**SIZES | options), seed)
    model.to(STORED_AS.get(name, torch.float32))
    directory = HERE / name
    shutil.rmtree(directory, ignore_errors=True)
    model.save_pretrained(directory, **saving)
    # What was saved, in float32: a cast would round the rotary frequencies.
    model = transformers.AutoModelForCausalLM.from_pretrained(
      directory, dtype=torch.float32, attn_implementation="eager"
    )
    input_ids = torch.randint(
      SIZES["vocab_size"],
      (2, 50),
      generator=torch.Generator().manual_seed(seed),
    )
    with torch.no_grad():
      logits = model(input_ids).logits
    safetensors.torch.save_file(
      {"input_ids": input_ids.to(torch.int32), "logits": logits},
      HERE / f"{name}.safetensors",
    )
    print(name, "logits up to", float(logits.abs().max()))


if __name__ == "__main__":
  main()
