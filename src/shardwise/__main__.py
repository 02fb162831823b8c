"""The command line: `python -m shardwise run train.py ...`."""

import sys

from shardwise.drop_in.run import main

__all__: list[str] = []

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
