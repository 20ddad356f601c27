from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ksana.stores.file_index import FileIndex, IndexedFile

NAMES = st.sampled_from("abcdef")


@given(st.lists(st.tuples(st.sampled_from(["used", "removed"]), NAMES, st.integers(0, 100)), max_size=60))
def test_it_agrees_with_a_list(operations: list[tuple[str, str, int]]) -> None:
    index = FileIndex()
    model: list[tuple[str, int]] = []
    for now, (operation, name, size) in enumerate(operations):
        model = [entry for entry in model if entry[0] != name]
        if operation == "used":
            index.used(IndexedFile(name, size, now))
            model.append((name, size))
        else:
            index.removed(name)
        assert index.num_bytes == sum(size for _, size in model)
        assert len(index) == len(model)
        oldest = index.least_recently_used()
        assert (oldest and (oldest.name, oldest.num_bytes)) == (model[0] if model else None)


def test_a_scan_replaces_everything_in_the_order_of_use() -> None:
    index = FileIndex()
    index.used(IndexedFile("gone", 7, 1))
    index.replace([IndexedFile("b", 1, 30), IndexedFile("a", 2, 20), IndexedFile("c", 4, 25)])
    assert index.num_bytes == 7
    order = []
    while (oldest := index.least_recently_used()) is not None:
        order.append(oldest.name)
        index.removed(oldest.name)
    assert order == ["a", "c", "b"]
    assert index.num_bytes == 0


def test_what_happens_during_a_scan_is_not_forgotten_by_it() -> None:
    index = FileIndex()
    index.used(IndexedFile("gone before", 1, 1))
    index.begin_scan()
    index.used(IndexedFile("written", 10, 5))
    index.used(IndexedFile("read", 100, 6))
    index.removed("deleted")
    index.replace(
        [IndexedFile("deleted", 1000, 2), IndexedFile("read", 100, 3), IndexedFile("old", 10000, 4)]
    )
    assert index.num_bytes == 10110
    names = []
    while (oldest := index.least_recently_used()) is not None:
        names.append(oldest.name)
        index.removed(oldest.name)
    assert names == ["old", "written", "read"]
    assert index.num_bytes == 0
