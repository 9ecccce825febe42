"""What the framework integrations share."""

from __future__ import annotations

import copy
import json
import pickle
import threading

import pytest

from adafuse_llm import (
    AdaFuseEngine,
    GGUFMember,
    InvalidOptionError,
    Round,
    TransformersMember,
)
from adafuse_llm.adapters.ensembles import Ensemble, fields_from_config
from adafuse_llm.backends import FakeBackend
from adafuse_llm.report.styles import owner
from adafuse_llm.summary import Summary, is_unanimous, record
from tests.support.gguf_files import embedded_gguf

# Ensembles ------------------------------------------------------------------------------------


def test_ensembles_that_say_the_same_share_one_engine_loaded_on_first_use(monkeypatch, capsys):
    loads = []
    load = AdaFuseEngine.from_pretrained.__func__  # type: ignore[attr-defined]
    monkeypatch.setattr(
        AdaFuseEngine,
        "from_pretrained",
        classmethod(lambda cls, *args, **kwargs: loads.append(1) or load(cls, *args, **kwargs)),
    )
    one = Ensemble.of("embedded")
    other = pickle.loads(pickle.dumps(copy.deepcopy(one)))
    one.unload()
    assert not one.is_loaded
    assert one.names == ("wren", "heron", "finch")
    found = []
    threads = [threading.Thread(target=lambda: found.append(other.engine())) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(loads) == 1
    assert {id(engine) for engine in found} == {id(one.engine())}
    assert not capsys.readouterr().err
    one.engine().close()
    assert not other.is_loaded
    assert other.engine() is not found[0]
    other.unload()


def test_the_window_of_gguf_members_is_known_before_they_are_loaded():
    path = str(embedded_gguf("wren", "q8_0"))
    for context, window in ((None, 4096), (500, 500), (5000, 4096)):
        ensemble = Ensemble.of([GGUFMember(path, name="a", context=context), "missing.gguf"])
        assert ensemble.context_window(["a"]) == window
        assert ensemble.is_chat_model(["a"]) is True
        assert ensemble.is_chat_model(["a", "missing"]) is True
        assert ensemble.is_chat_model(["missing"]) is None


@pytest.mark.quick
def test_what_tells_ensembles_apart():
    engines = [AdaFuseEngine([FakeBackend("one", lambda text: {"a": 1.0})]) for _ in range(2)]
    identities = [
        Ensemble.of("embedded").identity,
        Ensemble.of(["a", "b"]).identity,
        Ensemble.of(["b", "a"]).identity,
        Ensemble.of(["a", "b"], revision="v1").identity,
        Ensemble.of(["a", "b"], strategy="mixture").identity,
        Ensemble.of(["a", TransformersMember(path="b", weight=2)]).identity,
        Ensemble.of(["a", {"path": "b", "quantization_config": {"bits": 4}}]).identity,
        *(Ensemble(given=engine).identity for engine in engines),
    ]
    assert len({json.dumps(each) for each in identities}) == len(identities)
    assert Ensemble(given=engines[0]).identity == Ensemble(given=engines[0]).identity


# Rounds ---------------------------------------------------------------------------------------


def rounds() -> list[Round]:
    candidates = (
        {"text": " a b", "ends": False, "proposers": ("x",), "nll": {"x": 0.1, "y": 0.2}},
        {"text": " c", "ends": False, "proposers": ("x", "y"), "nll": {"y": 0.2}},
    )
    full = [{**each, "score": 0.15} for each in candidates]
    margins = {"x": (0.5, 0.7), "y": (0.1,)}
    told = {"candidates": full, "margins": margins, "elapsed": 0.25}
    return [
        Round.model_validate({"index": 0, "winner": 0, "text": " a b", **told}),
        Round.model_validate({"index": 1, "winner": 1, "text": " c", **told}),
    ]


@pytest.mark.quick
def test_a_summary_counts_rounds_backed_and_rounds_decided():
    summary = Summary.of(rounds())
    assert summary.model_dump() == {
        "rounds": 2,
        "forced": 0,
        "asked": {"x": 2, "y": 2},
        "backed": {"x": 2, "y": 1},
        "decided": {"x": 1, "y": 0},
        "words_per_round": {1: 1, 2: 1},
        "agreement": 0,
        "mean_margin": {"x": pytest.approx(0.6), "y": pytest.approx(0.1)},
        "seconds": 0.5,
    }
    nothing = Summary.of([])
    assert (nothing.rounds, nothing.agreement, nothing.backed) == (0, None, {})


def decided(*spans: tuple[str, tuple[str, ...]], members: tuple[str, ...] = ("x", "y")) -> Round:
    """A round with these candidates and who proposed them; the first one is committed."""
    candidates = [
        {"text": text, "ends": False, "proposers": who, "nll": {}, "score": 0.1}
        for text, who in spans
    ]
    margins = dict.fromkeys(members, (0.9,))
    told = {"index": 0, "winner": 0, "text": spans[0][0], "margins": margins, "elapsed": 0.1}
    return Round.model_validate({"candidates": candidates, **told})


def test_a_round_is_unanimous_if_all_proposed_one_span_and_nothing_else():
    for done, unanimous in (
        (decided((" a", ("x", "y"))), True),
        (decided((" a", ("x", "y")), (" b", ("y",))), False),  # y was unsure
        (decided((" a", ("x",)), (" b", ("y",))), False),
        (decided((" a", ("x",))), None),  # y proposed nothing
        (decided((" a", ("x",)), members=("x",)), None),
    ):
        assert is_unanimous(done) is unanimous
        assert record(done)["unanimous"] is unanimous
        assert Summary.of([done]).agreement == unanimous
        assert (owner(done, list(done.margins)) is None) is bool(unanimous)


# Configuration files --------------------------------------------------------------------------


@pytest.mark.quick
def test_a_configuration_file_gives_the_members_that_decode_and_their_weights(
    tmp_path, monkeypatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    path = tmp_path / "config.yaml"
    path.write_text(
        "models: [~/one, org/two, org/three]\nuse: [three, one]\nweights: [1, 2, 3]\n"
        "max_words: 2\ndtype: bfloat16\n"
    )
    found = fields_from_config(path)
    assert [(spec.path, spec.name) for spec in found.pop("members")] == [
        (f"{tmp_path}/one", "one"),
        ("org/three", "three"),
    ]
    assert found == {
        "weights": {"one": 1.0, "three": 3.0},
        "max_words": 2,
        "strategy": "auto",
        "dtype": "bfloat16",
        "device_map": None,
        "revision": None,
    }


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("models: [a/one, a/two]\nweights: [2]", r"config.yaml: .*'weights'.*per member \(2\)"),
        ("models: [a/one, a/two]\nweights: {one: 1, too: 2}", "Did you mean 'two'"),
        ("models: [a/one, a/two]\nweights: {one: 1}", "missing: two"),
        ("models: []", "'models'.*names no model"),
        ("use: [herron]", r"no member 'herron'\. Did you mean 'heron'"),
    ],
)
def test_members_and_weights_of_a_configuration_file_must_fit(tmp_path, text, message) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(f"{text}\n")
    with pytest.raises(InvalidOptionError, match=message):
        fields_from_config(path)


def test_a_configuration_file_may_choose_among_the_embedded_members(tmp_path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("use: [heron]\nstrategy: mixture\n")
    found = fields_from_config(path)
    assert [spec.name for spec in found["members"]] == ["heron"]
    assert found["strategy"] == "mixture"
    path.write_text("strategy: mixture\n")
    assert "members" not in fields_from_config(path)
