from hush_recipes.selection import select

WAYS = {"twice": 1, "plain": 2, "plain, larger batch": 3, "subspaces, twice": 4}


def test_a_name_stands_for_itself_and_what_is_none_for_all_that_have_it() -> None:
    assert select(WAYS, "") == select(WAYS, " ; ") == WAYS
    assert select(WAYS, "plain") == {"plain": 2}
    assert list(select(WAYS, "plain; twice")) == ["twice", "plain"]
    assert list(select(WAYS, "larger;subspaces")) == ["plain, larger batch", "subspaces, twice"]
    assert list(select(WAYS, "lain")) == ["plain", "plain, larger batch"]
