"""A model through transformers, from files whose code is never run."""

from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import PreTrainedModel
from transformers.utils import logging as transformers_logging


def load_model(kind: Any, folder: Path, *, dtype: torch.dtype, device: str) -> PreTrainedModel:
    """The model of a local folder that `check_folder` let pass, by one of transformers' Auto classes (`Any`: untyped).

    Raises ValueError for files that cannot be loaded or lack weights.
    """
    transformers_logging.disable_progress_bar()
    try:
        model, info = kind.from_pretrained(
            str(folder),
            dtype=dtype,
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=True,
            output_loading_info=True,
        )
    except (OSError, ImportError, KeyError, RuntimeError, SafetensorError) as exc:
        raise ValueError(f"the model's files cannot be loaded: {exc}") from exc
    missing = sorted(info["missing_keys"])
    if missing:
        raise ValueError(f"the model's files lack {len(missing)} weights, {missing[0]} among them")
    found: PreTrainedModel = model.to(device).eval()
    return found
