"""What ranks better with an embedding model: similarity of its vectors, or MaxSim over the vectors of its tokens.

    pip install --no-deps chatterbot-corpus==1.3.3 gensim
    python -m tests.bench.rerank_quality [--model FOLDER] [--json FILE]

Of gensim nothing is imported: its test data hold the Lee corpus. Two small public sets:

- trivia: 261 questions, 250 answers, every answer a document (chatterbot-corpus, BSD)
- Lee: 50 news articles and how similar people found each pair (Lee, Pincombe and Welsh 2005; in gensim's test data)
"""

import argparse
import importlib.util
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt
import yaml

from appliance.bench.machine import this_machine
from appliance.workers.likeness import maxsim
from tests.bench.harness import Findings, Row
from tests.fake_model import packaged_minilm

Scores = npt.NDArray[np.float64]  # [queries, documents]
DEPTH = 10
MODES = ("similarity", "maxsim", "maxsim without special tokens")


class Text(NamedTuple):
    """What the model gives for one text, of length one each."""

    vector: npt.NDArray[np.float32]  # [width]
    tokens: npt.NDArray[np.float32]  # [tokens, width]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=Path(packaged_minilm()))
    parser.add_argument("--json", type=Path, help="write the findings here")
    found = parser.parse_args()
    read = reader(found.model)
    questions, answers, right = trivia()
    asked, known = read(questions), read(answers)
    articles, human = lee()
    told = read(articles)
    rows: list[Row] = []
    print(f"{'':34}{'recall@1':>10}{'MRR':>8}{f'nDCG@{DEPTH}':>10}{'Lee Spearman':>14}")
    for mode in MODES:
        places = _places(scores(asked, known, mode), right)
        gains = np.where(places <= DEPTH, 1 / np.log2(places + 1), 0.0)
        first, mean_place, gain = float(np.mean(places == 1)), float(np.mean(1 / places)), float(np.mean(gains))
        agreement = _spearman(scores(told, told, mode), human)
        print(f"{mode:34}{first:10.3f}{mean_place:8.3f}{gain:10.3f}{agreement:14.3f}")
        rows += [
            Row(f"{mode}: trivia recall@1", first),
            Row(f"{mode}: trivia MRR", mean_place),
            Row(f"{mode}: trivia nDCG@{DEPTH}", gain),
            Row(f"{mode}: Lee Spearman", agreement),
        ]
    if found.json:
        findings = Findings("rerank_quality", this_machine(), {"model": str(found.model)}, rows)
        found.json.write_bytes(msgspec.json.format(msgspec.json.encode(findings)) + b"\n")


def scores(queries: Sequence[Text], documents: Sequence[Text], mode: str) -> Scores:
    """[queries, documents]"""
    if mode == "similarity":
        of = np.stack([text.vector for text in queries]) @ np.stack([text.vector for text in documents]).T
        return of.astype(np.float64)
    kept = slice(None) if mode == "maxsim" else slice(1, -1)
    cut = [text.tokens[kept] for text in documents]
    return np.array([maxsim(query.tokens[kept], cut) for query in queries])


def reader(folder: Path) -> Callable[[Sequence[str]], list[Text]]:
    """The model, in float32, through sentence-transformers."""
    from sentence_transformers import SentenceTransformer  # noqa: PLC0415  # takes seconds

    model = SentenceTransformer(str(folder), device="cpu", local_files_only=True)

    def read(texts: Sequence[str]) -> list[Text]:
        found = model.encode(list(texts), output_value=None, normalize_embeddings=True)
        return [
            Text(_unit(each["sentence_embedding"].numpy()), _unit(each["token_embeddings"].numpy()[: _length(each)]))
            for each in found
        ]

    return read


def trivia() -> tuple[list[str], list[str], npt.NDArray[np.intp]]:
    """Questions, distinct answers, and which answer is each question's."""
    path = _package("chatterbot_corpus", "chatterbot-corpus==1.3.3") / "data" / "english" / "trivia.yml"
    pairs = [tuple(map(str, talk[:2])) for talk in yaml.safe_load(path.read_text())["conversations"]]
    answers = list(dict.fromkeys(answer for _, answer in pairs))
    return [question for question, _ in pairs], answers, np.array([answers.index(answer) for _, answer in pairs])


def lee() -> tuple[list[str], Scores]:
    """The articles and the mean judgement of each pair, in [0, 1]."""
    folder = _package("gensim", "gensim") / "test" / "test_data"
    articles = (folder / "lee.cor").read_text(encoding="latin-1").splitlines()
    return articles, np.loadtxt(folder / "similarities0-1.txt")


def _places(found: Scores, right: npt.NDArray[np.intp]) -> npt.NDArray[np.intp]:
    """Where the right document stands for each query, from 1."""
    own = found[np.arange(len(found)), right]
    result: npt.NDArray[np.intp] = 1 + (found > own[:, None]).sum(axis=1)
    return result


def _spearman(found: Scores, human: Scores) -> float:
    """Over all pairs of different articles; people judged each once, above the diagonal."""
    pairs = np.triu_indices(len(human), 1)
    both_ways = (found + found.T) / 2
    return float(np.corrcoef(_ranks(both_ways[pairs]), _ranks(human[pairs]))[0, 1])


def _ranks(values: Scores) -> Scores:
    """From the smallest; equal values share the mean of their ranks."""
    _, places, counts = np.unique(values, return_inverse=True, return_counts=True)
    result: Scores = (np.cumsum(counts) - (counts - 1) / 2)[places]
    return result


def _unit(rows: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    result: npt.NDArray[np.float32] = rows / np.linalg.norm(rows, axis=-1, keepdims=True)
    return result


def _length(found: dict[str, npt.NDArray[np.int64]]) -> int:
    return int(found["attention_mask"].sum())


def _package(module: str, distribution: str) -> Path:
    spec = importlib.util.find_spec(module)
    if spec is None or spec.origin is None:
        raise SystemExit(f"{module} is missing: pip install --no-deps {distribution}")
    return Path(spec.origin).parent


if __name__ == "__main__":
    main()
