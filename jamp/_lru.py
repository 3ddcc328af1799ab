"""A bounded cache that several threads can use."""

from collections import OrderedDict
from collections.abc import Hashable
from threading import Lock
from typing import Any


class LRU:
    """Keeps the entries that were used last; a copy of it, pickled or not, is empty."""

    def __init__(self, size: int):
        self._size = size
        self._entries: OrderedDict[Hashable, Any] = OrderedDict()
        self._lock = Lock()

    def __len__(self) -> int:
        return len(self._entries)

    def __reduce__(self) -> tuple[Any, ...]:
        return LRU, (self._size,)

    def get(self, key: Hashable) -> Any:
        """The entry of a key, or None."""
        with self._lock:
            if key not in self._entries:
                return None
            self._entries.move_to_end(key)
            return self._entries[key]

    def put(self, key: Hashable, entry: Any) -> None:
        """Adds an entry, in place of the one used longest ago if there are too many."""
        with self._lock:
            self._entries[key] = entry
            self._entries.move_to_end(key)
            if len(self._entries) > self._size:
                self._entries.popitem(last=False)
