from itertools import product

import pytest

from ksana.loading.choice import LoadChoice, choose_load


def is_endpoint(end: int, valid: list[bool], window: int, open_at_start: bool) -> bool:
    """The rule itself: every block of the window before it is valid."""
    if end < window and not open_at_start:
        return end == 0
    return all(valid[max(0, end - window) : end])


def brute_force(
    local_fa: int,
    swa_valid: tuple[bool, ...],
    fa_in_store: tuple[bool, ...],
    swa_in_store: tuple[bool, ...],
    window: int,
    open_at_start: bool,
) -> tuple[int, int, tuple[int, ...]]:
    """Try every M and every set of blocks there is: the farthest endpoint, then the fewest blocks."""
    best: tuple[int, int, tuple[int, ...]] | None = None
    for m in range(local_fa, local_fa + len(fa_in_store) + 1):
        if not all(fa_in_store[: m - local_fa]):
            break
        local = [*swa_valid, *([False] * (m - local_fa))]
        loadable = [i for i in range(m) if swa_in_store[i] and not local[i]]
        for chosen in product([False, True], repeat=len(loadable)):
            indices = tuple(i for i, take in zip(loadable, chosen, strict=True) if take)
            valid = [local[i] or i in indices for i in range(m)]
            end = max(e for e in range(m + 1) if is_endpoint(e, valid, window, open_at_start))
            candidate = (end, m, indices)
            if best is None or (end, -(m - local_fa + len(indices))) > (
                best[0],
                -(best[1] - local_fa + len(best[2])),
            ):
                best = candidate
    assert best is not None
    return best


@pytest.mark.parametrize("open_at_start", [True, False])
@pytest.mark.parametrize("window", [1, 2, 3])
@pytest.mark.parametrize("total", [1, 3, 4])
def test_every_case_up_to_four_blocks(total: int, window: int, open_at_start: bool) -> None:
    bits = [False, True]
    for local_fa in range(total + 1):
        for swa_valid in product(bits, repeat=local_fa):
            for fa_in_store in product(bits, repeat=total - local_fa):
                for swa_in_store in product(bits, repeat=total):
                    choice = choose_load(
                        local_fa=local_fa,
                        swa_valid=swa_valid,
                        fa_in_store=fa_in_store,
                        swa_in_store=swa_in_store,
                        window_blocks=window,
                        window_open_at_start=open_at_start,
                    )
                    expected = brute_force(
                        local_fa, swa_valid, fa_in_store, swa_in_store, window, open_at_start
                    )
                    found = (choice.endpoint, choice.num_fa_blocks, choice.swa_indices)
                    assert found == expected, (local_fa, swa_valid, fa_in_store, swa_in_store)


def test_without_sliding_layers_it_is_the_run_of_blocks() -> None:
    for fa_in_store in product([False, True], repeat=5):
        choice = choose_load(
            local_fa=2,
            swa_valid=(),
            fa_in_store=fa_in_store,
            swa_in_store=(),
            window_blocks=0,
            window_open_at_start=True,
        )
        run = (*fa_in_store, False).index(False)
        assert choice == LoadChoice(endpoint=2 + run, num_fa_blocks=2 + run, swa_indices=())


def test_the_worked_example() -> None:
    """B=16, W=64, 12 full blocks; local FA hit 5 with SWA at 2, 3, 4; the store has FA 5 to 10, all SWA."""
    choice = choose_load(
        local_fa=5,
        swa_valid=(False, False, True, True, True),
        fa_in_store=(True,) * 6 + (False,),
        swa_in_store=(True,) * 12,
        window_blocks=4,
        window_open_at_start=False,
    )
    assert choice == LoadChoice(endpoint=11, num_fa_blocks=11, swa_indices=(7, 8, 9, 10))


def test_sliding_blocks_alone_can_be_enough() -> None:
    choice = choose_load(
        local_fa=11,
        swa_valid=(False,) * 11,
        fa_in_store=(False,),
        swa_in_store=(True,) * 12,
        window_blocks=4,
        window_open_at_start=True,
    )
    assert choice == LoadChoice(endpoint=11, num_fa_blocks=11, swa_indices=(7, 8, 9, 10))
