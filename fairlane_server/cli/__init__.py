"""The command ``fairlane``: what an operator does to a deployment. One module a group of commands."""

from fairlane_server.cli.app import main

__all__ = ["main"]
