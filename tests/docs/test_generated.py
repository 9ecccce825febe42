"""The generated tables in the pages are those that the code makes now."""

from docs.generated import PLACE, filled, pages


def test_the_tables_of_pages_are_not_stale() -> None:
    texts = {page: page.read_text(encoding="utf-8") for page in pages()}
    generated = {page: text for page, text in texts.items() if PLACE.search(text)}
    assert generated
    stale = [page for page, text in generated.items() if text != filled(text)]
    assert stale == [], "run: python -m docs.generated"
