"""Storage that speaks S3. Credentials come from the environment (``AWS_ACCESS_KEY_ID`` and so on)."""

import os
from datetime import timedelta
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from obstore.store import S3Store

_TIMEOUT_S = 30.0


def s3_store(bucket: str, endpoint: str | None = None, timeout_s: float = _TIMEOUT_S) -> "S3Store":
    """A bucket, at ``endpoint`` if one is given, else where ``AWS_ENDPOINT_URL`` says, without TLS only if
    ``AWS_ALLOW_HTTP`` allows it. ``timeout_s`` bounds a request with the whole body of its answer.

    Raises ValueError, which quotes no setting.
    """
    from obstore.exceptions import BaseError
    from obstore.store import S3Store

    config: Any = {"bucket": bucket}
    if endpoint is not None:
        config |= {"endpoint": endpoint, "virtual_hosted_style_request": False}
    # The client reads these variables itself, but for the second one when it is given options.
    address, allows = os.environ.get("AWS_ENDPOINT_URL", ""), os.environ.get("AWS_ALLOW_HTTP", "").lower() == "true"
    if endpoint is None and address.startswith("http://") and not allows:
        raise ValueError("AWS_ENDPOINT_URL begins with http://, which AWS_ALLOW_HTTP=true allows")
    options: Any = {
        "timeout": timedelta(seconds=timeout_s),
        "allow_http": allows or (endpoint is not None and endpoint.startswith("http://")),
    }
    try:
        return S3Store(config=config, client_options=options)
    except BaseError:
        # Its text may quote the settings.
        raise ValueError("the storage cannot be used with these settings") from None
