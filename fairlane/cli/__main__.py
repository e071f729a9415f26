"""``python -m fairlane.cli``: the same as the command ``fairlane``."""

from fairlane.cli.app import main

if __name__ == "__main__":
    main()
