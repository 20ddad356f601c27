"""`python -m simulations`: run a simulation and print what happened as JSON."""

from __future__ import annotations

import argparse
import sys

import msgspec

from simulations.smoke import run_smoke


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m simulations", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    smoke = commands.add_parser("smoke", help="mixed requests, aborts, crashes and a shutdown")
    smoke.add_argument("--seed", type=int, default=0)
    smoke.add_argument("--requests", type=int, default=300)
    smoke.add_argument("--no-sliding-window", action="store_true")
    options = parser.parse_args()
    report = run_smoke(options.seed, options.requests, None if options.no_sliding_window else 96)
    sys.stdout.write(msgspec.json.format(msgspec.json.encode(report), indent=2).decode() + "\n")


if __name__ == "__main__":
    main()
