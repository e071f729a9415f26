"""Models: their versions, the routes that choose one for a request, and the file that declares them."""
