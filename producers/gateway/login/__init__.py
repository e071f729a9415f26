"""Login of browsers by OpenID Connect. Any of our applications can include its routes; it imports none of theirs."""
