"""What a model's folder may hold, whoever runs the model."""

from pathlib import Path

from appliance.workers import model_files

_PICKLES = ("*.bin", "*.pt", "*.pth", "*.pkl", "*.ckpt")


def check_folder(folder: Path) -> None:
    """Refuse what could run code or reach outside the folder, before anything is loaded from it. Raises ValueError."""
    if not (model_files.transformer_folder(folder) / "config.json").is_file():
        raise ValueError("the model's folder has no config.json")
    for module in model_files.modules(folder):
        if not module.type.startswith("sentence_transformers."):
            raise ValueError(f"the module {module.type!r} is code of the model's own, which is never run")
    if next(folder.rglob("adapter_config.json"), None) is not None:
        raise ValueError("the folder holds a PEFT adapter; merge it into its base model first")
    for pattern in _PICKLES:
        for pickle in folder.rglob(pattern):
            if next(pickle.parent.glob("*.safetensors"), None) is None and not pickle.name.startswith("training_args"):
                raise ValueError(f"{pickle.name} has no safetensors beside it; convert it, pickles are never read")
