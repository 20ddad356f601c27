import subprocess
import sys

import pytest
import trio

from ksana.runtime.deterministic import run_deterministic, seeded_task_order
from ksana.runtime.virtual_clock import VirtualClock


def order_of_tasks(seed: int) -> list[tuple[float, int]]:
    """Twenty tasks that become runnable together again and again; who acts when."""
    log: list[tuple[float, int]] = []

    async def act(name: int) -> None:
        for _ in range(10):
            await trio.sleep(1)
            log.append((trio.current_time(), name))

    async def main() -> None:
        async with trio.open_nursery() as nursery:
            for name in range(20):
                nursery.start_soon(act, name)

    run_deterministic(seed, main, VirtualClock())
    return log


def test_the_same_seed_gives_the_same_order() -> None:
    # The canary: trio's private names still do what we think they do.
    assert order_of_tasks(1) == order_of_tasks(1)


def test_another_seed_gives_another_order() -> None:
    assert len({tuple(order_of_tasks(seed)) for seed in range(5)}) == 5


def test_the_order_is_the_same_in_another_process() -> None:
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]); "
        "import test_deterministic; print(test_deterministic.order_of_tasks(3))"
    )
    directory = __file__.rpartition("/")[0]
    outputs = {
        subprocess.run(
            [sys.executable, "-c", code, directory],
            env={"PYTHONHASHSEED": str(hash_seed), "PYTHONPATH": ":".join(sys.path)},
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()
        for hash_seed in (1, 2)
    }
    assert outputs == {str(order_of_tasks(3))}


def test_trio_is_as_before_afterwards() -> None:
    import trio._core._run as trio_run

    before = trio_run._r, trio_run._ALLOW_DETERMINISTIC_SCHEDULING
    with seeded_task_order(1):
        assert trio_run._r is not before[0]
    assert (trio_run._r, trio_run._ALLOW_DETERMINISTIC_SCHEDULING) == before


def test_a_trio_that_moved_its_names_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    import trio._core._run as trio_run

    monkeypatch.setattr(trio_run, "_r", None)
    with pytest.raises(RuntimeError, match="adapt"), seeded_task_order(1):
        pass
