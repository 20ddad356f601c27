"""`python -m simulations`: run simulations and print what happened."""

from __future__ import annotations

import argparse
import logging
import sys
from typing import TYPE_CHECKING

import msgspec

import ksana
from ksana.cli.main import expected_cause
from ksana.errors import ConfigError
from simulations.run_command import add_run_command
from simulations.smoke import run_smoke
from simulations.studies.capacity import add_capacity_command
from simulations.studies.compare import add_compare_command
from simulations.swarm.mutations import FOUND_GOAL, SwarmAnswer, Trial, as_table, run_mutations
from simulations.swarm.shrink import MAX_TRIES, shrink
from simulations.swarm.swarm import REAL_S_PER_WORLD, run_swarm


def main(arguments: list[str] | None = None) -> int:
    """Exit status: 0 all well, 1 a promise was broken (or too few mutants found), 2 wrong use, 130 Ctrl-C."""
    options = build_parser().parse_args(arguments)
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)  # workers die by the dozen here, as planned
    try:
        status: int = options.run(options)
    except ConfigError as error:
        sys.stderr.write(f"python -m simulations {options.command}: {error}\n")
        return 2
    except (KeyboardInterrupt, BaseExceptionGroup) as error:  # trio wraps what its tasks raise
        if not isinstance(expected_cause(error), KeyboardInterrupt):
            raise
        sys.stderr.write(f"python -m simulations {options.command}: stopped by Ctrl-C, nothing is reported\n")
        return 130
    finally:
        logging.disable(before)
    return status


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m simulations", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    add_run_command(commands)
    add_capacity_command(commands)
    add_compare_command(commands)
    _add_smoke(commands)
    _add_swarm(commands)
    _add_mutations(commands)
    return parser


if TYPE_CHECKING:
    Commands = argparse._SubParsersAction[argparse.ArgumentParser]
    """argparse has no public name for it."""


def _print_json(value: object) -> None:
    sys.stdout.write(msgspec.json.format(msgspec.json.encode(value), indent=2).decode() + "\n")


def _add_smoke(commands: Commands) -> None:
    smoke = commands.add_parser("smoke", help="mixed requests, aborts, crashes and a shutdown")
    smoke.add_argument("--seed", type=int, default=0)
    smoke.add_argument("--requests", type=int, default=300)
    smoke.add_argument("--no-sliding-window", action="store_true")
    smoke.set_defaults(run=_smoke)


def _smoke(options: argparse.Namespace) -> int:
    window = None if options.no_sliding_window else 96
    _print_json(run_smoke(options.seed, options.requests, window))
    return 0


def _add_swarm(commands: Commands) -> None:
    swarm = commands.add_parser("swarm", help="many small random worlds with random faults")
    swarm.add_argument("--seeds", type=int, default=200, help="how many")
    swarm.add_argument("--first-seed", type=int, default=0)
    swarm.add_argument("--jobs", type=int, default=1, help="processes")
    swarm.add_argument("--real-s", type=float, default=REAL_S_PER_WORLD, help="longest a world may take")
    swarm.add_argument("--shrink-tries", type=int, default=MAX_TRIES, help="for the shortest plan that fails")
    swarm.add_argument("--machine", action="store_true", help=argparse.SUPPRESS)
    swarm.set_defaults(run=_swarm)


def _swarm(options: argparse.Namespace) -> int:
    seeds = range(options.first_seed, options.first_seed + options.seeds)
    failed = run_swarm(seeds, jobs=options.jobs, real_s=options.real_s)
    if options.machine:
        answer = SwarmAnswer(package=str(ksana.__file__))
        if failed is not None:
            answer = msgspec.structs.replace(
                answer, seed=failed.seed, checker=failed.failure.checker, error=failed.failure.error
            )
        _print_json(answer)
        return 0
    if failed is None:
        sys.stdout.write(f"{len(seeds)} seeds, every promise kept\n")
        return 0
    sys.stderr.write(
        f"seed {failed.seed}: {failed.failure.error}\nnoticed by {failed.failure.checker}\n"
        "looking for the shortest plan that still fails; `run` takes it as a file\n"
    )
    _print_json(shrink(failed.scenario, failed.failure, max_tries=options.shrink_tries))
    return 1


def _add_mutations(commands: Commands) -> None:
    mutations = commands.add_parser("mutations", help="what share of wrong changes the swarm notices")
    mutations.add_argument("--mutants", type=int, default=28)
    mutations.add_argument("--seeds", type=int, default=200, help="of the swarm, for each mutant")
    mutations.add_argument("--draw-seed", type=int, default=1, help="which places are changed")
    mutations.add_argument("--jobs", type=int, default=1)
    mutations.add_argument("--json", action="store_true")
    mutations.set_defaults(run=_mutations)


def _mutations(options: argparse.Namespace) -> int:
    def told(trial: Trial) -> None:
        outcome = "survived" if trial.seed is None else f"seed {trial.seed}"
        sys.stderr.write(f"{outcome:<9} {trial.mutant.name}\n")
        sys.stderr.flush()

    report = run_mutations(
        num_mutants=options.mutants,
        num_seeds=options.seeds,
        draw_seed=options.draw_seed,
        jobs=options.jobs,
        told=told,
    )
    if options.json:
        _print_json(report)
    else:
        sys.stdout.write(as_table(report) + "\n")
    return 0 if report.num_found >= FOUND_GOAL * len(report.trials) else 1


if __name__ == "__main__":
    sys.exit(main())
