"""``fairlane db``: placeholder."""

import typer

app = typer.Typer(help="The database.")
