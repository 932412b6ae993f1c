"""`python -m appliance.workers.engines.gguf FILE FOLDER`: a model in GGUF becomes a folder of safetensors.

Quantized weights are widened to bfloat16, tokenizer and chat template are put beside them, as transformers reads them.
Run in a process of its own: it needs PyTorch, which a node never imports.
"""

import os
import sys
from pathlib import Path


def convert(file: Path, folder: Path) -> None:
    """Blocks for seconds to minutes. Raises whatever transformers raises for a file that it cannot read."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    import torch  # noqa: PLC0415  # the variable above comes first
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig  # noqa: PLC0415
    from transformers.utils import logging  # noqa: PLC0415

    logging.disable_progress_bar()
    source = str(file.parent)
    model = AutoModelForCausalLM.from_pretrained(
        source,
        gguf_file=file.name,
        quantization_config=GgufConfig(dequantize=True),
        dtype=torch.bfloat16,
        local_files_only=True,
        trust_remote_code=False,
    )
    tokenizer = AutoTokenizer.from_pretrained(
        source, gguf_file=file.name, local_files_only=True, trust_remote_code=False
    )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]))
