"""Columns stand below each other, whatever is in them."""

from pulsing.cli._table import table


def test_columns_begin_where_a_terminal_shows_them() -> None:
    assert table([("Name", "State"), ("工人", "ready"), ("cafe\u0301", "ready"), ("a", "")]) == [
        "Name  State",
        "工人  ready",
        "cafe\u0301  ready",
        "a",
    ]


def test_nothing_in_a_cell_moves_the_terminal() -> None:
    assert table([("a\x1b[2J\n", "b")]) == ["a\\x1b[2J\\n  b"]
