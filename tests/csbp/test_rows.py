import torch
from hypothesis import given
from hypothesis import strategies as st

from csbp.rows import RowSet

ranges = st.lists(
    st.tuples(st.integers(0, 40), st.integers(0, 9)).map(lambda r: (r[0], r[0] + r[1])), max_size=6
)


def members(pairs):
    return sorted({row for lo, hi in pairs for row in range(lo, hi)})


@given(ranges)
def test_a_set_holds_each_row_of_its_ranges_once(pairs):
    rows = RowSet.of(pairs)
    assert rows.indices().tolist() == members(pairs)
    assert len(rows) == len(members(pairs))
    assert all(hi < lo for (_, hi), (lo, _) in zip(rows.ranges, rows.ranges[1:], strict=False))


@given(ranges, ranges)
def test_union_and_intersection_are_those_of_sets(a, b):
    one, other = RowSet.of(a), RowSet.of(b)
    assert one.union(other).indices().tolist() == members(a + b)
    assert one.intersection(other).indices().tolist() == sorted({*members(a)} & {*members(b)})
    assert one.overlap(other) == len({*members(a)} & {*members(b)})


@given(ranges)
def test_rank_counts_the_members_before_an_axis_row(pairs):
    axis = torch.arange(60)
    wanted = [sum(row < at for row in members(pairs)) for at in axis.tolist()]
    assert RowSet.of(pairs).rank_of(axis).tolist() == wanted


@given(ranges, st.integers(0, 20), st.integers(0, 20))
def test_members_are_numbered_in_axis_order(pairs, first, count):
    assert (
        RowSet.of(pairs).members(first, first + count).indices().tolist()
        == (members(pairs)[first : first + count])
    )


@given(ranges, ranges)
def test_within_finds_a_subset_in_its_superset(a, b):
    part, whole = RowSet.of(a), RowSet.of(a + b)
    index = part.within(whole)
    if index is None:
        assert members(a) == members(a + b)
    else:
        assert whole.indices()[index].tolist() == members(a)
