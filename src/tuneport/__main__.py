"""`python -m tuneport`."""

from .cli import main

if __name__ == "__main__":
    main()
