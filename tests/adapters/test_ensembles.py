"""What the framework integrations share."""

import copy
import json
import pickle
import threading
import time

import pytest

from adafuse_llm import AdaFuseEngine, GGUFMember, InvalidOptionError, TransformersMember
from adafuse_llm.adapters import ensembles
from adafuse_llm.adapters.ensembles import Ensemble, fields_from_config
from adafuse_llm.adapters.model import EnsembleFields
from adafuse_llm.backends import FakeBackend
from adafuse_llm.embedded import member_paths
from adafuse_llm.loading.specs import as_specs
from tests.support.gguf_files import embedded_gguf
from tests.support.waiting import background


def test_ensembles_that_say_the_same_share_one_engine_loaded_on_first_use(monkeypatch, capsys):
    loads = []
    load = AdaFuseEngine.from_pretrained.__func__  # type: ignore[attr-defined]
    monkeypatch.setattr(
        AdaFuseEngine,
        "from_pretrained",
        classmethod(lambda cls, *args, **kwargs: loads.append(1) or load(cls, *args, **kwargs)),
    )
    one = Ensemble("embedded")
    other = pickle.loads(pickle.dumps(copy.deepcopy(one)))
    one.unload()
    assert not one.is_loaded
    assert one.names == ("wren", "heron", "finch")
    calls = [background(other.engine) for _ in range(8)]
    found = [call.result() for call in calls]
    assert len(loads) == 1
    assert {id(engine) for engine in found} == {id(one.engine())}
    assert not capsys.readouterr().err
    one.engine().close()
    assert not other.is_loaded
    assert other.engine() is not found[0]
    other.unload()


def test_a_loaded_ensemble_does_not_wait_while_another_one_loads(monkeypatch):
    ready, loading, release = Ensemble("embedded"), threading.Event(), threading.Event()
    engine = ready.engine()
    load = AdaFuseEngine.from_pretrained

    def slow(*args, **kwargs):
        loading.set()
        release.wait(30)
        return load(*args, **kwargs)

    monkeypatch.setattr(AdaFuseEngine, "from_pretrained", slow)
    other = Ensemble([str(member_paths()[0])])
    call = background(other.engine)
    assert loading.wait(30)
    began = time.monotonic()
    assert ready.engine() is engine
    assert ready.can_enforce()
    assert ready.context_window(["wren"])
    assert not other.is_loaded
    other.unload()
    assert time.monotonic() - began < 0.2
    release.set()
    assert call.result()
    for each in (ready, other):
        each.unload()


def test_a_warning_is_logged_once_in_a_process(caplog):
    models = [EnsembleFields(members="embedded") for _ in range(2)]
    for each in (*models, models[0].model_copy()):
        each._warn_once("the form is not enforced")
    models[0]._warn_once("another one")
    assert [each.getMessage() for each in caplog.records] == [
        "the form is not enforced",
        "another one",
    ]


def test_the_window_of_gguf_members_is_known_before_they_are_loaded():
    path = str(embedded_gguf("wren", "q8_0"))
    for context, window in ((None, 4096), (500, 500), (5000, 4096)):
        ensemble = Ensemble([GGUFMember(path, name="a", context=context), "missing.gguf"])
        assert ensemble.context_window(["a"]) == window
        assert ensemble.is_chat_model(["a"]) is True
        assert ensemble.is_chat_model(["a", "missing"]) is True
        assert ensemble.is_chat_model(["missing"]) is None


@pytest.mark.quick
def test_what_tells_ensembles_apart():
    engines = [AdaFuseEngine([FakeBackend("one", lambda text: {"a": 1.0})]) for _ in range(2)]
    identities = [
        Ensemble("embedded").identity,
        Ensemble(["a", "b"]).identity,
        Ensemble(["b", "a"]).identity,
        Ensemble(["a", "b"], revision="v1").identity,
        Ensemble(["a", "b"], strategy="mixture").identity,
        Ensemble(["a", TransformersMember(path="b", weight=2)]).identity,
        Ensemble(["a", {"path": "b", "quantization_config": {"bits": 4}}]).identity,
        *(Ensemble(None, existing=engine).identity for engine in engines),
    ]
    assert len({json.dumps(each) for each in identities}) == len(identities)
    assert identities[-1] == Ensemble(None, existing=engines[-1]).identity


# Configuration files --------------------------------------------------------------------------


@pytest.mark.quick
def test_a_configuration_file_gives_the_members_that_decode_and_their_weights(tmp_path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(
        "models: [org/one, org/two, org/three]\nuse: [three, one]\nweights: [1, 2, 3]\n"
        "max_words: 2\ndtype: bfloat16\nruntime: {max_requests: 3}\n"
    )
    found = fields_from_config(path)
    assert [(spec.path, spec.name) for spec in found.pop("members")] == [
        ("org/one", "one"),
        ("org/three", "three"),
    ]
    assert found.pop("runtime").max_requests == 3
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
    assert not {"members", "runtime"} & {*fields_from_config(path)}


def test_an_ensemble_describes_its_members_once(monkeypatch):
    described = []
    monkeypatch.setattr(ensembles, "as_specs", lambda paths: described.append(1) or as_specs(paths))
    one = Ensemble("embedded")
    for _ in range(2):
        assert one.names
        assert one.identity
        assert one.is_chat_model(one.names)
        assert one.context_window(one.names)
    assert len(described) == 1
