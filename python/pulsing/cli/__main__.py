"""`python -m pulsing.cli`."""

from pulsing.cli.main import main

if __name__ == "__main__":
    main()
