"""HTML to Markdown: content without styles and scripts."""

import warnings

from fairlane_server.retrieval.documents.document import DocumentLimits, ParsedDocument, UnreadableError, check_length
from fairlane_server.retrieval.documents.text import clean, decode

_DROPPED = ("script", "style", "nav", "noscript", "template", "svg", "iframe", "object", "canvas", "button", "select")
# Their text stays; the marks around it would be tokens that say nothing.
_PLAIN = ["a", "b", "strong", "i", "em"]


def parse_html(data: bytes, limits: DocumentLimits) -> ParsedDocument:
    from bs4 import BeautifulSoup
    from markdownify import ATX, MarkdownConverter

    text = decode(data)
    with warnings.catch_warnings():
        # XHTML read as HTML, text that looks like a file's name: nothing to be said about somebody's document.
        warnings.simplefilter("ignore")
        try:
            soup = BeautifulSoup(text, "html.parser")
            title = soup.title.get_text() if soup.title is not None else ""
            for element in soup.find_all(["title", *_DROPPED]):
                element.decompose()
            for image in soup.find_all("img"):
                image.replace_with(str(image.get("alt") or ""))
            converter = MarkdownConverter(
                heading_style=ATX, strip=_PLAIN, escape_asterisks=False, escape_underscores=False
            )
            markdown = converter.convert_soup(soup)
        except RecursionError:
            raise UnreadableError("its elements are nested too deeply") from None
    check_length(len(markdown), limits)
    return ParsedDocument(clean(markdown), " ".join(clean(title).split()), markdown=True)
