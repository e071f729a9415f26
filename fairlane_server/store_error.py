"""What whoever reads or writes what we keep is told, of whatever store it is."""


class StoreError(Exception):
    """The store could not do it; the message is one line and quotes nothing that is kept."""
