"""What each benchmark asks, and how its answers are read."""

from __future__ import annotations

import json

import pytest

from adafuse_llm import AdaFuseConfig, InvalidInputError
from adafuse_llm.embedded import HELDOUT_KINDS
from adafuse_llm.strategies import MajorityVote, find_strategy
from benchmarks.paper.layout import OF_TASKS
from benchmarks.paper.metrics import METRICS, load_metric
from benchmarks.paper.tasks import TASKS, embedded_questions, load_task, strategy_identity
from tests.support.paths import BENCHMARKS
from training.world import SKILLS

pytestmark = pytest.mark.quick

FROM_FILES = [name for name, task in TASKS.items() if task.reads_file]


def lines(*items):
    return "\n".join(item if isinstance(item, str) else json.dumps(item) for item in items).encode()


def asked(name, question, header=None, template=None):
    """The prompt for a question."""
    task = load_task(name)
    data = lines({"question": question, "answer": "the answer is 1"})
    return task.request(task.questions(data)[0], *task.header_and_form(header, template))["prompt"]


def test_every_task_has_usable_options_and_known_metrics():
    assert list(TASKS) == [
        "nq", "squad", "triviaqa", "gsm8k", "flores_en_de", "flores_de_en", "embedded",
        "embedded_parts", "embedded_summary", "embedded_reasoning", "embedded_plain",
    ]  # fmt: skip
    for task in TASKS.values():
        AdaFuseConfig(**task.options)
        assert set(task.metrics) <= set(METRICS)


def test_questions_are_put_after_the_header():
    assert asked("nq", "who?") == "Question: who?\nAnswer:"
    assert asked("nq", "who?", "Be brief.\n\n") == "Be brief.\n\nQuestion: who?\nAnswer:"
    examples = "Question:\nA text.\nAnswer:\nyes\n"
    assert asked("squad", "Who {x}?", examples).endswith("yes\n\nQuestion:\nWho {x}?\nAnswer:\n")
    assert asked("nq", "who?", template="Q {question} A") == "Q who? A"


def test_gsm8k_goes_step_by_step_with_and_without_examples():
    assert asked("gsm8k", "2+2?") == "Question: 2+2?\nLet's think step by step\n"
    assert asked("gsm8k", "2+2?", "Solve.").endswith("Question: 2+2?\nLet's think step by step\n")


def test_translation_says_between_which_languages_unless_told():
    assert asked("flores_en_de", "A mill.").startswith("Translate the English sentence into German")
    assert asked("flores_de_en", "x").startswith("Translate the German sentence into English")
    assert asked("flores_en_de", "x", "Mine:") == "Mine:\n\nQuestion: x\nAnswer:"


@pytest.mark.parametrize(
    ("name", "text", "answer"),
    [
        ("nq", " Ada Brook\n\nQuestion", "Ada Brook"),
        ("nq", "\n\n Ada", "Ada"),
        ("nq", " ", ""),
        ("gsm8k", "2*9=18\nThe answer is \\boxed{1,018.0}", "1018.0"),
        ("gsm8k", "I cannot say", ""),
        ("flores_en_de", "Eine Mühle.\nA mill.", "Eine Mühle."),
        ("embedded", "12 plus 7 is 19. The answer is 19.", "19"),
        ("embedded", " Ada Brook. ", "Ada Brook"),
    ],
)
def test_answers_are_read_off_the_text(name, text, answer):
    assert load_task(name).read(text) == answer


def test_a_number_may_be_zero():
    (question,) = load_task("gsm8k").questions(lines({"question": "2-2?", "answer": "0"}))
    assert question.accepted == ("0",)


def test_a_prompt_is_sent_as_a_message_on_request():
    task = load_task("nq")
    question = task.questions(lines({"question": "who?", "answer": "x"}))[0]
    prompt = task.request(question, "Be brief.\n\n", task.form)["prompt"]
    assert task.request(question, "Be brief.\n\n", task.form, chat=True) == {
        "messages": [{"role": "user", "content": prompt}]
    }
    own = load_task("embedded")
    asked = own.questions(limit=1)[0]
    assert own.request(asked, "", "", chat=True) == own.request(asked, "", "")


def test_questions_without_a_chat_template_are_prompts():
    task = load_task("embedded_plain")
    first = task.questions(limit=1)[0]
    (message,) = load_task("embedded_parts").request(first, "", "")["messages"]
    assert task.request(first, "", "", chat=True) == {"prompt": message["content"] + "\nAnswer:"}


@pytest.mark.parametrize("kind", HELDOUT_KINDS)
def test_an_accepted_answer_has_the_highest_scores(kind):
    task = load_task("embedded" if kind == "facts" else f"embedded_{kind}")
    metrics = [load_metric(name) for name in task.metrics]
    for question in task.questions(limit=20):
        for metric in metrics:
            own = metric.statistics(task.read(f" {question.accepted[0]}\n"), question.accepted)
            assert metric.score(own) == 100


def test_answers_are_the_same_as_the_task_reads_them():
    gsm8k, nq = load_task("gsm8k"), load_task("nq")
    assert gsm8k.same("2*9=18. The answer is 18.00") == gsm8k.same("She has 9+9=18")
    assert gsm8k.same("The answer is -5") != gsm8k.same("The answer is 5")
    assert gsm8k.same("I cannot say") != gsm8k.same("Who knows")
    assert nq.same(" Ada Brook.\nShe") == nq.same("ada brook\n\nQuestion")
    assert load_task("embedded").same("12 plus 7. The answer is 19.") == "19"


def test_a_majority_vote_counts_answers():
    task = load_task("gsm8k")
    fitted = task.fitted(find_strategy("vote"))
    assert isinstance(fitted, MajorityVote)
    assert fitted.key("so 9+9=18") == fitted.key("The answer is 18")
    own = MajorityVote(key=str.strip)
    assert task.fitted(own) is own
    assert task.fitted(find_strategy("unite")).name == "unite"
    assert strategy_identity("vote") != {"strategy": "vote"}
    assert strategy_identity("unite") == {"strategy": "unite"}


def test_tasks_decide_what_keys_of_rows_do_not_leave_out():
    assert {name for task in TASKS.values() for name in task.options} <= set(OF_TASKS)


def test_one_accepted_answer_or_several():
    data = lines({"question": "a", "answer": "x"}, "", {"question": "b", "answer": ["y", "z"]})
    first, second = load_task("nq").questions(data)
    assert (first.number, first.accepted) == (1, ("x",))
    assert (second.number, second.accepted) == (3, ("y", "z"))
    assert load_task("nq").questions(data, limit=1) == [first]


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ("{no", "line 2 of the test set: not JSON"),
        ({"question": "a"}, 'line 2 of the test set: it has no "answer"'),
        ({"question": " ", "answer": "x"}, '"question" is empty'),
        ({"question": "a", "answer": []}, "a text or a list of texts"),
        ({"question": "a", "answer": 3}, "a text or a list of texts"),
        ({"question": "a", "answer": ["x", ""]}, "not empty"),
        ({"question": "a", "answer": "none"}, "holds no number"),
    ],
)
def test_malformed_data_are_one_error_before_anything_runs(bad, message):
    good = {"question": "a", "answer": "1"}
    with pytest.raises(InvalidInputError, match=message):
        load_task("gsm8k").questions(lines(good, bad))


def test_a_line_beyond_the_limit_is_not_looked_at():
    assert load_task("nq").questions(lines({"question": "a", "answer": "1"}, "{no"), limit=1)


def test_what_a_task_does_not_take_is_refused():
    with pytest.raises(InvalidInputError, match="needs --data"):
        load_task("nq").questions()
    with pytest.raises(InvalidInputError, match="test set is empty"):
        load_task("nq").questions(b"\n")
    with pytest.raises(InvalidInputError, match="omit --data"):
        load_task("embedded").questions(b"{}")
    with pytest.raises(InvalidInputError, match="has 1800 held-out questions; got a limit of 1801"):
        load_task("embedded").questions(limit=1801)
    with pytest.raises(InvalidInputError, match="has 300 held-out questions of the kind 'parts'"):
        load_task("embedded_parts").questions(limit=301)
    with pytest.raises(InvalidInputError, match="omit --prompts"):
        load_task("embedded").header_and_form("x")
    with pytest.raises(InvalidInputError, match="must contain"):
        load_task("nq").header_and_form(None, "Q:")
    with pytest.raises(InvalidInputError, match="Did you mean 'triviaqa'"):
        load_task("trivia_qa")


def test_embedded_questions_are_the_same_however_many_are_read():
    few, many = embedded_questions(7), embedded_questions(30)
    assert many[:7] == few
    assert [question.number for question in few] == [1, 2, 3, 4, 5, 6, 7]
    assert [question.group for question in few] == [*SKILLS, SKILLS[0]]
    assert load_task("embedded").questions(limit=7) == few
    assert len(load_task("embedded").questions()) == 300
    request = load_task("embedded").request(few[0], "", "")
    assert few[0].text in request["messages"][0]["content"]
    assert few[0].accepted[0] in request["messages"][0]["content"]  # the passages tell it


@pytest.mark.skipif(not BENCHMARKS.is_dir(), reason="the paper's test sets are not there")
@pytest.mark.parametrize("name", FROM_FILES)
def test_the_papers_test_sets_are_read(name):
    task = load_task(name)
    questions = task.questions((BENCHMARKS / f"{name}.jsonl").read_bytes())
    assert len(questions) > 1000
    header = (BENCHMARKS / f"{name}.prompt.txt").read_text(encoding="utf-8")
    before, form = task.header_and_form(header)
    cue = "Let's think step by step" if name == "gsm8k" else "Answer:"
    assert task.request(questions[0], before, form)["prompt"].rstrip().endswith(cue)
    if name.startswith("flores"):
        return
    metric = METRICS[task.metrics[0]]()
    for question in questions[:200]:  # an accepted answer is right as the task reads it
        answer = task.read(question.accepted[0])
        assert metric.score(metric.statistics(answer, question.accepted)) == 100
