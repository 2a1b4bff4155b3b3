"""`python -m automimo` is the `automimo` command."""

from automimo.cli import main

if __name__ == "__main__":
    main()
