"""What there is in this process: counted before and after some work, what it keeps shows."""

from __future__ import annotations

import gc
from collections import Counter, OrderedDict, deque
from typing import NamedTuple

_CONTAINERS = (dict, OrderedDict, list, set, deque)


class Objects(NamedTuple):
    """What there was at one time.

    Attributes:
        types: How many objects of each type.
        lengths: How much is in each container, by its id.
    """

    types: Counter[str]
    lengths: dict[int, int]

    def more(self, before: Objects, *, than: int) -> dict[str, int]:
        """Returns of which type there are so many more, and which kind of container has."""
        grown = {name: num for name, num in (self.types - before.types).items() if num > than}
        for each, length in self.lengths.items():
            num = length - before.lengths.get(each, length)
            if num > than:
                grown[f"in a container of {length}"] = num
        return grown


def counted() -> Objects:
    """Counts what is there now."""
    gc.collect()
    objects = gc.get_objects()
    return Objects(
        Counter(type(each).__qualname__ for each in objects),
        {id(each): len(each) for each in objects if type(each) in _CONTAINERS},
    )
