"""Tests of whole tables: one test for many rows, which names each row that fails."""

from collections.abc import Callable, Iterable
from typing import Any

import pytest


def check_each(
    rows: Iterable[Any],
    check: Callable[[Any], object],
    name: Callable[[Any], str] = str,
) -> None:
    """Checks every row of a table, and fails with what is wrong with each.

    Args:
        rows: The rows; a table without any fails.
        check: Takes a row, and raises if something is wrong with it.
        name: What a row is called.
    """
    rows, found = list(rows), []
    for row in rows:
        try:
            check(row)
        except (Exception, pytest.fail.Exception) as error:  # noqa: BLE001 - told below
            found.append(f"{name(row)}: {type(error).__name__}: {error}")
    assert rows
    assert not found, f"{len(found)} of {len(rows)} rows:\n" + "\n".join(found)
