"""`python -m unfog`, which is what torchrun calls."""

import os
import sys

if __name__ == "__main__":
    # `python -m` puts the current folder first, where a file such as numpy.py would take the place of a package.
    if not sys.flags.safe_path and sys.path[:1] == [os.getcwd()]:
        del sys.path[0]
    from unfog.cli.main import main

    main()
