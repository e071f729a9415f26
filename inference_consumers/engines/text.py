"""Text from requests, made safe to hand to a tokenizer."""


def clean_text(text: str) -> str:
    """The same text without lone surrogates, which no tokenizer accepts: each becomes U+FFFD.

    Control characters stay: a tokenizer has tokens for them, and they are the tenant's to send.
    """
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        # UTF-16 joins the surrogates that do form a pair.
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text
