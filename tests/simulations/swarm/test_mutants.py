"""Wrong changes are made where and as they say, and the swarm runs on the changed copy."""

from __future__ import annotations

import ast
from collections import Counter
from pathlib import Path
from typing import get_args

import pytest

from simulations.__main__ import main
from simulations.swarm.mutants import Mutant, MutantKind, draw_mutants, find_mutants, mutated_source
from simulations.swarm.mutations import MutationReport, Trial, as_table, source_root, try_mutant
from simulations.swarm.reach import reached_lines

SOURCE = '''
class Pool:
    """Words."""

    def take(self, count: int) -> bool:
        """Words."""
        if count > self.room:
            raise InvariantViolated("too many")
        if count < 1 and not self.is_open:
            return False
        self.counters.num_taken += count
        self.num_changes += 1
        self.room -= max(count, 1)
        self.blocks.release(count)
        del self.names[count]
        return self.room == 0

    def check(self) -> None:
        if self.room < 0:
            self.room = 0
'''


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "ksana/cache").mkdir(parents=True)
    (tmp_path / "ksana/scheduling").mkdir(parents=True)
    (tmp_path / "ksana/cache/pool.py").write_text(SOURCE)
    return tmp_path


def test_all_kinds_are_found_and_nothing_that_only_checks_or_counts(root: Path) -> None:
    mutants = find_mutants(root)
    assert {mutant.kind for mutant in mutants} == set(get_args(MutantKind)) - {"dropped statement"} | {
        "dropped statement"
    }
    assert {mutant.function for mutant in mutants} == {"take"}
    texts = [mutant.before for mutant in mutants]
    assert not any("counters" in text or "room:" in text or "count > self.room" in text for text in texts)
    assert ("self.num_changes += 1", "nothing") in [(mutant.before, mutant.after) for mutant in mutants]
    assert ("count < 1", "count <= 1") in [(mutant.before, mutant.after) for mutant in mutants]


def test_each_mutant_changes_its_own_place_and_no_other(root: Path) -> None:
    original = ast.unparse(ast.parse(SOURCE)).splitlines()
    mutants = find_mutants(root)
    sources = [mutated_source(root, mutant) for mutant in mutants]
    assert len(set(sources)) == len(sources)
    for mutant, source in zip(mutants, sources, strict=True):
        lines = source.splitlines()
        different = [n for n, (a, b) in enumerate(zip(original, lines, strict=True)) if a != b]
        assert len(different) == 1, mutant.name


def test_the_real_code_has_many_places_and_each_drawn_mutant_is_python() -> None:
    mutants = find_mutants(source_root())
    assert len(mutants) > 1000
    assert all(count >= 10 for count in Counter(mutant.kind for mutant in mutants).values())
    drawn = draw_mutants(mutants, 32, seed=1)
    assert drawn == draw_mutants(mutants, 32, seed=1)
    assert drawn != draw_mutants(mutants, 32, seed=2)
    assert len({(mutant.path, mutant.line) for mutant in drawn}) == 32
    assert set(Counter(mutant.kind for mutant in drawn).values()) == {4}
    for mutant in drawn:
        compile(mutated_source(source_root(), mutant), mutant.path, "exec")


def mutant_of(function: str, before: str) -> Mutant:
    return next(m for m in find_mutants(source_root()) if m.function == function and m.before == before)


def test_the_swarm_notices_a_release_that_never_comes() -> None:
    mutant = mutant_of("retire_leaving", "state.releases.append(request_id)")
    trial = try_mutant(source_root(), mutant, num_seeds=20)
    assert trial.seed is not None
    assert trial.checker


def test_the_table_says_who_survived() -> None:
    mutant = mutant_of("retire_leaving", "state.releases.append(request_id)")
    trials = (Trial(mutant=mutant, seed=3, checker="watch", error="leaked"), Trial(mutant=mutant))
    table = as_table(MutationReport(num_seeds=9, num_sites=99, num_reached=90, draw_seed=1, trials=trials))
    assert "SURVIVED" in table
    assert "seed   3" in table
    assert "1 of 2 found (50%) with 9 seeds; drawn with seed 1 from the 90 of 99 places" in table


@pytest.mark.slow
def test_most_mutants_are_noticed(capsys: pytest.CaptureFixture) -> None:
    code = main(["mutations", "--mutants", "16", "--jobs", "2"])
    last = capsys.readouterr().out.splitlines()[-1]
    num_found = int(last.split()[0])
    assert "of 16 found" in last
    assert num_found >= 10
    assert code == (0 if num_found >= 0.8 * 16 else 1)


def test_lines_that_a_run_goes_through_are_told(tmp_path: Path) -> None:
    package = tmp_path / "ksana/cache"
    package.mkdir(parents=True)
    code = "def f(x):\n    if x:\n        return 1\n    return 2\n"
    scope: dict = {}
    exec(compile(code, str(package / "some.py"), "exec"), scope)
    other: dict = {}
    exec(compile(code, str(tmp_path / "ksana/other.py"), "exec"), other)
    reached = reached_lines(tmp_path, lambda: (scope["f"](0), other["f"](0)))
    assert reached == {"ksana/cache/some.py": {2, 4}}
