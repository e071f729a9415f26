"""``python -m fairlane_server.cli``: the same as the command ``fairlane``."""

from fairlane_server.cli.app import main

if __name__ == "__main__":
    main()
