"""Which GGUF file is loaded, and what it writes."""

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub import constants

from adafuse_llm import AdaFuseEngine, GGUFMember, LoadError
from adafuse_llm import TransformersMember as Transformers
from adafuse_llm.embedded import member_paths
from adafuse_llm.loading import gguf as loading
from adafuse_llm.loading.gguf import find_file
from adafuse_llm.loading.specs import as_spec
from tests.support.gguf_files import embedded_gguf

WREN, HERON, _ = member_paths()
WITHOUT_GPU = SimpleNamespace(llama_supports_gpu_offload=lambda: False)
PARTS = [f"Q8/m-{number:05}-of-00002.gguf" for number in (1, 2)]


@pytest.fixture(autouse=True)
def _without_llama_cpp(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Finding files needs no llama.cpp, so these tests run without it, too."""
    if request.node.get_closest_marker("gguf") is None:
        monkeypatch.setattr(loading, "load_library", lambda: WITHOUT_GPU)


def put(folder: Path, *names: str) -> Path:
    """Put the GGUF file of wren into a folder, under some names."""
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(embedded_gguf("wren", "q8_0"), folder / name)
    return folder


def found(path: object, **settings: Any) -> Path:
    """The file from which a member is loaded."""
    spec = as_spec({"path": path, **settings})
    assert isinstance(spec, GGUFMember)
    return find_file(spec).files[0]


def refusal(path: object, kind: type[LoadError] = LoadError, **settings: Any) -> str:
    """The error of a member that cannot be loaded; nothing is loaded before it."""
    with pytest.raises(kind) as caught:
        AdaFuseEngine.from_pretrained([str(HERON), {"path": path, "name": "m", **settings}])
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.quick
def test_a_file_or_the_only_file_of_a_folder_is_loaded(tmp_path: Path) -> None:
    file = put(tmp_path, "some-model.gguf") / "some-model.gguf"
    assert found(file) == found(tmp_path) == file
    blob = file.rename(tmp_path / "sha256-12")  # as Ollama names it
    assert found(blob) == blob


@pytest.mark.quick
def test_one_of_several_files_is_named_or_matched(tmp_path: Path) -> None:
    put(tmp_path, "m-Q4_K_M.gguf", "m-Q8_0.gguf", "sub/m-F16.gguf", "mmproj-F16.gguf")
    assert found(tmp_path, file="m-Q8_0.gguf").name == "m-Q8_0.gguf"
    assert found(tmp_path, file="*Q4_K_M.gguf").name == "m-Q4_K_M.gguf"
    assert found(tmp_path, file="*F16*") == tmp_path / "sub" / "m-F16.gguf"
    assert found(tmp_path, file="sub/*") == tmp_path / "sub" / "m-F16.gguf"
    message = refusal(tmp_path)
    assert "has 3 GGUF files: m-Q4_K_M.gguf, m-Q8_0.gguf, sub/m-F16.gguf. Pass the path" in message
    assert "has 2 GGUF files that fit 'm-Q*'" in refusal(tmp_path, file="m-Q*")
    message = refusal(tmp_path, file="*Q5*")
    assert "no GGUF file that fits file='*Q5*'; it has: m-Q4_K_M.gguf, m-Q8_0.gguf" in message


@pytest.mark.quick
def test_transformers_loads_a_folder_of_both_kinds_unless_file_is_set(tmp_path: Path) -> None:
    for file in WREN.iterdir():
        (tmp_path / file.name).symlink_to(file)
    put(tmp_path, "m.gguf")
    assert isinstance(as_spec(tmp_path), Transformers)
    assert find_file(GGUFMember(str(tmp_path))).files == (tmp_path / "m.gguf",)
    assert found(tmp_path, file="*.gguf") == tmp_path / "m.gguf"


@pytest.mark.quick
def test_unusable_files_are_refused_before_anything_is_loaded(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("transformers.AutoModelForCausalLM.from_pretrained", None)
    missing = refusal(tmp_path / "missing.gguf")
    assert missing.startswith("member 'm' (") and "the file does not exist" in missing
    assert "the file does not exist" in refusal("x" * 300 + ".gguf")
    assert "the folder does not exist" in refusal("models/some/missing-gguf")
    for name in ("empty", "empty.gguf"):
        (tmp_path / name).mkdir()
    broken = put(tmp_path, "broken.gguf") / "broken.gguf"
    broken.write_bytes(broken.read_bytes()[:10_000])
    assert "member 'm' cannot be loaded" in refusal(broken)
    assert "broken.gguf is truncated" in refusal(broken)
    assert "has no GGUF file; it has: none. Pass a GGUF file" in refusal(tmp_path / "empty.gguf")
    assert "or leave out file" in refusal(WREN, file="*.gguf")
    assert "Leave out file" in refusal(broken, file="broken.gguf")
    assert "neither config.json nor GGUF files). Pass" in refusal(tmp_path / "empty")


@pytest.mark.quick
@pytest.mark.parametrize("layers", [None, 0, 5])
def test_layers_on_gpus_need_a_llama_cpp_for_gpus(tmp_path: Path, caplog, layers) -> None:
    found(put(tmp_path, "m.gguf"), gpu_layers=layers)
    warnings = [record.getMessage() for record in caplog.records]
    assert len(warnings) == (layers == 5)
    assert all("runs on the CPU, and gpu_layers=5 has no effect" in each for each in warnings)


# The hub --------------------------------------------------------------------------------------


@pytest.fixture
def snapshot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the repository org/some in a cache of the hub."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    repository = tmp_path / "models--org--some"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text("1a")
    (repository / "snapshots" / "1a").mkdir(parents=True)
    return repository / "snapshots" / "1a"


@pytest.mark.quick
def test_a_repository_in_the_cache_is_loaded_without_a_connection(snapshot: Path) -> None:
    put(snapshot, "m-Q4_K_M.gguf")
    assert found("org/some") == snapshot / "m-Q4_K_M.gguf"
    put(snapshot, "m-Q8_0.gguf")
    assert found("org/some", file="*Q8_0*") == snapshot / "m-Q8_0.gguf"
    assert "has 2 GGUF files" in refusal("org/some")
    assert "HF_HUB_OFFLINE is set" in refusal("org/other-GGUF")
    assert "HF_HUB_OFFLINE is set" in refusal("org/other", file="*.gguf")


@pytest.mark.quick
def test_only_the_files_of_the_model_are_downloaded(snapshot: Path, monkeypatch) -> None:
    downloaded: list[tuple[str, str | None]] = []

    def download(repository: str, name: str, *, revision: str | None) -> str:
        assert repository == "org/some-GGUF"
        downloaded.append((name, revision))
        return str(put(snapshot, name) / name)

    def names(_api: Any, repository: str, *, revision: str | None) -> list[str]:
        return ["README.md", "m-Q4_K_M.gguf", *PARTS, "imatrix.dat"]

    monkeypatch.setattr(huggingface_hub.HfApi, "list_repo_files", names)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    assert found("org/some-GGUF", file="*Q4*").name == "m-Q4_K_M.gguf"
    assert found("org/some-GGUF", file="Q8/*", revision="v2") == snapshot / PARTS[0]
    assert downloaded == [("m-Q4_K_M.gguf", None), (PARTS[0], "v2"), (PARTS[1], "v2")]
    assert "has 2 GGUF files: m-Q4_K_M.gguf, Q8/m-00001-of-00002.gguf" in refusal("org/some-GGUF")
