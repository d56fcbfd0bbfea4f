"""`python -m inlay.cli`, for `accelerate launch -m`."""

from inlay.cli.app import main

if __name__ == "__main__":
    main()
