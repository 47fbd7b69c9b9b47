"""Layout of the package: which folder may import which, and what `import hush` loads."""

import ast
import inspect
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import hush

SOURCE = Path(hush.__file__).parent
FOLDERS = [
    *(
        "core",
        "schema",
        "noise",
        "clipping",
        "sampling",
        "plans",
        "accounting",
        "gradients",
        "training",
        "pate",
        "audit",
    ),
    *("data", "models", "report", "cli", "integrations"),
]
NO_TORCH = {"core", "schema", "noise", "clipping", "sampling", "plans", "accounting", "data"}


def imports(path: Path) -> set[str]:
    """What a file imports when it is loaded (not inside functions or for type checkers)."""
    names = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module)
    return names


def test_a_folder_imports_only_folders_above_it() -> None:
    for path in SOURCE.rglob("*.py"):
        folder = path.relative_to(SOURCE).parts[0].removesuffix(".py")
        if folder not in FOLDERS:
            continue
        for name in imports(path):
            top, *rest = name.split(".")
            if top == "hush" and rest:
                assert FOLDERS.index(rest[0]) <= FOLDERS.index(folder), f"{path} imports {name}"
            assert not (top == "torch" and folder in NO_TORCH), f"{path} imports torch"


def loaded_after(*statements: str) -> list[set[str]]:
    """Modules that are there after each statement of a new interpreter."""
    code = "; ".join(f"{statement}; import sys; print(*sys.modules)" for statement in statements)
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return [set(line.split()) for line in result.stdout.splitlines()]


def test_privacy_questions_load_no_deep_learning_library() -> None:
    question = (
        "str(hush.epsilon(hush.Plan(sampling=hush.Poisson(.01), "
        "clipping=hush.L2(1), noise=hush.Gaussian(1)), steps=10, delta=1e-5))"
    )
    imported, asked, trained = loaded_after("import hush", question, "hush.PrivateStep")
    assert "torch" not in imported
    assert "torch" not in asked
    assert "torch" in trained
    assert not {"lightning", "transformers"} & trained


def test_every_public_name_is_there() -> None:
    for name in hush.__all__:
        assert getattr(hush, name) is not None
        assert name in dir(hush)


def test_only_public_names_are_listed() -> None:
    assert set(dir(hush)) == {*hush.__all__, "__version__"}


def undocumented(name: str) -> list[str]:
    """What takes arguments and does not say which, of one public name."""
    value = getattr(hush, name)
    methods = vars(value).items() if inspect.isclass(value) else ()
    own = [(f"{name}.{key}", getattr(value, key)) for key, _ in methods if not key.startswith("_")]
    if "__call__" in dict(methods):
        own.append((f"{name}()", value.__call__))
    if inspect.isfunction(value) or fields_of(value):
        own.append((name, value))
    return [
        key
        for key, part in own
        if (
            fields_of(part)
            or ((inspect.isfunction(part) or inspect.ismethod(part)) and takes_arguments(part))
        )
        and "Args:" not in (inspect.getdoc(part) or "")
    ]


def fields_of(value: object) -> bool:
    return inspect.isclass(value) and bool(getattr(value, "__dataclass_fields__", {}))


def takes_arguments(function: Callable[..., object]) -> bool:
    return bool(set(inspect.signature(function).parameters) - {"self", "cls"})


def test_public_names_say_what_they_take() -> None:
    no_fields = {"Always", "FullBatch"}
    assert [key for name in set(hush.__all__) - no_fields for key in undocumented(name)] == []
    assert undocumented("PrivateStep") == []
    assert takes_arguments(hush.PrivateStep.apply), "the search looks at methods"
