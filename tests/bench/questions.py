"""Short questions by category, and their vectors: what the quality of answers made of vectors is measured on.

    pip install --no-deps chatterbot-corpus==1.3.3

752 English questions of 21 categories (BSD licence).
"""

import importlib.util
from pathlib import Path

import numpy as np
import numpy.typing as npt
import yaml

from tests.fake_model import packaged_minilm

Vectors = npt.NDArray[np.float32]


def questions() -> list[tuple[str, str]]:
    """Each question and its category, the first of equal ones of a category only."""
    spec = importlib.util.find_spec("chatterbot_corpus")
    if spec is None or spec.origin is None:
        raise SystemExit("chatterbot_corpus is missing: pip install --no-deps chatterbot-corpus==1.3.3")
    found: dict[tuple[str, str], str] = {}
    for path in sorted((Path(spec.origin).parent / "data" / "english").glob("*.yml")):
        for conversation in yaml.safe_load(path.read_text())["conversations"]:
            question = str(conversation[0]).strip()
            if question:
                found.setdefault((path.stem, question.lower()), question)
    return [(question, category) for (category, _), question in found.items()]


def vectors(texts: list[str]) -> Vectors:
    """[texts, 384] by all-MiniLM-L6-v2 in float32, of length one."""
    from sentence_transformers import SentenceTransformer  # noqa: PLC0415  # takes seconds

    model = SentenceTransformer(str(packaged_minilm()))
    result: Vectors = model.encode(texts, normalize_embeddings=True)
    return result
