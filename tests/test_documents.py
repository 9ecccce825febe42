"""Documents become passages, passages are found again, and questions become one prompt."""

import sys
from pathlib import Path

import pytest

from adafuse_llm import documents
from adafuse_llm.documents import Passage, Retriever, question_messages, read_documents
from adafuse_llm.errors import InvalidInputError, MissingDependencyError

pytestmark = pytest.mark.quick


def write(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


def test_a_long_file_is_split_before_headings_which_stay_with_their_text(tmp_path: Path) -> None:
    text = "Intro.\n\n# Mill\n\nFounded in 1874.\n## Bakery\nWarm.\n"
    path = write(tmp_path, "town.md", text)
    assert read_documents([path], max_chars=26) == [
        Passage("town.md", "Intro."),
        Passage("town.md", "# Mill\n\nFounded in 1874."),
        Passage("town.md", "## Bakery\nWarm."),
    ]
    assert read_documents([path]) == [Passage("town.md", text.strip())]


def test_folders_are_read_in_name_order_without_hidden_and_other_files(tmp_path: Path) -> None:
    write(tmp_path, "b.txt", "second")
    write(tmp_path, "a/z.md", "first")
    write(tmp_path, ".hidden/c.md", "no")
    write(tmp_path, "image.png", "no")
    assert read_documents([tmp_path]) == [Passage("a/z.md", "first"), Passage("b.txt", "second")]


@pytest.mark.parametrize(
    "text", ["word " * 500, "A sentence. " * 99, "x" * 1000, "a paragraph\n\n" * 100, "中文" * 300]
)
def test_passages_respect_the_bound_and_lose_no_text(tmp_path: Path, text: str) -> None:
    passages = read_documents([write(tmp_path, "a.txt", text)], max_chars=120)
    assert all(0 < len(passage.text) <= 120 for passage in passages)
    assert "".join("".join(p.text for p in passages).split()) == "".join(text.split())


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.doc", b"text", r"suffix must be one of \.md, .*got '\.doc'"),
        ("a.pdf", b"%PDF", r"got '\.pdf'.*LangChain or LlamaIndex"),
        ("a.txt", b"\xff\xfe\x00", "not UTF-8"),
        ("a.md", b" \n\n ", "empty"),
    ],
)
def test_unusable_files_are_refused(
    tmp_path: Path, name: str, content: bytes, message: str
) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(InvalidInputError, match=message):
        read_documents([path])


def test_files_of_a_folder_that_cannot_be_read_are_skipped_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write(tmp_path, "a.md", "text")
    (tmp_path / "latin.txt").write_bytes("é".encode("latin-1"))
    (tmp_path / "mill.pdf").write_bytes(b"%PDF")
    assert read_documents([tmp_path]) == [Passage("a.md", "text")]
    latin, mill = caplog.messages
    assert "latin.txt: it is not UTF-8 text" in latin
    assert "mill.pdf: its suffix must be" in mill


PASSAGES = [
    Passage("mill.md", "The Halix Mill was founded by Maren Tolvik."),
    Passage("bakery.md", "The bakery opens at 8:15."),
    Passage("school.md", "The school has 45 teachers."),
]


def test_the_retriever_ranks_the_fitting_passage_first_and_scores_it() -> None:
    retriever = Retriever(PASSAGES)
    assert retriever.search("When does the bakery open?", k=2)[0] == PASSAGES[1]
    (mill,) = retriever.search("Who founded the Halix Mill?", k=1)
    (poor,) = retriever.search("Which teachers founded a chess club?", k=1)
    assert mill == PASSAGES[0]
    assert mill.score > poor.score > 0


def test_text_without_spaces_is_found() -> None:
    texts = ("东京塔高333米。", "图书馆周一关闭。", "The iPhone手机 costs 40.")
    retriever = Retriever([Passage(f"{n}.txt", text) for n, text in enumerate(texts)])
    for query, best in (("图书馆什么时候关闭?", 1), ("iphone", 2), ("手机", 2)):
        (found,) = retriever.search(query, k=1)
        assert found.text == texts[best]
        assert found.score > 0


@pytest.mark.parametrize("query", ["zebra", "the", "???"])
def test_a_query_without_a_match_still_gets_something_to_read(query: str) -> None:
    assert Retriever(PASSAGES).search(query, k=2) == PASSAGES[:2]


def test_missing_packages_name_the_extra(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for package in ("bm25s", "langchain_text_splitters"):
        monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(MissingDependencyError, match=r"pip install .*\[cli\]"):
        Retriever(PASSAGES)
    with pytest.raises(MissingDependencyError, match=r"pip install .*\[cli\]"):
        read_documents([write(tmp_path, "a.md", "word " * 200)])


def test_question_messages_is_one_user_message_with_numbered_passages() -> None:
    messages = question_messages(" Who founded the mill? ", PASSAGES[:2])
    assert messages == [
        {
            "role": "user",
            "content": f"{documents.INSTRUCTION}\n\n[1] {PASSAGES[0].text}\n\n"
            f"[2] {PASSAGES[1].text}\n\nQuestion: Who founded the mill?",
        }
    ]
    assert question_messages("What is 1 + 1?", []) == [
        {"role": "user", "content": "Question: What is 1 + 1?"}
    ]
    with pytest.raises(InvalidInputError, match="question is empty"):
        question_messages(" ", PASSAGES)
