"""`python -m inlay.cli`, for `accelerate launch -m`."""

from inlay.cli import main

if __name__ == "__main__":
    main()
