"""`ksana serve` as `make serve` runs it: the same process and words, but Ctrl-C gives the exit code 0.

For any other code make would add a line of its own, as for an error. Ctrl-C reaches make as well, and when
the server has ended, make ends as one that was interrupted.
"""

import sys

from ksana.cli.main import main

STOPPED_BY_CTRL_C = 130

if __name__ == "__main__":
    program, *arguments = sys.argv[1:]
    sys.argv[0] = program  # what the server calls itself when it says what to type
    code = main(["serve", *arguments])
    sys.exit(0 if code == STOPPED_BY_CTRL_C else code)
