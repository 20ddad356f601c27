"""How much a swarm notices: it runs on copies of the code that are wrong in one place each."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec

from simulations.swarm.mutants import Mutant, draw_mutants, find_mutants, mutated_source
from simulations.swarm.reach import reached_lines
from simulations.swarm.swarm import try_seed

REAL_S_PER_WORLD = 15.0
_MUTANT_TIMEOUT_S = 3600.0
FOUND_GOAL = 0.8


class Trial(msgspec.Struct, frozen=True, kw_only=True):
    """One mutant and the first seed that noticed it; None: it survived all."""

    mutant: Mutant
    seed: int | None = None
    checker: str = ""
    error: str = ""


class MutationReport(msgspec.Struct, frozen=True, kw_only=True):
    num_seeds: int
    num_sites: int
    num_reached: int
    """Sites that the swarm runs through; the others cannot be noticed and are not drawn."""
    draw_seed: int
    trials: tuple[Trial, ...]

    @property
    def num_found(self) -> int:
        return sum(trial.seed is not None for trial in self.trials)


class SwarmAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """What `swarm --machine` writes."""

    package: str
    """Where `ksana` was imported from."""
    seed: int | None = None
    checker: str = ""
    error: str = ""


def source_root() -> Path:
    """The directory that holds `ksana` and `simulations`."""
    return Path(__file__).resolve().parents[2]


def run_mutations(
    *, num_mutants: int, num_seeds: int, draw_seed: int, jobs: int, told: Callable[[Trial], None]
) -> MutationReport:
    """Try so many mutants. `told` hears of each when its trial is over, in the order of mutants."""
    root = source_root()
    sites = find_mutants(root)
    seeds = range(num_seeds // 2)
    lines = reached_lines(root, lambda: [try_seed(seed) for seed in seeds])
    reached = [site for site in sites if site.line in lines.get(site.path, ())]
    chosen = draw_mutants(reached, num_mutants, draw_seed)
    trials = []
    # A thread each only waits for its process.
    with ThreadPoolExecutor(max(1, jobs)) as pool:
        for trial in pool.map(lambda mutant: try_mutant(root, mutant, num_seeds), chosen):
            told(trial)
            trials.append(trial)
    return MutationReport(
        num_seeds=num_seeds,
        num_sites=len(sites),
        num_reached=len(reached),
        draw_seed=draw_seed,
        trials=tuple(trials),
    )


def try_mutant(root: Path, mutant: Mutant, num_seeds: int) -> Trial:
    """Run the swarm on a copy with this change, in a process of its own, until a seed fails."""
    with tempfile.TemporaryDirectory(prefix="ksana-mutant-") as directory:
        copy = Path(directory)
        lay_out(root, copy, mutant)
        command = [sys.executable, "-m", "simulations", "swarm", "--machine", "--seeds", str(num_seeds)]
        command += ["--real-s", str(REAL_S_PER_WORLD)]
        environment = {**os.environ, "PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1"}
        done = subprocess.run(
            command, cwd=copy, env=environment, capture_output=True, timeout=_MUTANT_TIMEOUT_S, check=False
        )
        try:
            answer = msgspec.json.decode(done.stdout, type=SwarmAnswer)
        except msgspec.DecodeError:
            # It broke before any world began, for instance on import: noticed at once.
            text = done.stderr.decode(errors="replace").strip().splitlines()
            return Trial(mutant=mutant, seed=0, checker="start", error=text[-1] if text else "no answer")
        if not Path(answer.package).is_relative_to(copy.resolve()):
            raise RuntimeError(f"the swarm ran on {answer.package}, not on the copy in {copy}")
    return Trial(mutant=mutant, seed=answer.seed, checker=answer.checker, error=answer.error)


def lay_out(root: Path, copy: Path, mutant: Mutant | None) -> None:
    """Copy the Python files of both packages, with the change if there is one."""
    for package in ("ksana", "simulations"):
        shutil.copytree(
            root / package, copy / package, ignore=shutil.ignore_patterns("*.so", "*.o", "*.c", "*.h")
        )
    if mutant is not None:
        (copy / mutant.path).write_text(mutated_source(root, mutant), encoding="utf-8")


def as_table(report: MutationReport) -> str:
    """For people: one line per mutant, and what came of all."""
    lines = []
    for trial in report.trials:
        outcome = "SURVIVED" if trial.seed is None else f"seed {trial.seed:>3}"
        lines.append(f"{outcome}  {trial.mutant.kind:<20} {trial.mutant.name}")
        if trial.seed is not None:
            lines.append(f"          {'':<20} by {trial.checker}: {trial.error[:110]}")
    num = len(report.trials)
    lines.append(
        f"{report.num_found} of {num} found ({report.num_found / max(1, num):.0%}) "
        f"with {report.num_seeds} seeds; drawn with seed {report.draw_seed} from the {report.num_reached} of "
        f"{report.num_sites} places that the swarm runs through"
    )
    return "\n".join(lines)
