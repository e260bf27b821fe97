"""`python -m tezo`, as torchrun starts it."""

from tezo.cli.main import main

if __name__ == "__main__":
    main()
