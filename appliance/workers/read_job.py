"""A job, read: what a device has to compute for it, and how its answer is made of that."""

from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from appliance.errors import InvalidRequest
from appliance.jobs import Classify, Extract, Generate, Job, Part, Rows, Task
from appliance.tables import shown
from appliance.workers.tokens import Cut, Tokens

FLOAT_BYTES = 4
QUERY = -1  # in `Reading.owners`


class Reading(msgspec.Struct, frozen=True):
    """The items that a device has to compute, none where the answer needs no device.

    `answer` gets the rows of each item as a float32 buffer, the width of a row, and the limit of a part in bytes. It
    may raise an ApplianceError that names the client's input.
    """

    items: list[Tokens]
    answer: Callable[[Sequence[memoryview], int, int], list[Part]]
    owners: tuple[int, ...] = ()  # the task's input or document each item is of, or `QUERY`; (): one each, in order
    input_tokens: int | None = None  # for the usage, where not the tokens of all items
    space: str = ""  # see `jobs.Done`


R_co = TypeVar("R_co", covariant=True)


class JobReader(Protocol[R_co]):
    """How one model reads jobs. Thread-safe."""

    def read(self, job: Job) -> R_co:
        """Blocks. Raises InvalidRequest or TooLong, naming the field."""


def takes_long(task: Task) -> bool:
    """Whether reading it may take seconds however short it is: a form or functions are compiled to a grammar."""
    return isinstance(task, Generate) and (bool(task.tools) or task.form in ("json_schema", "regex"))


def at_once(part: Part) -> Reading:
    """What needs no device."""
    return Reading([], lambda buffers, width, bytes_max: [part])


def check_labels(labels: Sequence[str], *, known: Sequence[str]) -> None:
    """Raises InvalidRequest: a label that a model never gives would look like a text without any."""
    unknown = [label for label in labels if label not in known]
    if unknown:
        raise InvalidRequest(
            f"'labels' has {shown(unknown[0])}, which the model does not find; it finds {', '.join(known)}",
            param="labels",
        )


def cut_of(task: Classify | Extract) -> Cut:
    """What becomes of a long input. Raises InvalidRequest for what only vectors have."""
    if task.truncation == "chunk_mean":
        raise InvalidRequest("only vectors have a mean; cut longer inputs, or refuse them", param="truncate")
    return task.truncation


def rows(buffers: Sequence[memoryview], width: int, bytes_max: int) -> list[Part]:
    """Vectors in parts of a bounded size, one row at least."""
    data = b"".join(buffers)
    stride = FLOAT_BYTES * width
    part_bytes = max(1, bytes_max // stride) * stride
    return [Rows(data[start : start + part_bytes], width) for start in range(0, len(data), part_bytes)]


def matrix(buffers: Sequence[memoryview], width: int) -> npt.NDArray[np.float32]:
    """All rows of the items: [rows, width]."""
    return np.frombuffer(b"".join(buffers), dtype="<f4").reshape(-1, width)
