"""`python -m unfog`, which is what torchrun calls."""

from unfog.cli.main import main

if __name__ == "__main__":
    main()
