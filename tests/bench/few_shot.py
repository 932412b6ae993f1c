"""How often a classifier by examples is right, and how well its confidences are meant: the numbers in `few_shot.py`.

    python -m tests.bench.few_shot [--tasks 40]

A task is 2 to 8 random categories with so many examples each; up to 20 other questions of each are classified. The
nearest mean is what a centroid per label would do, with the temperature that suits it best.
"""

import argparse
from collections.abc import Callable, Iterator

import numpy as np
import numpy.typing as npt

from appliance.compat import few_shot
from appliance.compat.few_shot import Vectors
from tests.bench.questions import questions, vectors

SHOTS: tuple[int | None, ...] = (2, 4, 8, 16, None)  # None: 2 to 40, another number for each label
CATEGORY_MIN = 20
TESTED_MAX = 20
MEANS_TEMPERATURE = 0.05

Labels = npt.NDArray[np.intp]
Classifier = Callable[[Vectors, Labels, Vectors, int], Vectors]
Task = tuple[Vectors, Labels, Vectors, Labels]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", type=int, default=40)
    count = parser.parse_args().tasks
    found = questions()
    rows = vectors([text for text, _ in found]).astype(np.float64)
    by_category = _by_category(rows, [category for _, category in found])
    print(f"{len(found)} questions, {len(by_category)} categories of {CATEGORY_MIN} and more, {count} tasks a row")
    print(f"{'examples':>10}  {'':14}{'accuracy':>9}{'log loss':>10}")
    for shots in SHOTS:
        for name, classify in (("ridge", _ridge), ("nearest mean", _nearest_mean)):
            accuracy, loss = _measured(tasks(by_category, shots=shots, count=count), classify)
            print(f"{shots or '2 to 40':>10}  {name:14}{accuracy:9.3f}{loss:10.3f}")


def tasks(by_category: list[Vectors], *, shots: int | None, count: int) -> Iterator[Task]:
    """Random tasks, the same ones each time."""
    random = np.random.default_rng(1)
    for _ in range(count):
        label_count = min(int(random.integers(2, 9)), len(by_category))
        chosen = random.choice(len(by_category), label_count, replace=False)
        examples: list[Vectors] = []
        tested: list[Vectors] = []
        for category in chosen:
            rows = random.permutation(by_category[category])
            size = int(random.integers(2, min(40, len(rows) - 2))) if shots is None else shots
            examples.append(rows[:size])
            tested.append(rows[size : size + TESTED_MAX])
        yield (np.concatenate(examples), _labels(examples), np.concatenate(tested), _labels(tested))


def _measured(all_tasks: Iterator[Task], classify: Classifier) -> tuple[float, float]:
    """The mean accuracy over categories of the tasks, and the log loss of all questions."""
    accuracies: list[float] = []
    losses: list[float] = []
    for examples, labels, inputs, truth in all_tasks:
        label_count = int(labels.max()) + 1
        found = classify(examples, labels, inputs, label_count)
        right = found.argmax(axis=1) == truth
        accuracies.append(float(np.mean([right[truth == label].mean() for label in np.unique(truth)])))
        losses += (-np.log(np.maximum(found[np.arange(len(truth)), truth], 1e-9))).tolist()
    return float(np.mean(accuracies)), float(np.mean(losses))


def _ridge(examples: Vectors, labels: Labels, inputs: Vectors, label_count: int) -> Vectors:
    return few_shot.confidences(examples, labels, inputs, label_count=label_count)


def _nearest_mean(examples: Vectors, labels: Labels, inputs: Vectors, label_count: int) -> Vectors:
    means = np.stack([examples[labels == label].mean(axis=0) for label in range(label_count)])
    scores = inputs @ (means / np.linalg.norm(means, axis=1, keepdims=True)).T / MEANS_TEMPERATURE
    weights = np.exp(scores - scores.max(axis=1, keepdims=True))
    result: Vectors = weights / weights.sum(axis=1, keepdims=True)
    return result


def _by_category(rows: Vectors, categories: list[str]) -> list[Vectors]:
    names = np.array(categories)
    return [rows[names == name] for name in np.unique(names) if (names == name).sum() >= CATEGORY_MIN]


def _labels(groups: list[Vectors]) -> Labels:
    return np.repeat(np.arange(len(groups)), [len(group) for group in groups])


if __name__ == "__main__":
    main()
