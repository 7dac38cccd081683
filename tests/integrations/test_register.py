"""`register` and the choice of a back end against a stand-in for vLLM: what is registered, refused and said."""

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum
from importlib import import_module
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from trunkattn.integrations.vllm import OUR_PATH, ROUTE, register

FULL, WINDOWED, LATENT = "full_attention", "sliding_window", "mla_attention"
STOCK = "fractions.Fraction"  # any class will do
OTHER = "other.plugin.Backend"


def add_member(cls: Any, name: str, path: str) -> Any:
    """A further member of an enum, as vLLM from 0.32 on makes it."""
    member = object.__new__(cls)
    member._name_, member._value_ = name, path
    cls._member_map_[name] = member
    return member


@dataclass
class FakeVllm:
    """A vLLM for one test; what the plug-in registered and logged."""

    version: str = "0.32.0"
    platform: str = "cpu"
    backend: str | None = None
    backend_per_kind: dict[str, str] = field(default_factory=dict)
    sliding_window: int | None = None
    overrides: dict[str, str] = field(default_factory=dict)
    use_mla: bool = False
    takes_names: bool = True  # from 0.32 on
    warnings: list[str] = field(default_factory=list)
    infos: list[str] = field(default_factory=list)

    def modules(self) -> dict[str, ModuleType]:
        fake = self

        class AttentionBackendEnum(Enum):
            FLASH_ATTN = "vllm.flash"
            CPU_ATTN = STOCK
            CPU_MLA = "decimal.Decimal"
            CUSTOM = None

            def get_path(self) -> str:
                return str(fake.overrides.get(self.name, self.value))

            def is_overridden(self) -> bool:
                return self.name in fake.overrides

        if fake.takes_names:
            AttentionBackendEnum.register = classmethod(add_member)  # type: ignore[attr-defined]

        def register_backend(backend: Any, path: str) -> None:
            if isinstance(backend, str):
                backend = add_member(AttentionBackendEnum, backend, path)
            fake.overrides[backend.name] = path

        def get_current_vllm_config() -> SimpleNamespace:
            members = AttentionBackendEnum.__members__
            per_kind = {kind: members[name] for kind, name in fake.backend_per_kind.items()}
            backend = members[fake.backend] if fake.backend else None
            return SimpleNamespace(
                attention_config=SimpleNamespace(backend=backend, backend_per_kind=per_kind),
                model_config=SimpleNamespace(get_sliding_window=lambda: fake.sliding_window, use_mla=fake.use_mla),
            )

        def log(lines: list[str]) -> Any:
            return lambda message, *values: lines.append(message % values if values else message)

        logger = SimpleNamespace(
            warning=log(self.warnings), warning_once=log(self.warnings), info_once=log(self.infos), info=log(self.infos)
        )
        contents: dict[str, dict[str, Any]] = {
            "vllm": {"__version__": self.version},
            "vllm.logger": {"init_logger": lambda name: logger},
            "vllm.platforms": {
                "current_platform": SimpleNamespace(
                    is_cpu=lambda: self.platform == "cpu", is_cuda=lambda: self.platform == "cuda"
                )
            },
            "vllm.config": {"get_current_vllm_config": get_current_vllm_config},
            "vllm.v1": {},
            "vllm.v1.attention": {},
            "vllm.v1.attention.backends": {},
            "vllm.v1.attention.backends.registry": {
                "AttentionBackendEnum": AttentionBackendEnum,
                "register_backend": register_backend,
            },
        }
        found = {}
        for name, attributes in contents.items():
            found[name] = module = ModuleType(name)
            vars(module).update(attributes)
        return found


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[FakeVllm]:
    options = getattr(request, "param", {})
    fake = FakeVllm(**options)
    for name in [name for name in sys.modules if name == "vllm" or name.startswith("vllm.")]:
        monkeypatch.delitem(sys.modules, name)
    for name, module in fake.modules().items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delitem(sys.modules, ROUTE, raising=False)
    names = {"backend": "TrunkAttentionBackend", "cuda": "TrunkAttentionCudaBackend", "mla": "TrunkMlaBackend"}
    for module, name in names.items():
        backend = ModuleType(f"trunkattn.integrations.vllm.{module}")
        setattr(backend, name, type(name, (), {}))
        monkeypatch.setitem(sys.modules, backend.__name__, backend)
    yield fake
    sys.modules.pop(ROUTE, None)


def select(fake: FakeVllm, name: str) -> Any:
    """The class that vLLM gets for a member of its enum: an attribute of the module that is registered for it."""
    module, _, attribute = fake.overrides[name].rpartition(".")
    assert module == ROUTE
    return getattr(import_module(module), attribute)


def one_line(error: pytest.ExceptionInfo[ValueError], *words: str) -> None:
    message = str(error.value)
    assert "\n" not in message
    for word in words:
        assert word in message


def test_on_a_cpu_custom_and_the_stock_back_ends_are_routed(fake: FakeVllm) -> None:
    register()
    assert set(fake.overrides) == {"CUSTOM", "TRUNK_MLA", "CPU_ATTN", "CPU_MLA"}
    assert fake.overrides["CUSTOM"] == OUR_PATH
    assert fake.warnings == []


def test_registering_twice_changes_nothing(fake: FakeVllm) -> None:
    register()
    before = dict(fake.overrides)
    register()
    assert fake.overrides == before
    assert fake.warnings == []


def test_without_a_choice_the_stock_back_end_serves(fake: FakeVllm) -> None:
    register()
    assert select(fake, "CPU_ATTN").__name__ == "Fraction"
    assert select(fake, "CPU_MLA").__name__ == "Decimal"


@pytest.mark.parametrize("fake", [{"backend": "FLASH_ATTN"}], indirect=True)
def test_another_choice_is_left_alone(fake: FakeVllm) -> None:
    register()
    assert select(fake, "CPU_ATTN").__name__ == "Fraction"
    assert fake.warnings == []


@pytest.mark.parametrize("fake", [{"backend": "CUSTOM"}], indirect=True)
def test_custom_is_ours(fake: FakeVllm) -> None:
    register()
    assert select(fake, "CPU_ATTN").__name__ == "TrunkAttentionBackend"
    assert any("TrunkAttention" in line and "CPU_ATTN" in line for line in fake.infos)
    assert fake.warnings == []


@pytest.mark.parametrize("fake", [{"backend": "CUSTOM"}, {"backend_per_kind": {LATENT: "CUSTOM"}}], indirect=True)
def test_latent_attention_on_a_cpu_is_refused(fake: FakeVllm) -> None:
    register()
    with pytest.raises(ValueError) as error:
        select(fake, "CPU_MLA")
    one_line(error, "MLA", "only on NVIDIA GPUs", "leave attention_backend out")


def choose(fake: FakeVllm, name: str) -> None:
    """Selects a back end that the plug-in registers."""
    fake.backend = name


def test_the_name_of_latent_attention_is_not_for_other_layers(fake: FakeVllm) -> None:
    register()
    choose(fake, "TRUNK_MLA")
    with pytest.raises(ValueError) as error:
        select(fake, "CPU_ATTN")
    one_line(error, "attention_backend=TRUNK_MLA", "choose CUSTOM", "backend_per_kind")
    with pytest.raises(ValueError) as error:
        select(fake, "CPU_MLA")
    one_line(error, "only on NVIDIA GPUs")


@pytest.mark.parametrize("fake", [{"platform": "cuda", "backend": "CUSTOM"}], indirect=True)
def test_custom_is_what_fits_the_model(fake: FakeVllm) -> None:
    register()
    assert select(fake, "TRUNK_MLA").__name__ == "TrunkMlaBackend"
    assert select(fake, "CUSTOM").__name__ == "TrunkAttentionCudaBackend"
    fake.use_mla = True
    assert select(fake, "CUSTOM").__name__ == "TrunkMlaBackend"
    fake.backend_per_kind = {LATENT: "TRUNK_MLA"}
    assert select(fake, "CUSTOM").__name__ == "TrunkAttentionCudaBackend", "of the layers of the other kind"


@pytest.mark.parametrize("fake", [{"platform": "cuda", "version": "0.31.0", "takes_names": False}], indirect=True)
def test_before_further_names_there_is_custom_alone(fake: FakeVllm) -> None:
    register()
    assert set(fake.overrides) == {"CUSTOM"}
    fake.backend, fake.use_mla = "CUSTOM", True
    assert select(fake, "CUSTOM").__name__ == "TrunkMlaBackend"


@pytest.mark.parametrize("fake", [{"platform": "cuda"}], indirect=True)
def test_a_version_whose_latent_attention_differs_is_named(fake: FakeVllm, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(sys.modules["trunkattn.integrations.vllm.mla"], "TrunkMlaBackend")
    register()
    with pytest.raises(ValueError) as error:
        select(fake, "TRUNK_MLA")
    one_line(error, "vLLM 0.32.0", "lacks something", "newer vLLM")


@pytest.mark.parametrize(
    ("fake", "expected"),
    [
        ({"backend_per_kind": {FULL: "CUSTOM"}}, "TrunkAttentionBackend"),
        ({"backend_per_kind": {FULL: "CPU_ATTN", WINDOWED: "CPU_ATTN"}, "backend": "CUSTOM"}, "Fraction"),
        ({"backend_per_kind": {FULL: "CUSTOM", WINDOWED: "CUSTOM"}, "sliding_window": 64}, "TrunkAttentionBackend"),
        (
            {"backend_per_kind": {WINDOWED: "CUSTOM"}, "backend": "CUSTOM", "sliding_window": 64},
            "TrunkAttentionBackend",
        ),
    ],
    indirect=["fake"],
)
def test_a_choice_by_kind_of_layer(fake: FakeVllm, expected: str) -> None:
    """Layers of a hybrid model that have no KV cache never ask."""
    register()
    assert select(fake, "CPU_ATTN").__name__ == expected


@pytest.mark.parametrize("fake", [{"backend_per_kind": {FULL: "CUSTOM"}, "sliding_window": 64}], indirect=True)
def test_a_choice_among_kinds_that_cannot_be_told_apart_is_refused(fake: FakeVllm) -> None:
    register()
    with pytest.raises(ValueError) as error:
        select(fake, "CPU_ATTN")
    one_line(error, "backend_per_kind", "for both or for neither")


@pytest.mark.parametrize(
    "fake",
    [{"backend_per_kind": {WINDOWED: "CUSTOM"}}, {"backend_per_kind": {FULL: "CPU_ATTN"}, "backend": "CUSTOM"}],
    indirect=True,
)
def test_windows_that_the_configuration_does_not_tell_are_vllms_and_that_is_said(fake: FakeVllm) -> None:
    register()
    assert select(fake, "CPU_ATTN").__name__ == "Fraction"
    (warning,) = fake.warnings
    assert "CUSTOM for sliding_window alone" in warning and "all its layers run in vLLM's CPU_ATTN" in warning


@pytest.mark.parametrize("fake", [{"backend_per_kind": {LATENT: "CPU_MLA"}, "backend": "CUSTOM"}], indirect=True)
def test_latent_layers_may_have_another_back_end(fake: FakeVllm) -> None:
    register()
    assert select(fake, "CPU_MLA").__name__ == "Decimal"


@pytest.mark.parametrize("fake", [{"backend": "CUSTOM", "platform": "cuda", "version": "0.26.0"}], indirect=True)
def test_on_an_nvidia_gpu_nothing_is_routed_and_custom_is_the_back_end_for_it(fake: FakeVllm) -> None:
    register()
    assert set(fake.overrides) == {"CUSTOM", "TRUNK_MLA"}
    assert select(fake, "CUSTOM").__name__ == "TrunkAttentionCudaBackend"
    assert fake.warnings == []


@pytest.mark.parametrize("fake", [{"backend": "CUSTOM", "platform": "rocm"}], indirect=True)
def test_on_another_platform_custom_is_refused(fake: FakeVllm) -> None:
    register()
    with pytest.raises(ValueError) as error:
        select(fake, "CUSTOM")
    one_line(error, "NVIDIA GPUs and on CPUs", "leave attention_backend out")


@pytest.mark.parametrize("fake", [{"backend": "CUSTOM", "version": "0.25.1"}], indirect=True)
def test_an_old_version_is_refused_when_custom_is_selected(fake: FakeVllm) -> None:
    register()
    with pytest.raises(ValueError) as error:
        select(fake, "CPU_ATTN")
    one_line(error, "0.25.1", "upgrade vLLM")


@pytest.mark.parametrize("fake", [{"version": "0.25.1"}], indirect=True)
def test_an_old_version_that_does_not_select_custom_is_left_alone(fake: FakeVllm) -> None:
    register()
    assert select(fake, "CPU_ATTN").__name__ == "Fraction"
    assert fake.warnings == []


@pytest.mark.parametrize("fake", [{"version": "0.8.5"}], indirect=True)
def test_a_version_without_a_registry_gets_one_warning(fake: FakeVllm, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "vllm.v1.attention.backends.registry")
    register()
    (warning,) = fake.warnings
    assert "0.8.5" in warning
    assert "upgrade vLLM" in warning


@pytest.mark.parametrize("fake", [{"version": "0.32.0"}, {"version": "0.34.0"}], indirect=True)
def test_a_version_that_hides_its_registry_gets_one_warning_with_the_reason(
    fake: FakeVllm, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "vllm.v1.attention.backends.registry")
    register()
    (warning,) = fake.warnings
    assert fake.version in warning and "vllm.v1.attention.backends" in warning and "0.26 to 0.33" in warning


@pytest.mark.parametrize("fake", [{"backend": "CUSTOM", "version": "0.34.0"}], indirect=True)
def test_a_new_version_is_used_with_a_warning(fake: FakeVllm) -> None:
    register()
    assert select(fake, "CPU_ATTN").__name__ == "TrunkAttentionBackend"
    (warning,) = fake.warnings
    assert "0.34.0" in warning


@pytest.mark.parametrize("fake", [{"backend": "CUSTOM", "version": "0.34.0"}], indirect=True)
def test_a_new_version_that_lacks_something_is_refused(fake: FakeVllm, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(sys.modules["trunkattn.integrations.vllm.backend"], "TrunkAttentionBackend")
    register()
    with pytest.raises(ValueError) as error:
        select(fake, "CPU_ATTN")
    one_line(error, "0.34.0", "0.26 to 0.33", "lacks something", "TrunkAttentionBackend", "newer trunkattn")


@pytest.mark.parametrize("fake", [{"backend": "CUSTOM", "overrides": {"CUSTOM": OTHER}}], indirect=True)
def test_a_plugin_that_registered_custom_before_us(fake: FakeVllm) -> None:
    register()
    assert fake.overrides["CUSTOM"] == OTHER
    (warning,) = fake.warnings
    assert OTHER in warning
    assert "VLLM_PLUGINS" in warning
    with pytest.raises(ValueError) as error:
        select(fake, "CPU_ATTN")
    one_line(error, OTHER, "VLLM_PLUGINS")


@pytest.mark.parametrize("fake", [{"backend": "CUSTOM"}], indirect=True)
def test_a_plugin_that_registered_custom_after_us(fake: FakeVllm) -> None:
    register()
    fake.overrides["CUSTOM"] = OTHER
    with pytest.raises(ValueError) as error:
        select(fake, "CPU_ATTN")
    one_line(error, OTHER, "VLLM_PLUGINS")


@pytest.mark.parametrize("fake", [{"overrides": {"CPU_ATTN": OTHER}}], indirect=True)
def test_a_plugin_that_took_the_stock_back_end(fake: FakeVllm) -> None:
    register()
    assert fake.overrides["CPU_ATTN"] == OTHER
    (warning,) = fake.warnings
    assert "CPU_ATTN" in warning
    assert OTHER in warning


def test_the_module_has_no_other_names(fake: FakeVllm) -> None:
    register()
    with pytest.raises(AttributeError, match="SOMETHING"):
        _ = import_module(ROUTE).SOMETHING


def test_the_plugin_is_imported_without_a_compiler() -> None:
    """A worker of vLLM 0.32 on a CPU cannot start where Numba has been imported, and Triton may be missing."""
    code = (
        "import sys, trunkattn.integrations.vllm; print([n for n in ('numba', 'triton', 'vllm') if n in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"
