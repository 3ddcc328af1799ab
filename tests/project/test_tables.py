"""A check of a whole table finds what is wrong, and names every row of it."""

import pytest
from tables import check_each


def check(row):
    assert row % 2 == 0
    if row == 8:
        pytest.fail("eight")
    if row == 10:
        raise TypeError("ten")


def test_rows_without_a_fault_pass():
    check_each([0, 2, 4], check)


def test_every_row_with_a_fault_is_named():
    with pytest.raises(AssertionError) as caught:
        check_each([1, 2, 3, 8, 10], check, "row {}".format)
    message = str(caught.value)
    assert "4 of 5 rows" in message
    for told in ("row 1: ", "row 3: ", "row 8: Failed: eight", "row 10: TypeError"):
        assert told in message
    assert "row 2" not in message


def test_a_table_without_rows_fails():
    with pytest.raises(AssertionError):
        check_each([], check)
