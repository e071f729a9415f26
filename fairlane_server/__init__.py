"""Shared by the services and the operator's commands; a user's service installs only ``fairlane``."""
