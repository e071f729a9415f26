"""Small PDFs, made for tests."""

from io import BytesIO

from pypdf import PdfWriter
from pypdf.generic import DecodedStreamObject, DictionaryObject, NameObject


def pdf(*pages: str, title: str | None = None, password: str | None = None, owner_password: str | None = None) -> bytes:
    """A PDF whose pages hold these lines; an empty page holds nothing, as a scanned one does."""
    writer = PdfWriter()
    font = DictionaryObject(
        {
            NameObject("/Type"): NameObject("/Font"),
            NameObject("/Subtype"): NameObject("/Type1"),
            NameObject("/BaseFont"): NameObject("/Helvetica"),
        }
    )
    for text in pages:
        page = writer.add_blank_page(width=595, height=842)
        content = DecodedStreamObject()
        lines = " T* ".join(f"({line}) Tj" for line in text.split("\n"))
        content.set_data(f"BT /F1 12 Tf 14 TL 72 720 Td {lines} ET".encode() if text else b"")
        page[NameObject("/Contents")] = writer._add_object(content)
        fonts = DictionaryObject({NameObject("/F1"): font})
        page[NameObject("/Resources")] = DictionaryObject({NameObject("/Font"): fonts})
    if title is not None:
        writer.add_metadata({"/Title": title})
    if password is not None or owner_password is not None:
        writer.encrypt(password or "", owner_password, algorithm="AES-256")
    written = BytesIO()
    writer.write(written)
    return written.getvalue()
